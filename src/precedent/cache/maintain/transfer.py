"""Whole records between stores: read in pages, and stored with their times and counters."""

from __future__ import annotations

import sqlite3
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from itertools import islice
from typing import TypeVar

from precedent.cache.search.same_embedder import claim
from precedent.cache.store import rows
from precedent.cache.store.bounds import Bounds
from precedent.cache.store.database import Database
from precedent.cache.store.eviction import evict
from precedent.cache.store.records import (
    EmbedderIdentity,
    NewCompletion,
    Payload,
    Record,
    Selection,
    has_plausible_record,
    storable,
)
from precedent.errors import CacheError

Result = TypeVar("Result")


def payload_of(record: Record) -> Payload:
    """The record as bytes. Raises CacheError for one that cannot be stored."""
    one = record.completion
    if not has_plausible_record(one):
        counters = (one.hits, one.accepted, one.rejected)
        raise CacheError(
            f"a record has an impossible time or counters ({one.created}, {one.count}, {counters}); export it again"
        )
    return Payload(storable(one), record.vector)


class Transfers(ABC):
    """The part of an SQLite store that reads and writes whole records."""

    _database: Database
    _bounds: Bounds
    _clock: Callable[[], float]

    @abstractmethod
    def _unless_refused(self, write: Callable[[sqlite3.Connection], Result]) -> Result | None:
        """The result of a transaction; None if nothing can be written."""

    @abstractmethod
    def _too_large(self, payload: Payload) -> bool:
        """Whether a completion exceeds the store's bounds."""

    def records(self, selection: Selection, after_id: int, limit: int) -> list[Record]:
        """At most `limit` selected records above an id, in increasing order; damaged ones are left out."""
        where, values = rows.conditions(selection)
        clause = f"{where} AND id > ?" if where else "WHERE id > ?"
        query = f"SELECT {rows.COLUMNS}, vector, vector_checksum FROM completion {clause} ORDER BY id"
        with self._database.read() as connection:
            found = (_record_of(row) for row in connection.execute(query, (*values, after_id)))
            return list(islice((record for record in found if record is not None), limit))

    def holds(self, completions: Sequence[NewCompletion]) -> list[bool]:
        """For each completion, whether the same answer to the same query is stored."""
        payloads = [Payload(storable(completion), None) for completion in completions]
        with self._database.read() as connection:
            return [rows.id_of_same(connection, payload) is not None for payload in payloads]

    def restore(self, records: Sequence[Record], embedder: EmbedderIdentity | None) -> list[int]:
        """Store records with their times and counters, all or none; existing records keep the larger of each.

        Returns their ids, 0 for a refused one (the store is read-only, or the record too large). Raises CacheError.
        """
        payloads = [payload_of(record) for record in records]
        fitting = [not self._too_large(payload) for payload in payloads]

        def write(connection: sqlite3.Connection) -> list[int]:
            for payload in payloads:
                if payload.vector is not None:
                    claim(connection, payload.vector, embedder, str(self._database))
            ids = [
                rows.restore_row(connection, payload, record.completion) if fits else 0
                for record, payload, fits in zip(records, payloads, fitting, strict=True)
            ]
            evict(connection, self._bounds, keep_id=max(ids, default=0), now=self._clock())
            return ids

        return self._unless_refused(write) or [0] * len(records)


def _record_of(row: tuple[object, ...]) -> Record | None:
    completion = rows.completion_of(row[:-2])
    return None if completion is None else Record(completion, rows.vector_of(row[-2], row[-1]))
