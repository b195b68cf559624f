"""A bounded queue: how many answers run or wait at once, of everybody and of each key."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager

from precedent_server.errors import BUSY, ApiError, stopping
from precedent_server.settings import ServerLimits

RETRY_SECONDS = 1


class Places:
    """Hands out places for answers; belongs to the event loop's thread."""

    def __init__(self, limits: ServerLimits) -> None:
        self._limits = limits
        self._taken = Counter[str]()
        self.closed = False

    @property
    def num_taken(self) -> int:
        """Answers that run or wait now."""
        return self._taken.total()

    @contextmanager
    def taken(self, name: str, number: int = 1) -> Iterator[None]:
        """Hold so many places for the key called `name`. Raises ApiError (429, 503 when the server stops)."""
        if self.closed:
            raise stopping()
        most = min(self._limits.max_queued, self._limits.max_queued_per_key)
        if number > most:
            raise ApiError(f"the request asks for {number} answers, and at most {most} may run at once", param="n")
        whose = "this key has" if self._taken[name] + number > self._limits.max_queued_per_key else None
        whose = "there are" if self._taken.total() + number > self._limits.max_queued else whose
        if whose is not None:
            raise ApiError(
                f"{whose} too many requests already: try again later", status=429, kind=BUSY,
                code="rate_limit_exceeded", headers={"Retry-After": str(RETRY_SECONDS)},
            )  # fmt: skip
        self._taken[name] += number
        try:
            yield
        finally:
            self._taken[name] -= number
            if not self._taken[name]:
                del self._taken[name]
