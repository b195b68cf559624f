"""The embedded store: completions in one SQLite file, the cache's source of truth."""

from __future__ import annotations

import logging
import os
import sqlite3
import time
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Self, TypeVar

import numpy as np

from precedent.cache.maintain.transfer import Transfers
from precedent.cache.maintain.verifying import verify_cache
from precedent.cache.search.embedder import Embedder
from precedent.cache.search.partition_vectors import PartitionVectors
from precedent.cache.search.same_embedder import check_file, claim
from precedent.cache.snapshot.partition import Partition
from precedent.cache.snapshot.sealing import IndexFolder
from precedent.cache.store import rows
from precedent.cache.store.arrays import Ids
from precedent.cache.store.bounds import DEFAULT_MAX_BYTES, Bounds
from precedent.cache.store.counters import Counters, count_forget
from precedent.cache.store.database import Database
from precedent.cache.store.directory import directory_of_all
from precedent.cache.store.eviction import evict, expire, prune
from precedent.cache.store.files import alone_in, check_folders, create_file, database_path, sweep
from precedent.cache.store.inspection import UnreadableError, set_aside
from precedent.cache.store.prefix_files import prefixes_beside
from precedent.cache.store.records import (
    CacheStats,
    Completions,
    EmbedderIdentity,
    NewCompletion,
    Payload,
    Selection,
    Vector,
    as_stored,
    storable,
)
from precedent.cache.store.report import VerifyReport
from precedent.errors import CacheError

logger = logging.getLogger("precedent.cache")

Result = TypeVar("Result")

ALL = Selection()

ERASED_AGAIN_AFTER = 60.0
"""Seconds after which an erasure that failed is tried again."""


class SQLiteStore(Transfers):
    """The embedded store: one SQLite file in WAL mode, or a database in memory.

    Safe for several threads and processes; an insertion is on disk when it returns. Beyond `bounds`, the least useful
    completions are evicted. `clock` returns seconds since the epoch.
    """

    def __init__(
        self, database: Database, bounds: Bounds | None = None, *, clock: Callable[[], float] = time.time
    ) -> None:
        self._database, self._bounds, self._clock = database, bounds or Bounds(), clock
        self._segments = None if database.path is None else IndexFolder(database.path)
        self._counters = Counters(self._database)
        self.prefixes = prefixes_beside(database, self._bounds, self.forgets)
        self._nothing_after: dict[tuple[str, str], tuple[tuple[int, int], int]] = {}
        self._damaged: set[int] = set()
        self._erasure_due, self._next_erasure = False, 0.0
        if self._bounds.max_age is not None:
            self._unless_refused(lambda connection: expire(connection, self._bounds, self._clock()))

    @classmethod
    def open(
        cls,
        path: str | Path | None = None,
        *,
        embedder: Embedder | None = None,
        max_bytes: int = DEFAULT_MAX_BYTES,
        bounds: Bounds | None = None,
        create: bool = True,
        read_only: bool = False,
        clock: Callable[[], float] = time.time,
    ) -> Self:
        """Open or create a store; in memory without a `path`. `bounds` replaces `max_bytes` and has further limits.

        A damaged file is set aside, with a warning, and an empty one takes its place; read-only or with `create` off it
        is refused. Raises CacheError, and leaves the file untouched, if it is foreign, in use while it is damaged,
        missing with `create` off, or filled by an embedder other than `embedder`.
        """
        chosen = bounds or Bounds(max_bytes)
        if path is None:
            return cls(Database(None), chosen, clock=clock)
        try:
            file = database_path(path)
            if create and not read_only:
                create_file(file)
            if not file.exists():
                raise CacheError(f"there is no cache at {file}")
            check_folders(file)
            fixed = read_only or not (os.access(file, os.W_OK) and os.access(file.parent, os.W_OK))
            try:
                check_file(file, embedder)
            except (UnreadableError, FileNotFoundError):  # another process may be setting it aside
                if fixed or not create:
                    raise
                _make_readable(file, embedder)
            if not fixed:
                sweep(file.parent)
                IndexFolder(file).sweep()
            return cls(Database(file, read_only=fixed), chosen, clock=clock)
        except (OSError, ValueError, sqlite3.Error) as error:  # ValueError: a path with a NUL character
            raise CacheError(
                f"cannot open the cache {str(path)!r}: {error}; give a folder that you may write"
            ) from error

    def insert(self, completion: NewCompletion, vector: Vector | None, embedder: EmbedderIdentity | None) -> int:
        """Store durably and return the id; 0 if the store is read-only or the completion exceeds its bounds."""
        payload = Payload(storable(completion), vector)
        if self._too_large(payload):
            return 0
        return self._unless_refused(lambda connection: self._insert(connection, payload, embedder)) or 0

    def _insert(self, connection: sqlite3.Connection, payload: Payload, embedder: EmbedderIdentity | None) -> int:
        now = self._clock()
        if payload.vector is not None:
            claim(connection, payload.vector, embedder, str(self._database))
        completion_id = rows.insert_row(connection, payload, now)
        evict(connection, self._bounds, keep_id=completion_id, now=now)
        return completion_id

    def _unless_refused(self, write: Callable[[sqlite3.Connection], Result]) -> Result | None:
        """The result of a transaction; None if the store is read-only or its disk has just run full."""
        if self._erasure_due and time.monotonic() >= self._next_erasure:
            self._erase_again()
        if self._database.refuses_writes():
            return None
        try:
            with self._database.write() as connection:
                return write(connection)
        except CacheError:
            if self._database.refuses_writes():
                return None
            raise

    def _too_large(self, payload: Payload) -> bool:
        most = self._bounds.largest
        if payload.size > most:
            logger.warning("a completion of %d bytes was not stored: at most %d bytes are allowed", payload.size, most)
        return payload.size > most

    def since(self, tenant: str, tokenizer: str, after_id: int = 0) -> Completions:
        """The partition's completions with a higher id, in increasing order; takes microseconds if there are none."""
        stamp, partition = self._database.stamp(), (tenant, as_stored(tokenizer))
        known = self._nothing_after.get(partition)
        if known is not None and known[0] == stamp and known[1] <= after_id:
            return []
        found = self._select("WHERE tenant = ? AND tokenizer = ? AND id > ? ORDER BY id", (*partition, after_id))
        self._nothing_after[partition] = stamp, found[-1].id if found else after_id
        return found

    def vectors_since(self, tenant: str, tokenizer: str, after_id: int = 0) -> tuple[Ids, Vector]:
        """Ids `[n]` in increasing order and vectors `[n, dimension]` of the partition's completions that have one."""
        query = "SELECT id, vector, vector_checksum FROM completion WHERE tenant = ? AND tokenizer = ? AND id > ?"
        with self._database.read() as connection:
            found = connection.execute(
                f"{query} AND vector IS NOT NULL ORDER BY id", (tenant, as_stored(tokenizer), after_id)
            )
            dimension = rows.dimension_of(connection)
            read = [(row[0], rows.vector_of(row[1], row[2], dimension)) for row in found]
        whole = [(row_id, vector) for row_id, vector in read if vector is not None]
        self._report_damaged([row_id for row_id, vector in read if vector is None])
        ids = np.array([row_id for row_id, _ in whole], dtype=np.int64)
        return ids, np.array([vector for _, vector in whole], dtype=np.float32)

    def tokenizers(self) -> frozenset[str]:
        """The fingerprints of all tokenizers whose completions are stored."""
        with self._database.read() as connection:
            return frozenset(row[0] for row in connection.execute("SELECT DISTINCT tokenizer FROM completion"))

    def stamp(self) -> tuple[int, int]:
        """Changes whenever any process may have added or removed records; takes microseconds."""
        return self._database.stamp()

    def partition(self, tenant: str, tokenizer: str) -> Partition | None:
        """The partition with its segments; None in memory."""
        tokenizer = as_stored(tokenizer)
        return None if self._segments is None else Partition(self._database, self._segments, tenant, tokenizer)

    def partition_vectors(self, tenant: str, tokenizer: str) -> PartitionVectors:
        """The partition's vectors, for grouping once there are many."""
        return PartitionVectors(self._database, self._segments, tenant, as_stored(tokenizer))

    def epoch(self) -> int:
        """Increases whenever records are removed."""
        return self._counters.epoch

    def forgets(self) -> int:
        """Changes at every `forget`, of any process."""
        return self._counters.forgets

    def gone_since(self, epoch: int) -> tuple[int, Ids | None]:
        """The current epoch and the ids removed after `epoch`; None for ids if too many have been removed since."""
        number = rows.as_number("gone.id")
        query = f"SELECT value, gone.id, {number} FROM meta LEFT JOIN gone ON gone.epoch > ? WHERE key = 'epoch'"
        with self._database.read() as connection:
            found = connection.execute(query, (epoch,)).fetchall()
        now = rows.epoch_in(found[0][0] if found else None)
        ids = [number for _, row_id, number in found if row_id is not None]
        return now, np.array(ids, dtype=np.int64) if len(ids) == now - epoch else None

    def embedder(self) -> EmbedderIdentity | None:
        """The embedder that made the vectors; None while there are none."""
        with self._database.read() as connection:
            return rows.recorded_embedder(connection)

    def credit(self, counts: Mapping[int, tuple[int, int]]) -> None:
        """Add (accepted, rejected) tokens to completions; ignores missing ids, and does nothing if read-only."""
        if any(accepted < 0 or rejected < 0 for accepted, rejected in counts.values()):
            raise CacheError("credit takes numbers of accepted and rejected tokens, which cannot be negative")
        if counts:
            self._unless_refused(lambda connection: self._credit(connection, counts))

    def _credit(self, connection: sqlite3.Connection, counts: Mapping[int, tuple[int, int]]) -> None:
        expire(connection, self._bounds, self._clock())
        rows.add_credit(connection, counts)

    def list(self, selection: Selection = ALL, limit: int | None = None) -> Completions:
        """The selected completions, newest first."""
        where, values = rows.conditions(selection)
        return self._select(f"{where} ORDER BY id DESC LIMIT ?", (*values, -1 if limit is None else limit))

    def forget(self, selection: Selection) -> int:
        """Erase the selected completions from table, file, log, segments and kept prefixes; returns their number.

        Raises CacheError if the store is read-only, nothing is selected, or another process keeps their bytes (they
        are forgotten nevertheless).
        """
        if selection.everything:
            raise CacheError("forget needs a condition: tenant, before, containing or ids")
        if self._database.opened_read_only:
            raise CacheError(f"{self._database} is read-only, so nothing can be forgotten in it")
        with self._database.write() as connection:
            number = rows.delete_rows(connection, selection)
            count_forget(connection)
            prune(connection)
        try:
            self._erase()
        finally:
            if self.prefixes is not None:
                self.prefixes.forget(selection)
        return number

    def compact(self) -> tuple[int, int]:
        """Free the space of evicted completions in file, log and segments; returns bytes on disk before and after.

        Raises CacheError if the store is read-only or another process holds the file.
        """
        if self._database.opened_read_only:
            raise CacheError(f"{self._database} is read-only, so it cannot be compacted")
        before = self._bytes_on_disk()
        self._erase()
        return before, self._bytes_on_disk()

    def _erase(self) -> None:
        """Rewrite segments and file without completions that are no longer in the table; if that fails, try later."""
        self._erasure_due, self._next_erasure = True, time.monotonic() + ERASED_AGAIN_AFTER
        try:
            if self._segments is not None:
                self._segments.erase_gone(lambda: directory_of_all(self._database))
        finally:
            self._database.erase_freed()
        self._erasure_due = False

    def _erase_again(self) -> None:
        """Try what an earlier `forget` could not do."""
        try:
            self._erase()
        except CacheError as error:
            logger.warning("an erasure failed again: %s", error)
        else:
            logger.warning("%s: the bytes of forgotten records are erased now", self._database)

    def _bytes_on_disk(self) -> int:
        return self._database.size() + (0 if self._segments is None else self._segments.size())

    def verify(self) -> VerifyReport:
        """Check every record; see `verify_cache`. Raises CacheError."""
        if self._database.path is None:  # no other process can have changed it
            return VerifyReport(str(self._database), self.stats().records, ())
        return verify_cache(self._database.path)

    def stats(self) -> CacheStats:
        """A summary of the cache."""
        with self._database.read() as connection:
            tenants = rows.stats_by_tenant(connection)
            embedder = rows.recorded_embedder(connection)
        return CacheStats(
            path=None if self._database.path is None else str(self._database.path),
            read_only=self._database.read_only,
            records=sum(tenant.records for tenant in tenants),
            tokens=sum(tenant.tokens for tenant in tenants),
            bytes=sum(tenant.bytes for tenant in tenants),
            max_bytes=self._bounds.max_bytes,
            file_bytes=self._bytes_on_disk(),
            embedder=embedder,
            tenants=tuple(tenants),
        )

    def close(self) -> None:
        """Release everything; may be called again."""
        if self._erasure_due and self._database.is_here and not self._database.closed:
            self._erase_again()
        self._database.close()

    def _select(self, clause: str, values: tuple[object, ...]) -> Completions:
        with self._database.read() as connection:
            found = connection.execute(f"SELECT {rows.COLUMNS} FROM completion {clause}", values).fetchall()
        read = [(row[rows.ID], rows.completion_of(row)) for row in found]
        self._report_damaged([row_id for row_id, completion in read if completion is None])
        return [completion for _, completion in read if completion is not None]

    def _report_damaged(self, ids: Iterable[int]) -> None:
        for row_id in set(ids) - self._damaged:
            self._damaged.add(row_id)
            logger.warning("completion %d in %s is damaged and left out; forget it by its id", row_id, self._database)


def _make_readable(file: Path, embedder: Embedder | None) -> None:
    """Set a damaged file aside and create an empty one; all processes that open it at once share that."""
    with alone_in(file.parent):
        create_file(file)
        try:
            check_file(file, embedder)
        except UnreadableError as error:
            set_aside(file, error)
            create_file(file)
            check_file(file, embedder)
