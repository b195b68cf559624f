"""Completions on their way from one store to another: whole records, read in pages and stored without counting twice."""

from __future__ import annotations

import math
import sqlite3
from collections.abc import Sequence
from dataclasses import dataclass

from precedent.cache import rows
from precedent.cache.database import Database
from precedent.cache.records import NewCompletion, Payload, Selection, StoredCompletion, Vector, storable
from precedent.errors import CacheError

MOST = 2**63 - 1
"""The largest counter that a store can hold."""


@dataclass(frozen=True, slots=True)
class Record:
    """A completion with its counters and its vector, `[dimension]`, or None where there is none."""

    completion: StoredCompletion
    vector: Vector | None = None


def check_counters(completion: StoredCompletion) -> None:
    """Raise CacheError unless time and counters are numbers that a store can hold."""
    counters = (completion.hits, completion.accepted, completion.rejected)
    if not math.isfinite(completion.created) or completion.count < 1 or min(counters) < 0:
        raise CacheError("a record's time and counters must be numbers that are not negative, its count at least 1")
    if max(completion.count, *counters) > MOST:
        raise CacheError(f"a record's counters must not exceed {MOST}")


def payload_of(record: Record) -> Payload:
    """The record as bytes. Raises CacheError for one that cannot be stored."""
    check_counters(record.completion)
    return Payload(storable(record.completion), record.vector)


def records_after(database: Database, selection: Selection, after_id: int, limit: int) -> list[Record]:
    """At most `limit` selected records above an id, in rising order; damaged ones are left out."""
    where, values = rows.conditions(selection)
    clause = f"{where} AND id > ?" if where else "WHERE id > ?"
    query = f"SELECT {rows.COLUMNS}, vector, vector_checksum FROM completion {clause} ORDER BY id LIMIT ?"
    with database.read() as connection:
        found = connection.execute(query, (*values, after_id, limit)).fetchall()
    read = [(rows.completion_of(row[:-2]), rows.vector_of(*row[-2:])) for row in found]
    return [Record(completion, vector) for completion, vector in read if completion is not None]


def restore_row(connection: sqlite3.Connection, payload: Payload, recorded: StoredCompletion) -> int:
    """Add a record with its time and counters; one that is there keeps the larger of each. Returns its id."""
    row_id = _same(connection, payload) or rows.insert_row(connection, payload)
    largest = ", ".join(f"{name} = max({name}, ?)" for name in ("count", "hits", "accepted", "rejected"))
    counters = (recorded.count, recorded.hits, recorded.accepted, recorded.rejected)
    connection.execute(
        f"UPDATE completion SET created = min(created, ?), {largest} WHERE id = ?",
        (recorded.created, *counters, row_id),
    )
    return row_id


def holds(database: Database, completions: Sequence[NewCompletion]) -> list[bool]:
    """For each whether the same answer to the same query is there."""
    payloads = [Payload(storable(completion), None) for completion in completions]
    with database.read() as connection:
        return [_same(connection, payload) is not None for payload in payloads]


def _same(connection: sqlite3.Connection, payload: Payload) -> int | None:
    key = (payload.completion.tenant, payload.completion.tokenizer, payload.identity)
    query = "SELECT id FROM completion WHERE tenant = ? AND tokenizer = ? AND identity = ?"
    found = connection.execute(query, key).fetchone()
    return None if found is None else int(found[0])
