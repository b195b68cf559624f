"""A store's work besides drafting: listing, moving, erasing, checking and counting records of all tenants."""

from __future__ import annotations

import logging
from collections.abc import Iterable, Sequence
from itertools import islice

import psycopg

from precedent.cache.backend import (
    Bounds,
    CacheStats,
    EmbedderIdentity,
    NewCompletion,
    Payload,
    Record,
    Selection,
    StoredCompletion,
    TenantStats,
    VerifyReport,
    payload_of,
    storable,
)
from precedent.errors import CacheError
from precedent_postgres import removal, rows, verifying
from precedent_postgres.connections import Connection, Connections, Result, Work
from precedent_postgres.embedding import claim, recorded_embedder

logger = logging.getLogger("precedent.cache")

Completions = list[StoredCompletion]
Records = list[Record]
Flags = list[bool]
Shares = list[TenantStats]
Numbered = list[tuple[int, StoredCompletion | None]]
RowIds = list[int]

ALL = Selection()
LOCK_SECONDS = 20
"""How long an erasure waits for readers of the table."""


class Keeping:
    """The maintenance part of `PostgresStore`; it may see every tenant's records."""

    def __init__(self, server: Connections, bounds: Bounds, *, read_only: bool) -> None:
        self._server, self._bounds, self._read_only = server, bounds, read_only
        self._warned = False
        self._damaged: set[int] = set()

    def holds(self, completions: Sequence[NewCompletion]) -> Flags:
        """For each completion, whether the same answer to the same query is stored."""
        payloads = [Payload(storable(completion), None) for completion in completions]
        return self._server.of_every_tenant(
            lambda connection: [rows.row_of_same(connection, payload) is not None for payload in payloads], patient=True
        )

    def restore(self, records: Sequence[Record], embedder: EmbedderIdentity | None) -> RowIds:
        """Store records with their times and counters, all or none; existing records keep the larger of each.

        Returns their ids, 0 for a refused one. Raises CacheError.
        """
        payloads = [payload_of(record) for record in records]
        fitting = [not self._refuses(payload) for payload in payloads]

        def work(connection: Connection) -> RowIds:
            claim(connection, payloads, embedder, self._server.name)
            for tenant in sorted({payload.completion.tenant for payload in payloads}):
                rows.lock_tenant(connection, tenant)
            return [
                rows.restore(connection, payload, record.completion) if fits else 0
                for record, payload, fits in zip(records, payloads, fitting, strict=True)
            ]

        if not any(fitting):
            return [0] * len(records)
        ids = self._server.of_every_tenant(work, patient=True)
        self._evict()
        return ids

    def list(self, selection: Selection = ALL, limit: int | None = None) -> Completions:
        """The selected completions, newest first."""

        def work(connection: Connection) -> Numbered:
            found = islice(rows.selected(connection, selection, "DESC"), limit)
            return [(row[rows.ID], rows.completion_in(row)) for row, _ in found]

        return self._whole(self._reading(selection, work))

    def records(self, selection: Selection, after_id: int, limit: int) -> Records:
        """At most `limit` selected records above an id, in increasing order; damaged ones are left out."""

        def work(connection: Connection) -> Records:
            found = (rows.record_in(*row) for row in rows.selected(connection, selection, "ASC", after_id))
            return list(islice((record for record in found if record is not None), limit))

        return self._reading(selection, work)

    def forget(self, selection: Selection) -> int:
        """Erase the selected completions and rewrite the table without them; returns their number.

        Raises CacheError if the store is read-only, nothing is selected, or another session keeps the table locked
        (the completions are forgotten nevertheless).
        """
        if selection.everything:
            raise CacheError("forget needs a condition: tenant, before, containing or ids")
        self._check_writable("nothing can be forgotten in it")
        number = self._server.of_every_tenant(
            lambda connection: removal.delete_selected(connection, selection), patient=True
        )
        self._rewrite()
        return number

    def verify(self) -> VerifyReport:
        """Check every record and vector against its checksum."""
        records, findings = self._server.of_every_tenant(verifying.check, patient=True)
        return VerifyReport(self._server.name, records, findings)

    def compact(self) -> tuple[int, int]:
        """Free the space of removed records in the table; returns its bytes on disk before and after."""
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
        """A summary of the cache."""
        sums = "count(*), sum(length(token_ids) / 4), sum(size), sum(hits), sum(accepted), sum(rejected)"
        query = f"SELECT tenant, {sums} FROM {rows.TABLE} GROUP BY tenant ORDER BY sum(size) DESC, tenant"
        size = f"SELECT pg_total_relation_size('{rows.TABLE}')"

        def work(connection: Connection) -> tuple[Shares, int, EmbedderIdentity | None]:
            shares = [TenantStats(row[0], *map(int, row[1:])) for row in connection.execute(query).fetchall()]
            return shares, removal.one(connection, size)[0], recorded_embedder(connection)

        shares, num_bytes, embedder = self._server.of_every_tenant(work, patient=True)
        return CacheStats(
            path=self._server.name,
            read_only=self._read_only,
            records=sum(share.records for share in shares),
            tokens=sum(share.tokens for share in shares),
            bytes=sum(share.bytes for share in shares),
            max_bytes=self._bounds.max_bytes,
            file_bytes=num_bytes,
            embedder=embedder,
            tenants=tuple(shares),
        )

    def _reading(self, selection: Selection, work: Work[Result]) -> Result:
        """The result of `work` in a transaction that sees no more tenants than are selected."""
        if selection.tenant is not None:
            return self._server.of_tenant(selection.tenant, work, patient=True)
        return self._server.of_every_tenant(work, patient=True)

    def _refuses(self, payload: Payload) -> bool:
        """Whether the store is read-only or the completion exceeds its bounds; logs it."""
        if payload.size > self._bounds.largest:
            most = self._bounds.largest
            logger.warning("a completion of %d bytes was not stored: at most %d bytes are allowed", payload.size, most)
        return self._refuses_writes() or payload.size > self._bounds.largest

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

    def _whole(self, read: Numbered) -> Completions:
        self._report_damaged(row_id for row_id, completion in read if completion is None)
        return [completion for _, completion in read if completion is not None]

    def _report_damaged(self, ids: Iterable[int]) -> None:
        for row_id in set(ids) - self._damaged:
            self._damaged.add(row_id)
            logger.warning(
                "completion %d in %s is damaged and left out; forget it by its id", row_id, self._server.name
            )
