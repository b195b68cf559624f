"""Follows what other processes forget, so that it leaves this process's memory without waiting for a request."""

from __future__ import annotations

import logging
import threading
from time import monotonic
from typing import Self

from precedent.cache import SpeculationCache
from precedent.errors import CacheError

logger = logging.getLogger("precedent.cache")

FOLLOW_SECONDS = 1.0
"""Time between two looks; each is one small query, or microseconds for a file."""


class Following:
    """Looks every `seconds`, on a thread of its own, whether the store lost completions, and erases those from memory.

    Conversations that an engine keeps go only when something was forgotten: an eviction is no wish to have them erased.
    `with Following(cache):`; the cache stays its owner's to close, after this. A store that is away is asked again at
    every look; that is logged once per absence.
    """

    def __init__(self, cache: SpeculationCache, seconds: float = FOLLOW_SECONDS) -> None:
        self._cache, self._seconds = cache, seconds
        self._seen: tuple[int, int] | None = None
        self._looked, self._away = monotonic(), False
        self._ending = threading.Event()
        self._thread = threading.Thread(target=self._run, name="precedent-following", daemon=True)

    @property
    def seconds_behind(self) -> float:
        """Seconds since memory last agreed with the store."""
        return monotonic() - self._looked

    def look(self) -> bool:
        """Look once; returns whether anything was erased. Raises CacheError, and the next look then tries again."""
        now, epoch, forgets = monotonic(), self._cache.epoch(), self._cache.forgets()
        changed = (epoch, forgets) != self._seen
        if changed:  # the first look erases as well: memory may have been read before it
            self._cache.erase_gone(forgotten=self._seen is None or forgets != self._seen[1])
        self._seen, self._looked = (epoch, forgets), now
        return changed

    def close(self) -> None:
        """End the thread; may be called again."""
        self._ending.set()
        if self._thread.is_alive():
            self._thread.join()

    def _run(self) -> None:
        while not self._ending.is_set():
            try:
                self.look()
                self._away = False
            except CacheError as error:
                if not self._away:
                    logger.warning("what other processes forget stays in memory until the store is back: %s", error)
                self._away = True
            self._ending.wait(self._seconds)

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.close()
