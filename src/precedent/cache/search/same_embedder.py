"""Ensures one embedder per cache, because vectors of two embedders cannot be compared."""

from __future__ import annotations

import sqlite3
from pathlib import Path

from precedent.cache.search.embedder import Embedder, identity_of
from precedent.cache.store import rows
from precedent.cache.store.inspection import inspecting
from precedent.cache.store.records import EmbedderIdentity, Vector
from precedent.errors import CacheError, CacheMismatchError


def claim(connection: sqlite3.Connection, vector: Vector, embedder: EmbedderIdentity | None, where: str) -> None:
    """Record the first vector's embedder as the cache's, and refuse every other one."""
    maker = maker_of(vector, embedder)
    recorded = rows.recorded_embedder(connection)
    if recorded is None:
        rows.record_embedder(connection, maker)
    else:
        require_same(recorded, maker, where)


def maker_of(vector: Vector, embedder: EmbedderIdentity | None) -> EmbedderIdentity:
    """The embedder that made a vector. Raises CacheError if none was given, or if the vector's shape is not its own."""
    if embedder is None:
        raise CacheError("a vector needs the identity of the embedder that made it")
    if vector.shape != (embedder.dimension,):
        raise CacheError(f"a vector of shape {vector.shape} does not come from the embedder {embedder}")
    return embedder


def require_same(recorded: EmbedderIdentity, given: EmbedderIdentity, where: str) -> None:
    """Raise CacheMismatchError unless the vectors of both embedders are comparable."""
    if (recorded.fingerprint, recorded.dimension) != (given.fingerprint, given.dimension):
        raise CacheMismatchError(
            f"{where} was filled with the embedder {recorded}, not with {given}; it is left untouched: open it with "
            "the first one or give another path"
        )


def check_file(file: Path, embedder: Embedder | None) -> None:
    """Raise what `inspecting` raises, or CacheMismatchError if another embedder made the file's vectors."""
    with inspecting(file) as connection:
        recorded = rows.recorded_embedder(connection)
    if recorded is not None and embedder is not None:
        require_same(recorded, identity_of(embedder), str(file))
