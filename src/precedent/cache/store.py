"""The completion store: the truth of the cache. SQLite is the embedded one; `CompletionStore` is the seam for others.

`precedent.testing.StoreContract` is the test class that every store has to pass.
"""

from __future__ import annotations

import logging
import os
import sqlite3
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Protocol, Self

import numpy as np

from precedent.cache import rows
from precedent.cache.database import Database, check_header, create_file, database_path, inspecting
from precedent.cache.directory import directory_of_all
from precedent.cache.embedder import Embedder, identity_of
from precedent.cache.eviction import evict
from precedent.cache.index import Ids
from precedent.cache.partition import Partition
from precedent.cache.records import (
    CacheStats,
    Completions,
    EmbedderIdentity,
    NewCompletion,
    Payload,
    Selection,
    Vector,
    storable,
)
from precedent.cache.sealing import IndexFolder
from precedent.errors import CacheError, CacheMismatchError

logger = logging.getLogger("precedent.cache")

ALL = Selection()
ID = rows.COLUMNS.split(", ").index("id")
DEFAULT_MAX_BYTES = 512 * 2**20
"""Payload bytes (tokens, vectors, texts) that a cache holds unless told otherwise."""


class CompletionStore(Protocol):
    """Completions with their vectors, in partitions by (tenant, tokenizer) that no method reads across.

    Ids rise with every insertion and are never used again. All methods may be called from several threads.
    """

    def insert(self, completion: NewCompletion, vector: Vector | None, embedder: EmbedderIdentity | None) -> int:
        """Store durably and return the id; 0 if the store is read-only or full and stored nothing."""

    def since(self, tenant: str, tokenizer: str, after_id: int) -> Completions:
        """The partition's completions with a higher id, in rising order; microseconds when there are none."""

    def vectors_since(self, tenant: str, tokenizer: str, after_id: int) -> tuple[Ids, Vector]:
        """The same for ids `[n]` and vectors `[n, dimension]` of the completions that have one."""

    def stamp(self) -> tuple[int, int]:
        """Changes whenever records may have come or gone, in whatever process; costs microseconds."""

    def epoch(self) -> int:
        """Grows whenever records have gone."""

    def embedder(self) -> EmbedderIdentity | None:
        """Which embedder made the vectors, None as long as there are none."""

    def credit(self, counts: Mapping[int, tuple[int, int]]) -> None:
        """Add (accepted, rejected) tokens to completions; ids that are gone are ignored."""

    def list(self, selection: Selection, limit: int | None) -> Completions:
        """The selected completions, the newest first."""

    def forget(self, selection: Selection) -> int:
        """Erase the selected completions for good; returns their number."""

    def stats(self) -> CacheStats:
        """The cache at a glance."""

    def close(self) -> None:
        """Release everything; more than once does no harm."""


class SQLiteStore:
    """The embedded store: one SQLite file in WAL mode, or a database in memory.

    Safe for several threads and processes; an insertion is on disk when it returns. Beyond `max_bytes` of payload the
    least useful completions are evicted.
    """

    def __init__(self, database: Database, *, max_bytes: int = DEFAULT_MAX_BYTES) -> None:
        if max_bytes < 1:
            raise CacheError(f"max_bytes={max_bytes} must be at least 1")
        self._database, self._max_bytes = database, max_bytes
        self._segments = None if database.path is None else IndexFolder(database.path)
        self._nothing_after: dict[tuple[str, str], tuple[tuple[int, int], int]] = {}
        self._epoch: tuple[tuple[int, int], int] | None = None
        self._damaged: set[int] = set()

    @classmethod
    def open(
        cls,
        path: str | Path | None = None,
        *,
        embedder: Embedder | None = None,
        max_bytes: int = DEFAULT_MAX_BYTES,
        create: bool = True,
        read_only: bool = False,
    ) -> Self:
        """Open or create a store; in memory without a `path`.

        Raises CacheError when the file is damaged, foreign, missing and not to be created, or (where an `embedder` is
        given) filled by another embedder; it is left untouched.
        """
        if path is None:
            return cls(Database(None, schema=rows.SCHEMA), max_bytes=max_bytes)
        try:
            file = database_path(path)
            if create and not read_only:
                create_file(file, rows.SCHEMA)
            _check_file(file, embedder)
            fixed = read_only or not (os.access(file, os.W_OK) and os.access(file.parent, os.W_OK))
            return cls(Database(file, schema=rows.SCHEMA, read_only=fixed), max_bytes=max_bytes)
        except (OSError, ValueError, sqlite3.Error) as error:  # ValueError: a path that holds a NUL character
            raise CacheError(
                f"cannot open the cache {str(path)!r}: {error}; give a folder that you may write"
            ) from error

    def insert(self, completion: NewCompletion, vector: Vector | None, embedder: EmbedderIdentity | None) -> int:
        """Store durably and return the id; 0 if the store is read-only or the completion larger than `max_bytes`."""
        payload = Payload(storable(completion), vector)
        if self._database.refuses_writes() or self._too_large(payload):
            return 0
        try:
            return self._insert(payload, embedder)
        except CacheError:
            if self._database.refuses_writes():  # the disk has just run full
                return 0
            raise

    def _insert(self, payload: Payload, embedder: EmbedderIdentity | None) -> int:
        with self._database.write() as connection:
            if payload.vector is not None:
                _claim(connection, embedder, self._database)
            completion_id = rows.insert_row(connection, payload)
            evict(connection, self._max_bytes, keep_id=completion_id)
        return completion_id

    def _too_large(self, payload: Payload) -> bool:
        if payload.size > self._max_bytes:
            logger.warning("a completion of %d bytes was not stored: max_bytes=%d", payload.size, self._max_bytes)
        return payload.size > self._max_bytes

    def since(self, tenant: str, tokenizer: str, after_id: int = 0) -> Completions:
        """The partition's completions with a higher id, in rising order; microseconds when there are none."""
        stamp, partition = self._database.stamp(), (tenant, tokenizer)
        known = self._nothing_after.get(partition)
        if known is not None and known[0] == stamp and known[1] <= after_id:
            return []
        found = self._select("WHERE tenant = ? AND tokenizer = ? AND id > ? ORDER BY id", (*partition, after_id))
        self._nothing_after[partition] = stamp, found[-1].id if found else after_id
        return found

    def vectors_since(self, tenant: str, tokenizer: str, after_id: int = 0) -> tuple[Ids, Vector]:
        """Ids `[n]` in rising order and vectors `[n, dimension]` of the partition's completions that have one."""
        query = "SELECT id, vector, vector_checksum FROM completion WHERE tenant = ? AND tokenizer = ? AND id > ?"
        with self._database.read() as connection:
            found = connection.execute(f"{query} AND vector IS NOT NULL ORDER BY id", (tenant, tokenizer, after_id))
            read = [(row[0], rows.vector_of(row[1], row[2])) for row in found]
        whole = [(row_id, vector) for row_id, vector in read if vector is not None]
        self._report_damaged([row_id for row_id, vector in read if vector is None])
        ids = np.array([row_id for row_id, _ in whole], dtype=np.int64)
        return ids, np.array([vector for _, vector in whole], dtype=np.float32)

    def stamp(self) -> tuple[int, int]:
        """Changes whenever records may have come or gone, in whatever process; costs microseconds."""
        return self._database.stamp()

    def partition(self, tenant: str, tokenizer: str) -> Partition | None:
        """The partition with its segments, None in memory."""
        return None if self._segments is None else Partition(self._database, self._segments, tenant, tokenizer)

    def epoch(self) -> int:
        """Grows whenever records have gone."""
        stamp = self._database.stamp()
        if self._epoch is None or self._epoch[0] != stamp:
            with self._database.read() as connection:
                value = connection.execute("SELECT value FROM meta WHERE key = 'epoch'").fetchone()[0]
            self._epoch = stamp, int(value)
        return self._epoch[1]

    def embedder(self) -> EmbedderIdentity | None:
        """Which embedder made the vectors, None as long as there are none."""
        with self._database.read() as connection:
            return rows.recorded_embedder(connection)

    def credit(self, counts: Mapping[int, tuple[int, int]]) -> None:
        """Add (accepted, rejected) tokens to completions; ids that are gone are ignored, and so is a read-only file."""
        if any(accepted < 0 or rejected < 0 for accepted, rejected in counts.values()):
            raise CacheError("credit takes numbers of accepted and rejected tokens, which cannot be negative")
        if not counts or self._database.refuses_writes():
            return
        update = "UPDATE completion SET hits = hits + ?, accepted = accepted + ?, rejected = rejected + ? WHERE id = ?"
        try:
            with self._database.write() as connection:
                connection.executemany(
                    update, [(accepted > 0, accepted, rejected, i) for i, (accepted, rejected) in counts.items()]
                )
        except CacheError:
            if not self._database.refuses_writes():
                raise

    def list(self, selection: Selection = ALL, limit: int | None = None) -> Completions:
        """The selected completions, the newest first."""
        where, values = rows.conditions(selection)
        return self._select(f"{where} ORDER BY id DESC LIMIT ?", (*values, -1 if limit is None else limit))

    def forget(self, selection: Selection) -> int:
        """Erase the selected completions from table, file, log and segments; returns their number.

        Raises CacheError when the store is read-only, nothing is selected, or another process keeps their bytes (they
        are forgotten all the same).
        """
        if selection.everything:
            raise CacheError("forget needs a condition: tenant, before, containing or ids")
        if self._database.read_only:
            raise CacheError(f"{self._database} is read-only, so nothing can be forgotten in it")
        with self._database.write() as connection:
            number = rows.delete_rows(connection, selection)
        try:
            if self._segments is not None:
                self._segments.erase_gone(lambda: directory_of_all(self._database))
        finally:
            self._database.erase_freed()
        return number

    def stats(self) -> CacheStats:
        """The cache at a glance."""
        with self._database.read() as connection:
            tenants = rows.stats_by_tenant(connection)
            embedder = rows.recorded_embedder(connection)
        return CacheStats(
            path=None if self._database.path is None else str(self._database.path),
            read_only=self._database.read_only,
            records=sum(tenant.records for tenant in tenants),
            tokens=sum(tenant.tokens for tenant in tenants),
            bytes=sum(tenant.bytes for tenant in tenants),
            max_bytes=self._max_bytes,
            file_bytes=self._database.size(),
            embedder=embedder,
            tenants=tuple(tenants),
        )

    def close(self) -> None:
        """Release everything; more than once does no harm."""
        self._database.close()

    def _select(self, clause: str, values: tuple[object, ...]) -> Completions:
        with self._database.read() as connection:
            found = connection.execute(f"SELECT {rows.COLUMNS} FROM completion {clause}", values).fetchall()
        read = [(row[ID], rows.completion_of(row)) for row in found]
        self._report_damaged([row_id for row_id, completion in read if completion is None])
        return [completion for _, completion in read if completion is not None]

    def _report_damaged(self, ids: Iterable[int]) -> None:
        for row_id in set(ids) - self._damaged:
            self._damaged.add(row_id)
            logger.warning("completion %d in %s is damaged and left out; forget it by its id", row_id, self._database)


def _check_file(file: Path, embedder: Embedder | None) -> None:
    if not file.exists():
        raise CacheError(f"there is no cache at {file}")
    check_header(file)
    with inspecting(file) as connection:
        recorded = rows.recorded_embedder(connection)
    if recorded is not None and embedder is not None:
        require_same(recorded, identity_of(embedder), str(file))


def _claim(connection: sqlite3.Connection, embedder: EmbedderIdentity | None, database: Database) -> None:
    """The first vector's embedder is the cache's; every other one is refused."""
    if embedder is None:
        raise CacheError("a vector needs the identity of the embedder that made it")
    recorded = rows.recorded_embedder(connection)
    if recorded is None:
        rows.record_embedder(connection, embedder)
    else:
        require_same(recorded, embedder, str(database))


def require_same(recorded: EmbedderIdentity, given: EmbedderIdentity, where: str) -> None:
    """Raise CacheMismatchError unless the vectors of both embedders may be compared."""
    if (recorded.fingerprint, recorded.dimension) != (given.fingerprint, given.dimension):
        raise CacheMismatchError(
            f"{where} was filled with the embedder {recorded}, not with {given}; left untouched, open it with the "
            "first one or give another path"
        )
