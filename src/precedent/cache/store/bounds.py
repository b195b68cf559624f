"""How much a cache may hold."""

from __future__ import annotations

from dataclasses import dataclass, fields

from precedent.errors import CacheError

DEFAULT_MAX_BYTES = 512 * 2**20
"""Payload bytes (tokens, vectors, texts) that a cache holds unless told otherwise."""


@dataclass(frozen=True, slots=True)
class Bounds:
    """Payload bytes and completions in all, seconds since a completion was first stored, and a tenant's payload bytes.

    None is no bound. Raises CacheError for a bound below 1.
    """

    max_bytes: int = DEFAULT_MAX_BYTES
    max_records: int | None = None
    max_age: float | None = None
    max_tenant_bytes: int | None = None

    def __post_init__(self) -> None:
        for field in fields(self):
            value = getattr(self, field.name)
            if value is not None and not value >= 1:
                raise CacheError(f"{field.name}={value} must be at least 1")

    @property
    def largest(self) -> int:
        """Payload bytes of the largest completion that can be held."""
        return min(self.max_bytes, self.max_tenant_bytes or self.max_bytes)
