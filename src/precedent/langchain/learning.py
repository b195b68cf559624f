"""Completions that wait until it is known whether their run ended well."""

from __future__ import annotations

from typing import TYPE_CHECKING

from precedent.runtime.process import Lock

if TYPE_CHECKING:
    from precedent.cache import NewCompletion, SpeculationCache


class PendingCompletions:
    """What the calls of one run would have stored; `learning=` of a call. Nothing is stored before `store`."""

    def __init__(self) -> None:
        self._lock = Lock()
        self._waiting: list[tuple[SpeculationCache, NewCompletion]] = []

    def __len__(self) -> int:
        return len(self._waiting)

    def __repr__(self) -> str:
        return f"{type(self).__name__}()"  # the same for all: an answer cache's key must not depend on it

    def __deepcopy__(self, memo: object) -> PendingCompletions:
        """Itself: what copies of a call's settings collect belongs to the same run."""
        return self

    def add(self, cache: SpeculationCache, completion: NewCompletion) -> None:
        """Keep a completion for `cache` until the end of the run; called on a thread of the engine's."""
        with self._lock:
            self._waiting.append((cache, completion))

    def store(self) -> int:
        """Store all of them; returns their number. Raises CacheError when a cache cannot be written."""
        with self._lock:
            waiting, self._waiting = self._waiting, []
        for cache, completion in waiting:
            cache.insert(completion)
        return len(waiting)
