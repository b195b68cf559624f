"""`PostgresStore`: completions that several engines share on one server."""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from itertools import islice

import numpy as np
import psycopg

from precedent.cache.embedder import Embedder, identity_of, require_same
from precedent.cache.records import (
    Bounds,
    CacheStats,
    Completion,
    Completions,
    EmbedderIdentity,
    Ids,
    Selection,
    TenantStats,
    Vector,
    VerifyReport,
    as_stored,
    storable,
)
from precedent.cache.rows import Undamaged
from precedent.cache.store import CompletionStore, Flags, RowIds
from precedent.cache.store_url import StoreURL
from precedent.errors import CacheError
from precedent_postgres import removal, rows
from precedent_postgres.connections import Connection, Connections, Result, Work
from precedent_postgres.schema import SCHEMA, prepare

logger = logging.getLogger("precedent.cache")

Shares = list[TenantStats]

ALL = Selection()
LOCK_SECONDS = 20
"""Seconds that an erasure waits for readers of the table."""


class PostgresStore(CompletionStore):
    """Completions in the schema `precedent` of one database; safe for several threads, processes and machines.

    An insertion is committed when it returns. Every statement that reads completions for drafting names its tenant, and
    the server's row security hides all others. After a failure, the server is not called for half a minute: each call
    then raises CacheError at once, drafting continues without the cache, and no request fails. The first call connects.
    Raises CacheError for an invalid URL.
    """

    def __init__(
        self,
        url: StoreURL | str,
        *,
        bounds: Bounds | None = None,
        embedder: Embedder | None = None,
        create: bool = True,
        read_only: bool = False,
    ) -> None:
        self._server, self._bounds, self._read_only = Connections(url, self._first), bounds or Bounds(), read_only
        self._wanted, self._create = embedder, create and not read_only
        self._warned = False
        self._undamaged = Undamaged(self._server.name)

    def _first(self, connection: Connection) -> None:
        """Prepare the first connection: create or check the tables, and check their embedder."""
        if not prepare(connection, create=self._create):
            raise CacheError(f"there is no cache at {self._server.name}")
        recorded = rows.recorded_embedder(connection)
        if recorded is not None and self._wanted is not None:
            require_same(recorded, identity_of(self._wanted), self._server.name)

    def insert(self, completion: Completion, vector: Vector | None, embedder: EmbedderIdentity | None) -> int:
        new = storable(completion, vector)
        if self._refuses(new):
            return 0

        def work(connection: Connection) -> tuple[int, bool]:
            rows.claim(connection, [new], embedder, self._server.name)
            return rows.insert(connection, new), removal.exceeds(connection, self._bounds)

        row_id, full = self._server.of_tenant(new.tenant, work)
        if full:
            self._evict()
        return row_id

    def since(self, tenant: str, tokenizer: str, after_id: int = 0) -> Completions:
        found = self._rows_after(tenant, tokenizer, after_id, rows.COLUMNS)
        return self._undamaged.completions(rows.decoded(row[1:]) for row in found)

    def vectors_since(self, tenant: str, tokenizer: str, after_id: int = 0) -> tuple[Ids, Vector]:
        found = self._rows_after(tenant, tokenizer, after_id, "vector, vector_checksum", "AND vector IS NOT NULL")
        return self._undamaged.vectors(found)

    def _rows_after(
        self, tenant: str, tokenizer: str, after_id: int, columns: str, condition: str = ""
    ) -> list[rows.Row]:
        """The partition's rows with a higher id, their first column; paged, so that no statement takes long."""
        where = f"tenant = %s AND tokenizer = %s AND id > %s {condition} ORDER BY id LIMIT {rows.ROWS_AT_ONCE}"
        query = f"SELECT id, {columns} FROM {rows.TABLE} WHERE {where}"
        found: list[rows.Row] = []
        more = True
        while more:
            values = (tenant, as_stored(tokenizer).encode(), found[-1][0] if found else after_id)
            page = self._read(tenant, query, values)
            found += page
            more = len(page) == rows.ROWS_AT_ONCE
        return found

    def _read(self, tenant: str, query: str, values: tuple[object, ...]) -> list[rows.Row]:
        return self._server.of_tenant(tenant, lambda connection: connection.execute(query, values).fetchall())

    def tokenizers(self) -> frozenset[str]:
        query = f"SELECT DISTINCT tokenizer FROM {rows.TABLE}"
        found = self._server.of_every_tenant(lambda connection: connection.execute(query).fetchall())
        return frozenset(bytes(row[0]).decode() for row in found)

    def stamp(self) -> tuple[int, int]:
        epoch = f"(SELECT value::bigint FROM {SCHEMA}.meta WHERE key = 'epoch')"
        query = f"SELECT {epoch}, coalesce(sum(changes), 0)::bigint FROM {SCHEMA}.tenant"
        epoch_now, changes = self._server.without_records(lambda connection: removal.one(connection, query))
        return epoch_now, changes

    def epoch(self) -> int:
        query = f"SELECT value::bigint FROM {SCHEMA}.meta WHERE key = 'epoch'"
        return int(self._server.without_records(lambda connection: removal.one(connection, query))[0])

    def forgets(self) -> int:
        query = f"SELECT coalesce(max(value::bigint), 0) FROM {SCHEMA}.meta WHERE key = 'forgets'"
        return int(self._server.without_records(lambda connection: removal.one(connection, query))[0])

    def ids(self, tenant: str, tokenizer: str) -> Ids:
        query = f"SELECT id FROM {rows.TABLE} WHERE tenant = %s AND tokenizer = %s ORDER BY id"
        found = self._read(tenant, query, (tenant, as_stored(tokenizer).encode()))
        return np.array(found, dtype=np.int64).reshape(-1)

    def embedder(self) -> EmbedderIdentity | None:
        return self._server.without_records(rows.recorded_embedder)

    def credit(self, counts: Mapping[int, tuple[int, int]]) -> None:
        if any(accepted < 0 or rejected < 0 for accepted, rejected in counts.values()):
            raise CacheError("credit takes numbers of accepted and rejected tokens, which cannot be negative")
        if not counts or self._refuses_writes():
            return
        update = "SET hits = hits + %s, accepted = accepted + %s, rejected = rejected + %s WHERE id = %s"
        changes = [(int(right > 0), right, wrong, row_id) for row_id, (right, wrong) in sorted(counts.items())]

        def work(connection: Connection) -> None:
            with connection.cursor() as cursor:
                cursor.executemany(f"UPDATE {rows.TABLE} {update}", changes)

        self._server.of_every_tenant(work)

    def holds(self, completions: Sequence[Completion]) -> Flags:
        wanted = [storable(completion) for completion in completions]
        return self._server.of_every_tenant(
            lambda connection: [rows.row_of_same(connection, one) is not None for one in wanted], patient=True
        )

    def restore(self, completions: Sequence[Completion], embedder: EmbedderIdentity | None) -> RowIds:
        given = [storable(completion) for completion in completions]
        fitting = [not self._refuses(one) for one in given]

        def work(connection: Connection) -> RowIds:
            rows.claim(connection, given, embedder, self._server.name)
            for tenant in sorted({one.tenant for one in given}):
                rows.lock_tenant(connection, tenant)
            return [rows.restore(connection, one) if fits else 0 for one, fits in zip(given, fitting, strict=True)]

        if not any(fitting):
            return [0] * len(given)
        ids = self._server.of_every_tenant(work, patient=True)
        self._evict()
        return ids

    def list(self, selection: Selection = ALL, limit: int | None = None) -> Completions:

        def work(connection: Connection) -> list[rows.Row]:
            return list(islice(rows.selected(connection, selection, "DESC"), limit))

        return self._undamaged.completions(map(rows.decoded, self._reading(selection, work)))

    def records(self, selection: Selection, after_id: int, limit: int) -> Completions:

        def work(connection: Connection) -> Completions:
            found = map(rows.record_in, rows.selected(connection, selection, "ASC", after_id))
            return list(islice((record for record in found if record is not None), limit))

        return self._reading(selection, work)

    def forget(self, selection: Selection) -> int:
        if selection.everything:
            raise CacheError("forget needs a condition: tenant, before, containing or ids")
        self._check_writable("nothing can be forgotten in it")
        number = self._server.of_every_tenant(
            lambda connection: removal.delete_selected(connection, selection), patient=True
        )
        self._rewrite()
        return number

    def verify(self) -> VerifyReport:
        return VerifyReport.of(self._server.name, self._server.of_every_tenant(rows.check, patient=True))

    def compact(self) -> tuple[int, int]:
        self._check_writable("it cannot be compacted")
        before = self.stats().file_bytes
        self._rewrite()
        return before, self.stats().file_bytes

    def _rewrite(self) -> None:
        """Rewrite the table with VACUUM FULL, after which deleted data is in none of its files."""
        with self._server.outside_transactions() as connection:
            connection.execute(f"SET lock_timeout = '{LOCK_SECONDS}s'")
            try:
                connection.execute(f"VACUUM (FULL, ANALYZE) {rows.TABLE}")
            except psycopg.errors.LockNotAvailable as error:
                raise CacheError(
                    f"the records are forgotten, but {self._server.name} still holds their bytes (the table is in use)"
                    "; run forget or compact again later"
                ) from error
            finally:
                connection.execute("RESET lock_timeout")

    def stats(self) -> CacheStats:
        sums = "count(*), sum(length(token_ids) / 4), sum(size), sum(hits), sum(accepted), sum(rejected)"
        query = f"SELECT tenant, {sums} FROM {rows.TABLE} GROUP BY tenant ORDER BY sum(size) DESC, tenant"
        size = f"SELECT pg_total_relation_size('{rows.TABLE}')"

        def work(connection: Connection) -> tuple[Shares, int, EmbedderIdentity | None]:
            shares = [TenantStats(row[0], *map(int, row[1:])) for row in connection.execute(query).fetchall()]
            return shares, removal.one(connection, size)[0], rows.recorded_embedder(connection)

        shares, num_bytes, embedder = self._server.of_every_tenant(work, patient=True)
        return CacheStats.of(
            shares,
            path=self._server.name,
            read_only=self._read_only,
            max_bytes=self._bounds.max_bytes,
            file_bytes=num_bytes,
            embedder=embedder,
        )

    def close(self) -> None:
        self._server.close()

    def _reading(self, selection: Selection, work: Work[Result]) -> Result:
        """The result of `work` in a transaction that sees no more tenants than are selected."""
        if selection.tenant is not None:
            return self._server.of_tenant(selection.tenant, work, patient=True)
        return self._server.of_every_tenant(work, patient=True)

    def _refuses(self, new: Completion) -> bool:
        """Return whether the store is read-only or the completion exceeds its bounds; logs it."""
        if new.size > self._bounds.largest:
            most = self._bounds.largest
            logger.warning("a completion of %d bytes was not stored: at most %d bytes are allowed", new.size, most)
        return self._refuses_writes() or new.size > self._bounds.largest

    def _refuses_writes(self) -> bool:
        if self._read_only and not self._warned:
            self._warned = True
            logger.warning("%s is read-only: it is used, but nothing new is stored in it", self._server.name)
        return self._read_only

    def _check_writable(self, consequence: str) -> None:
        if self._read_only:
            raise CacheError(f"{self._server.name} is read-only, so {consequence}")

    def _evict(self) -> None:
        """Enforce the bounds in a separate transaction: two insertions that wait for each other would fail."""
        if self._server.of_every_tenant(lambda connection: removal.exceeds(connection, self._bounds)):
            self._server.of_every_tenant(lambda connection: removal.evict(connection, self._bounds))


open_store = PostgresStore
"""Open the cache in a database, as `SQLiteStore.open` opens a file; creates its schema if it is missing."""
