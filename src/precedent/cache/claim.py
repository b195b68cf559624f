"""One cache, one embedder: vectors of two cannot be compared, so the first one's is the cache's."""

from __future__ import annotations

import sqlite3

from precedent.cache import rows
from precedent.cache.records import EmbedderIdentity
from precedent.errors import CacheError, CacheMismatchError


def claim(connection: sqlite3.Connection, embedder: EmbedderIdentity | None, where: str) -> None:
    """The first vector's embedder is the cache's; every other one is refused."""
    if embedder is None:
        raise CacheError("a vector needs the identity of the embedder that made it")
    recorded = rows.recorded_embedder(connection)
    if recorded is None:
        rows.record_embedder(connection, embedder)
    else:
        require_same(recorded, embedder, where)


def require_same(recorded: EmbedderIdentity, given: EmbedderIdentity, where: str) -> None:
    """Raise CacheMismatchError unless the vectors of both embedders may be compared."""
    if (recorded.fingerprint, recorded.dimension) != (given.fingerprint, given.dimension):
        raise CacheMismatchError(
            f"{where} was filled with the embedder {recorded}, not with {given}; left untouched, open it with the "
            "first one or give another path"
        )
