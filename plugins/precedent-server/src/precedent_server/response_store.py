"""Keeps responses in memory, so that a request can name the one that it continues. A restart forgets them all."""

from __future__ import annotations

import threading
import time
import weakref
from collections import Counter, OrderedDict
from collections.abc import Callable
from dataclasses import dataclass, field

from precedent.cache import SpeculationCache
from precedent_server.settings import ServerLimits
from precedent_server.usage import Owner


@dataclass(slots=True, eq=False)
class KeptResponse:
    """A response as JSON, and the conversation up to its end: lists of items as JSON, which later responses share.

    `nbytes` counts both in full; `used` is when it was last used.
    """

    body: bytes
    conversation: tuple[bytes, ...]
    used: float = 0.0
    nbytes: int = field(init=False)

    def __post_init__(self) -> None:
        self.nbytes = len(self.body) + sum(map(len, self.conversation))


class ResponseStore:
    """Responses by owner and id, least recently used first; safe on any thread. What one owns, no other can name.

    `ServerLimits` bounds their number and bytes for each owner, all bytes together, and the time since their last use;
    beyond a bound the least recently used are dropped. When a cache forgets something, all are dropped: which of them
    hold the forgotten words is not known. `num_cleared` counts how often that was.
    """

    def __init__(self, limits: ServerLimits, clock: Callable[[], float] = time.monotonic) -> None:
        self._limits, self._clock, self._lock = limits, clock, threading.Lock()
        self._kept = OrderedDict[tuple[Owner, str], KeptResponse]()
        self._numbers, self._bytes = Counter[Owner](), Counter[Owner]()
        self._caches = weakref.WeakSet[SpeculationCache]()
        self.num_cleared = 0

    def get(self, owner: Owner, name: str) -> KeptResponse | None:
        """An owner's response by its id; None if it is not kept, or not any more."""
        with self._lock:
            self._drop_old()
            found = self._kept.get((owner, name))
            if found is not None:
                found.used = self._clock()
                self._kept.move_to_end((owner, name))
            return found

    def keep(self, owner: Owner, name: str, kept: KeptResponse, num_cleared: int) -> None:
        """Keep a response, unless it alone is longer than a bound, or all were dropped since there were `num_cleared`.

        What was forgotten while an answer was written may be part of its conversation.
        """
        limits, kept.used = self._limits, self._clock()
        most, most_of_all = limits.max_stored_bytes_per_key, limits.max_stored_bytes
        with self._lock:
            self._drop_old()
            if kept.nbytes > min(most, most_of_all) or num_cleared != self.num_cleared:
                return
            while self._numbers[owner] >= limits.max_stored_per_key or self._bytes[owner] + kept.nbytes > most:
                self._drop(next(key for key in self._kept if key[0] == owner))
            while self._bytes.total() + kept.nbytes > most_of_all:
                self._drop(next(iter(self._kept)))
            self._kept[owner, name] = kept
            self._numbers[owner] += 1
            self._bytes[owner] += kept.nbytes

    def drop(self, owner: Owner, name: str) -> bool:
        """Drop a response; False if it is not kept."""
        with self._lock:
            self._drop_old()
            return (owner, name) in self._kept and self._drop((owner, name))

    def follow(self, cache: SpeculationCache | None) -> None:
        """From now on drop all responses when this cache forgets something."""
        with self._lock:
            if cache is None or cache in self._caches:
                return
            self._caches.add(cache)
        cache.on_gone(self.clear, only_forgotten=True)

    def clear(self) -> None:
        """Drop all responses."""
        with self._lock:
            self._kept.clear()
            self._numbers.clear()
            self._bytes.clear()
            self.num_cleared += 1

    def _drop(self, key: tuple[Owner, str]) -> bool:
        dropped, owner = self._kept.pop(key), key[0]
        self._numbers[owner] -= 1
        self._bytes[owner] -= dropped.nbytes
        if not self._numbers[owner]:
            del self._numbers[owner], self._bytes[owner]
        return True

    def _drop_old(self) -> None:
        oldest = self._clock() - self._limits.stored_seconds
        while self._kept and next(iter(self._kept.values())).used < oldest:
            self._drop(next(iter(self._kept)))
