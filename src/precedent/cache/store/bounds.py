"""Limits on how much a cache may hold."""

from __future__ import annotations

from dataclasses import dataclass, fields

from precedent.errors import CacheError

DEFAULT_MAX_BYTES = 512 * 2**20
"""Default limit on the payload bytes (tokens, vectors, texts) of a cache."""

DEFAULT_MAX_PREFIX_BYTES = 2**30
"""Default limit on the keys and values of prompts' beginnings on disk."""

DEFAULT_MAX_INDEX_BYTES = 256 * 2**20
"""Default limit on the token indexes of a cache in memory: some 20 million tokens."""

DEFAULT_MAX_MAPPED_BYTES = 4 * 2**30
"""The same for a cache on disk, which maps large arrays (`snapshot.scratch`): some 300 million tokens."""


def check_index_bytes(max_index_bytes: int) -> None:
    """Raise CacheError unless an index can have this many bytes."""
    if max_index_bytes < 1:
        raise CacheError(f"max_index_bytes={max_index_bytes} must be at least 1")


@dataclass(frozen=True, slots=True)
class Bounds:
    """Limits on total payload bytes, number of completions, seconds since first stored, and payload bytes per tenant.

    `max_prefix_bytes` bounds the keys and values kept beside a cache on disk, whose age `max_age` bounds too. None
    means no limit. Raises CacheError for a limit below 1.
    """

    max_bytes: int = DEFAULT_MAX_BYTES
    max_records: int | None = None
    max_age: float | None = None
    max_tenant_bytes: int | None = None
    max_prefix_bytes: int = DEFAULT_MAX_PREFIX_BYTES

    def __post_init__(self) -> None:
        for field in fields(self):
            value = getattr(self, field.name)
            if value is not None and not value >= 1:
                raise CacheError(f"{field.name}={value} must be at least 1")

    @property
    def largest(self) -> int:
        """Payload bytes of the largest completion that fits."""
        return min(self.max_bytes, self.max_tenant_bytes or self.max_bytes)
