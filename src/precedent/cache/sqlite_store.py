"""The embedded store: completions in one SQLite file, the cache's source of truth."""

from __future__ import annotations

import logging
import os
import sqlite3
import time
from collections.abc import Callable, Mapping, Sequence
from itertools import islice
from pathlib import Path
from typing import Self, TypeVar

import numpy as np

from precedent.cache import rows
from precedent.cache.database import Database, create_file
from precedent.cache.embedder import Embedder, identity_of, maker_of, require_same
from precedent.cache.eviction import evict, expire
from precedent.cache.files import alone_in, database_path, sweep
from precedent.cache.inspection import UnreadableError, inspecting, set_aside, verify_cache
from precedent.cache.prefixes import PrefixFiles
from precedent.cache.records import (
    Bounds,
    CacheStats,
    Completion,
    Completions,
    EmbedderIdentity,
    Ids,
    Selection,
    Vector,
    VerifyReport,
    as_stored,
    storable,
)
from precedent.cache.store import CompletionStore, Flags, RowIds
from precedent.errors import CacheError

logger = logging.getLogger("precedent.cache")

Result = TypeVar("Result")

ALL = Selection()

ERASED_AGAIN_AFTER = 60.0
"""Seconds after which an erasure that failed is tried again."""


class SQLiteStore(CompletionStore):
    """The embedded store: one SQLite file in WAL mode, or a database in memory.

    Safe for several threads and processes; an insertion is on disk when it returns. Beyond `bounds`, the least useful
    completions are evicted. `clock` returns seconds since the epoch.
    """

    def __init__(
        self, database: Database, bounds: Bounds | None = None, *, clock: Callable[[], float] = time.time
    ) -> None:
        self._database, self._bounds, self._clock = database, bounds or Bounds(), clock
        self.prefixes: PrefixFiles | None = None
        if database.path is not None:
            self.prefixes = PrefixFiles(database.path, self._bounds, self.forgets, read_only=database.read_only)
        self._undamaged = rows.Undamaged(str(database))
        self._erasure_due, self._next_erasure = False, 0.0
        if self._bounds.max_age is not None:
            self._unless_refused(lambda connection: expire(connection, self._bounds, self._clock()))

    @classmethod
    def open(
        cls,
        path: str | Path | None = None,
        *,
        embedder: Embedder | None = None,
        bounds: Bounds | None = None,
        create: bool = True,
        read_only: bool = False,
        clock: Callable[[], float] = time.time,
    ) -> Self:
        """Open or create a store; in memory without a `path`.

        A damaged file is set aside, with a warning, and an empty one takes its place; read-only or with `create` off it
        is refused. Raises CacheError, and leaves the file untouched, if it is foreign, in use while it is damaged,
        missing with `create` off, or filled by an embedder other than `embedder`.
        """
        if path is None:
            return cls(Database(None), bounds, clock=clock)
        try:
            file = database_path(path)
            if create and not read_only:
                create_file(file)
            if not file.exists():
                raise CacheError(f"there is no cache at {file}")
            fixed = read_only or not (os.access(file, os.W_OK) and os.access(file.parent, os.W_OK))
            try:
                _check_file(file, embedder)
            except (UnreadableError, FileNotFoundError):  # another process may be setting it aside
                if fixed or not create:
                    raise
                _make_readable(file, embedder)
            if not fixed:
                sweep(file.parent)
            return cls(Database(file, read_only=fixed), bounds, clock=clock)
        except (OSError, ValueError, sqlite3.Error) as error:  # ValueError: a path with a NUL character
            raise CacheError(
                f"cannot open the cache {str(path)!r}: {error}; give a folder that you may write"
            ) from error

    def insert(self, completion: Completion, vector: Vector | None, embedder: EmbedderIdentity | None) -> int:
        new = storable(completion, vector)

        def write(connection: sqlite3.Connection) -> int:
            self._claim(connection, new, embedder)
            now = self._clock()
            completion_id = rows.insert_row(connection, new, now)
            evict(connection, self._bounds, keep_id=completion_id, now=now)
            return completion_id

        return 0 if self._too_large(new) else self._unless_refused(write) or 0

    def restore(self, completions: Sequence[Completion], embedder: EmbedderIdentity | None) -> RowIds:
        given = [storable(completion) for completion in completions]
        fitting = [not self._too_large(one) for one in given]

        def write(connection: sqlite3.Connection) -> RowIds:
            for one in given:
                self._claim(connection, one, embedder)
            ids = [rows.restore_row(connection, one) if fits else 0 for one, fits in zip(given, fitting, strict=True)]
            evict(connection, self._bounds, keep_id=max(ids, default=0), now=self._clock())
            return ids

        return self._unless_refused(write) or [0] * len(given)

    def _claim(self, connection: sqlite3.Connection, new: Completion, embedder: EmbedderIdentity | None) -> None:
        if new.vector is None:
            return
        maker, recorded = maker_of(new.vector, embedder), rows.recorded_embedder(connection)
        if recorded is None:
            rows.record_embedder(connection, maker)
        else:
            require_same(recorded, maker, str(self._database))

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

    def _too_large(self, new: Completion) -> bool:
        size, most = new.size, self._bounds.largest
        if size > most:
            logger.warning("a completion of %d bytes was not stored: at most %d bytes are allowed", size, most)
        return size > most

    def since(self, tenant: str, tokenizer: str, after_id: int = 0) -> Completions:
        clause = "WHERE tenant = ? AND tokenizer = ? AND id > ? ORDER BY id"
        return self._select(clause, (tenant, as_stored(tokenizer), after_id))

    def vectors_since(self, tenant: str, tokenizer: str, after_id: int = 0) -> tuple[Ids, Vector]:
        query = "SELECT id, vector, vector_checksum FROM completion WHERE tenant = ? AND tokenizer = ? AND id > ?"
        with self._database.read() as connection:
            recorded = rows.recorded_embedder(connection)
            found = connection.execute(
                f"{query} AND vector IS NOT NULL ORDER BY id", (tenant, as_stored(tokenizer), after_id)
            )
            dimension = None if recorded is None else recorded.dimension
            return self._undamaged.vectors(found, dimension)

    def list(self, selection: Selection = ALL, limit: int | None = None) -> Completions:
        where, values = rows.conditions(selection)
        return self._select(f"{where} ORDER BY id DESC LIMIT ?", (*values, -1 if limit is None else limit))

    def records(self, selection: Selection, after_id: int, limit: int) -> Completions:
        where, values = rows.conditions(selection)
        clause = f"{where} AND id > ?" if where else "WHERE id > ?"
        query = f"SELECT {rows.COLUMNS}, vector, vector_checksum FROM completion {clause} ORDER BY id"
        with self._database.read() as connection:
            found = map(rows.with_vector, connection.execute(query, (*values, after_id)))
            return list(islice((one for one in found if one is not None), limit))

    def holds(self, completions: Sequence[Completion]) -> Flags:
        wanted = [storable(completion) for completion in completions]
        with self._database.read() as connection:
            return [rows.id_of_same(connection, one) is not None for one in wanted]

    def tokenizers(self) -> frozenset[str]:
        with self._database.read() as connection:
            return frozenset(row[0] for row in connection.execute("SELECT DISTINCT tokenizer FROM completion"))

    def stamp(self) -> tuple[int, int]:
        return self._database.stamp()

    def epoch(self) -> int:
        with self._database.read() as connection:
            return rows.epoch_of(connection)

    def forgets(self) -> int:
        with self._database.read() as connection:
            return rows.forgets_of(connection)

    def ids(self, tenant: str, tokenizer: str) -> Ids:
        query = "SELECT id FROM completion WHERE tenant = ? AND tokenizer = ? ORDER BY id"
        with self._database.read() as connection:
            found = connection.execute(query, (tenant, as_stored(tokenizer))).fetchall()
        return np.array(found, dtype=np.int64).reshape(-1)

    def embedder(self) -> EmbedderIdentity | None:
        with self._database.read() as connection:
            return rows.recorded_embedder(connection)

    def credit(self, counts: Mapping[int, tuple[int, int]]) -> None:
        if any(accepted < 0 or rejected < 0 for accepted, rejected in counts.values()):
            raise CacheError("credit takes numbers of accepted and rejected tokens, which cannot be negative")

        def write(connection: sqlite3.Connection) -> None:
            expire(connection, self._bounds, self._clock())
            rows.add_credit(connection, counts)

        if counts:
            self._unless_refused(write)

    def forget(self, selection: Selection) -> int:
        if selection.everything:
            raise CacheError("forget needs a condition: tenant, before, containing or ids")
        if self._database.opened_read_only:
            raise CacheError(f"{self._database} is read-only, so nothing can be forgotten in it")
        with self._database.write() as connection:
            number = rows.delete_rows(connection, selection)
        try:
            self._erase()
        finally:
            if self.prefixes is not None:
                self.prefixes.forget(selection)
        return number

    def compact(self) -> tuple[int, int]:
        if self._database.opened_read_only:
            raise CacheError(f"{self._database} is read-only, so it cannot be compacted")
        before = self._database.size()
        self._erase()
        return before, self._database.size()

    def _erase(self) -> None:
        """Rewrite the file without completions that are no longer in the table; if that fails, try later."""
        self._erasure_due, self._next_erasure = True, time.monotonic() + ERASED_AGAIN_AFTER
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

    def verify(self) -> VerifyReport:
        if self._database.path is None:  # no other process can have changed it
            return VerifyReport(str(self._database), self.stats().records, ())
        return verify_cache(self._database.path)

    def stats(self) -> CacheStats:
        with self._database.read() as connection:
            tenants = rows.stats_by_tenant(connection)
            embedder = rows.recorded_embedder(connection)
        return CacheStats.of(
            tenants,
            path=None if self._database.path is None else str(self._database.path),
            read_only=self._database.read_only,
            max_bytes=self._bounds.max_bytes,
            file_bytes=self._database.size(),
            embedder=embedder,
        )

    def close(self) -> None:
        if self._erasure_due and self._database.is_here and not self._database.closed:
            self._erase_again()
        self._database.close()

    def _select(self, clause: str, values: tuple[object, ...]) -> Completions:
        with self._database.read() as connection:
            found = connection.execute(f"SELECT {rows.COLUMNS} FROM completion {clause}", values).fetchall()
        return self._undamaged.completions(found)


def _check_file(file: Path, embedder: Embedder | None) -> None:
    """Raise what `inspecting` raises, or CacheMismatchError if another embedder made the file's vectors."""
    with inspecting(file) as connection:
        recorded = rows.recorded_embedder(connection)
    if recorded is not None and embedder is not None:
        require_same(recorded, identity_of(embedder), str(file))


def _make_readable(file: Path, embedder: Embedder | None) -> None:
    """Set a damaged file aside and create an empty one; all processes that open it at once share that."""
    with alone_in(file.parent):
        create_file(file)
        try:
            _check_file(file, embedder)
        except UnreadableError as error:
            set_aside(file, error)
            create_file(file)
            _check_file(file, embedder)
