"""Whether the store fits and answers: failures are counted, and logged once until it answers again."""

from __future__ import annotations

import logging
from concurrent.futures import Future
from threading import Lock
from typing import Any

from precedent.cache import SpeculationCache
from precedent.errors import CacheError, CacheMismatchError

_log = logging.getLogger(__name__)


class StoreHealth:
    """Hears of every finished call to the store, on any thread."""

    def __init__(self) -> None:
        self._lock = Lock()
        self.failures, self.away = 0, False

    def report(self, work: Future[Any]) -> None:
        """Take note of a finished call; a cancelled one says nothing."""
        if not work.cancelled():
            self.note(work.exception())

    def note(self, error: BaseException | None) -> None:
        """Count a failure, and log the first one after a success; log as well when the store answers again."""
        with self._lock:
            was_away, self.away = self.away, error is not None
            self.failures += self.away
        if error is not None and not was_away:
            _log.warning("the store failed, drafting goes on with what the requests bring: %s", error)
        elif was_away and error is None:
            _log.info("the store answers again")


def check_tokenizer(cache: SpeculationCache, fingerprint: str, health: StoreHealth) -> None:
    """Raise CacheMismatchError if a store holds completions of other tokenizers only.

    A store that does not answer is noted as away; its completions have their tokenizer's fingerprint, so none of
    another tokenizer is ever drafted from.
    """
    try:
        stored = cache.tokenizers()
    except CacheMismatchError:
        raise
    except CacheError as error:
        health.note(error)
        return
    if stored and fingerprint not in stored:
        others = ", ".join(sorted(stored)[:3])
        raise CacheMismatchError(
            f"the store holds completions of other tokenizers only ({others}; this one is {fingerprint}): "
            "give the tokenizer that wrote them, or another store"
        )
