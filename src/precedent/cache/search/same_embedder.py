"""One cache, one embedder: vectors of two cannot be compared."""

from __future__ import annotations

import sqlite3

from precedent.cache.store import rows
from precedent.cache.store.records import EmbedderIdentity, Vector
from precedent.errors import CacheError, CacheMismatchError


def claim(connection: sqlite3.Connection, vector: Vector, embedder: EmbedderIdentity | None, where: str) -> None:
    """The first vector's embedder is the cache's; every other one is refused."""
    maker = maker_of(vector, embedder)
    recorded = rows.recorded_embedder(connection)
    if recorded is None:
        rows.record_embedder(connection, maker)
    else:
        require_same(recorded, maker, where)


def maker_of(vector: Vector, embedder: EmbedderIdentity | None) -> EmbedderIdentity:
    """The embedder that made a vector. Raises CacheError if none was named, or if the vector is none of its own."""
    if embedder is None:
        raise CacheError("a vector needs the identity of the embedder that made it")
    if vector.shape != (embedder.dimension,):
        raise CacheError(f"a vector of shape {vector.shape} is not one of the embedder {embedder}")
    return embedder


def require_same(recorded: EmbedderIdentity, given: EmbedderIdentity, where: str) -> None:
    """Raise CacheMismatchError unless the vectors of both embedders may be compared."""
    if (recorded.fingerprint, recorded.dimension) != (given.fingerprint, given.dimension):
        raise CacheMismatchError(
            f"{where} was filled with the embedder {recorded}, not with {given}; left untouched, open it with the "
            "first one or give another path"
        )
