"""Holds completions back until their run has ended well."""

from __future__ import annotations

from typing import TYPE_CHECKING

from precedent.runtime.process import Lock

if TYPE_CHECKING:
    from precedent.cache import Completion, SpeculationCache


class PendingCompletions:
    """The completions of one run's calls (`learning=` of a call); nothing is stored before `store`."""

    def __init__(self) -> None:
        self._lock = Lock()
        self._waiting: list[tuple[SpeculationCache, Completion]] = []

    def __repr__(self) -> str:
        return f"{type(self).__name__}()"  # equal for all instances: it must not affect an answer cache's key

    def __deepcopy__(self, memo: object) -> PendingCompletions:
        return self  # copies of a call's settings collect for the same run

    def add(self, cache: SpeculationCache, completion: Completion) -> None:
        """Keep a completion for `cache` until the run ends; called on one of the engine's threads."""
        with self._lock:
            self._waiting.append((cache, completion))

    def store(self) -> None:
        """Store all completions. Raises CacheError if a cache cannot be written."""
        with self._lock:
            waiting, self._waiting = self._waiting, []
        for cache, completion in waiting:
            cache.insert(completion)
