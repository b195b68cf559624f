"""What each key has asked for and got, for `/metrics`: a bounded number of keys by name, the others together."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Collection

from precedent_server.keys import Caller

MOST_KEYS = 64
"""Keys that `/metrics` names: each is a label of several time series in Prometheus."""

OTHER = "other"
"""Stands for the keys beyond `MOST_KEYS`, as key and as tenant; a key of this name is counted there too."""

Owner = tuple[str, str]
"""The names of a key and of its tenant."""


class KeyUsage:
    """Counts by key; belongs to the event loop's thread.

    The first `most` keys that ask are counted by name, until they leave `owners`, the keys that there are. What others
    use is added to `other` for good.
    """

    def __init__(self, owners: Callable[[], Collection[Owner]], most: int = MOST_KEYS) -> None:
        self._owners, self._most = owners, most
        self._counts: dict[Owner, Counter[str]] = {}
        self._others = Counter[str]()

    def of(self, caller: Caller) -> Counter[str]:
        """The counts of a caller, to be added to."""
        owner = caller.name, caller.tenant
        if owner not in self._counts:
            if len(self._counts) >= self._most:
                self._forget_those_gone()
            if len(self._counts) >= self._most or caller.name == OTHER:
                return self._others
            self._counts[owner] = Counter()
        return self._counts[owner]

    def counts(self) -> list[tuple[Owner, Counter[str]]]:
        """The counts of keys that there still are, and of all others together."""
        self._forget_those_gone()
        return [*self._counts.items(), *([((OTHER, OTHER), self._others)] if self._others else [])]

    def _forget_those_gone(self) -> None:
        owners = self._owners()
        self._counts = {owner: counts for owner, counts in self._counts.items() if owner in owners}
