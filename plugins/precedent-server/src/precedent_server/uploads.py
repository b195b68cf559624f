"""Bodies on their way in: how many bytes of them a server holds before it has read them, in all and of each key."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from precedent_server.errors import BUSY, ApiError
from precedent_server.settings import ServerLimits

RETRY_SECONDS = 5


class Uploads:
    """Counts the bytes of unfinished bodies; belongs to the event loop's thread."""

    def __init__(self, limits: ServerLimits) -> None:
        self._limits = limits
        self._held = Counter[str]()

    @property
    def num_bytes(self) -> int:
        """Bytes held now."""
        return self._held.total()

    @contextmanager
    def counted(self, name: str) -> Iterator[Callable[[int], None]]:
        """Call what this returns with the size of each part of a body of the key called `name`.

        That raises ApiError (429) if there are too many bytes already. At the end, the body's bytes count no more.
        """
        size = 0

        def add(number: int) -> None:
            nonlocal size
            limits = self._limits
            if self._held[name] + number > limits.max_upload_bytes_per_key:
                raise _too_many(f"this key has unfinished requests of {limits.max_upload_bytes_per_key:,} bytes")
            if self.num_bytes + number > limits.max_upload_bytes:
                raise _too_many(f"there are unfinished requests of {limits.max_upload_bytes:,} bytes")
            self._held[name] += number
            size += number

        try:
            yield add
        finally:
            self._held[name] -= size
            if not self._held[name]:
                del self._held[name]


def _too_many(what: str) -> ApiError:
    return ApiError(
        f"{what} already: try again later", status=429, kind=BUSY, code="rate_limit_exceeded",
        headers={"Retry-After": str(RETRY_SECONDS)},
    )  # fmt: skip
