"""How much callers may hold at once, in all and by key: places for answers, and bytes of bodies on their way in."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from precedent_server.errors import BUSY, ApiError


class Quota:
    """Bounds what is held, of everybody and of each key; belongs to the event loop's thread."""

    def __init__(self, what: str, most: int, most_per_key: int, retry_seconds: int) -> None:
        self._what, self._retry = what, str(retry_seconds)
        self.most, self.most_per_key = most, most_per_key
        self._held = Counter[str]()

    @property
    def total(self) -> int:
        """What is held now."""
        return self._held.total()

    @contextmanager
    def held(self, name: str, number: int = 0) -> Iterator[Callable[[int], None]]:
        """Hold so much for the key called `name`, and more with what this returns, until the end of the block.

        Raises ApiError (429) where a bound is reached.
        """
        size = 0

        def add(more: int) -> None:
            nonlocal size
            of_key = self._held[name] + more > self.most_per_key
            if of_key or self.total + more > self.most:
                raise ApiError(
                    f"{'this key has' if of_key else 'there are'} too many {self._what} already: try again later",
                    status=429, kind=BUSY, code="rate_limit_exceeded", headers={"Retry-After": self._retry},
                )  # fmt: skip
            self._held[name] += more
            size += more

        try:
            add(number)
            yield add
        finally:
            self._held[name] -= size
            if not self._held[name]:
                del self._held[name]
