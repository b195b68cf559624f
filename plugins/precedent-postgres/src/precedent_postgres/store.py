"""`PostgresStore`: completions that several engines share on one server."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np

from precedent.cache.backend import (
    Bounds,
    Embedder,
    EmbedderIdentity,
    Ids,
    NewCompletion,
    Payload,
    StoreURL,
    Vector,
    as_stored,
    identity_of,
    require_same,
    storable,
    vector_of,
)
from precedent.errors import CacheError
from precedent_postgres import removal, rows
from precedent_postgres.connections import Connection, Connections
from precedent_postgres.embedding import claim, recorded_embedder
from precedent_postgres.keeping import Completions, Keeping
from precedent_postgres.schema import SCHEMA, prepare


class PostgresStore(Keeping):
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
        super().__init__(Connections(url, self._first), bounds or Bounds(), read_only=read_only)
        self._wanted, self._create = embedder, create and not read_only

    def _first(self, connection: Connection) -> None:
        """Prepare the first connection: create or check the tables, and check their embedder."""
        if not prepare(connection, create=self._create):
            raise CacheError(f"there is no cache at {self._server.name}")
        recorded = recorded_embedder(connection)
        if recorded is not None and self._wanted is not None:
            require_same(recorded, identity_of(self._wanted), self._server.name)

    def insert(self, completion: NewCompletion, vector: Vector | None, embedder: EmbedderIdentity | None) -> int:
        """Store durably and return the id; 0 if the store is read-only or the completion larger than its bounds."""
        payload = Payload(storable(completion), vector)
        if self._refuses(payload):
            return 0

        def work(connection: Connection) -> tuple[int, bool]:
            claim(connection, [payload], embedder, self._server.name)
            return rows.insert(connection, payload), removal.exceeds(connection, self._bounds)

        row_id, full = self._server.of_tenant(payload.completion.tenant, work)
        if full:
            self._evict()
        return row_id

    def since(self, tenant: str, tokenizer: str, after_id: int = 0) -> Completions:
        """The partition's completions with a higher id, in increasing order; one small query if there are none."""
        found = self._rows_after(tenant, tokenizer, after_id, rows.COLUMNS)
        return self._whole([(row_id, rows.completion_in(tuple(row))) for row_id, *row in found])

    def vectors_since(self, tenant: str, tokenizer: str, after_id: int = 0) -> tuple[Ids, Vector]:
        """Ids `[n]` in increasing order and vectors `[n, dimension]` of the partition's completions that have one."""
        found = self._rows_after(tenant, tokenizer, after_id, "vector, vector_checksum", "AND vector IS NOT NULL")
        read = [(row[0], vector_of(row[1], row[2])) for row in found]
        self._report_damaged(row_id for row_id, vector in read if vector is None)
        whole = [(row_id, vector) for row_id, vector in read if vector is not None]
        ids = np.array([row_id for row_id, _ in whole], dtype=np.int64)
        return ids, np.array([vector for _, vector in whole], dtype=np.float32)

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
        """The fingerprints of all tokenizers whose completions are stored, of any tenant."""
        query = f"SELECT DISTINCT tokenizer FROM {rows.TABLE}"
        found = self._server.of_every_tenant(lambda connection: connection.execute(query).fetchall())
        return frozenset(bytes(row[0]).decode() for row in found)

    def stamp(self) -> tuple[int, int]:
        """Changes whenever any engine may have added or removed records; takes one small query."""
        epoch = f"(SELECT value::bigint FROM {SCHEMA}.meta WHERE key = 'epoch')"
        query = f"SELECT {epoch}, coalesce(sum(changes), 0)::bigint FROM {SCHEMA}.tenant"
        epoch_now, changes = self._server.without_records(lambda connection: removal.one(connection, query))
        return epoch_now, changes

    def epoch(self) -> int:
        """Increases by one for every removed record."""
        query = f"SELECT value::bigint FROM {SCHEMA}.meta WHERE key = 'epoch'"
        return int(self._server.without_records(lambda connection: removal.one(connection, query))[0])

    def forgets(self) -> int:
        """Changes at every `forget`, of any process."""
        query = f"SELECT coalesce(max(value::bigint), 0) FROM {SCHEMA}.meta WHERE key = 'forgets'"
        return int(self._server.without_records(lambda connection: removal.one(connection, query))[0])

    def gone_since(self, epoch: int) -> tuple[int, Ids | None]:
        """The current epoch and the ids removed after `epoch`; None for ids if too many have been removed since."""
        query = f"SELECT value::bigint, id FROM {SCHEMA}.meta LEFT JOIN {SCHEMA}.gone ON epoch > %s WHERE key = 'epoch'"
        found = self._server.without_records(lambda connection: connection.execute(query, (epoch,)).fetchall())
        now, ids = int(found[0][0]), [row_id for _, row_id in found if row_id is not None]
        return now, np.array(ids, dtype=np.int64) if len(ids) == now - epoch else None

    def embedder(self) -> EmbedderIdentity | None:
        """The embedder that made the vectors; None while there are none."""
        return self._server.without_records(recorded_embedder)

    def credit(self, counts: Mapping[int, tuple[int, int]]) -> None:
        """Add (accepted, rejected) tokens to completions; ignores missing ids, and does nothing if read-only."""
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

    def close(self) -> None:
        """Close all connections; may be called again."""
        self._server.close()


def open_store(
    url: StoreURL | str,
    *,
    embedder: Embedder | None = None,
    bounds: Bounds | None = None,
    create: bool = True,
    read_only: bool = False,
) -> PostgresStore:
    """Open the cache in a database, as `SQLiteStore.open` opens a file; creates its schema if it is missing."""
    return PostgresStore(url, bounds=bounds, embedder=embedder, create=create, read_only=read_only)
