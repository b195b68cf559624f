"""Converts completions to rows and rows to completions; reads and counts rows."""

from __future__ import annotations

import json
import logging
import sqlite3
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np

from precedent.cache.database import folded
from precedent.cache.records import (
    TEXTS,
    Completion,
    Completions,
    Damage,
    EmbedderIdentity,
    Ids,
    Selection,
    TenantStats,
    Vector,
    vector_checksum,
)
from precedent.errors import CacheError

logger = logging.getLogger("precedent.cache")

INSERTED = (
    "tenant, tokenizer, identity, created, size, model, prompt_fingerprint, tools, workflow_step, checksum, "
    "vector_checksum, token_ids, query, text, vector"
)
"""The columns of `inserted_values`; all others have defaults."""

# the order of Completion's fields, then the checksum
COLUMNS = (
    "token_ids, tokenizer, model, tenant, query, prompt_fingerprint, tools, workflow_step, text, "
    "id, created, count, hits, accepted, rejected, checksum"
)

NAMES = COLUMNS.split(", ")
ID, NUM_COLUMNS = NAMES.index("id"), len(NAMES)

MOST_RECORDS = 2**62
"""No cache has added or removed this many records; much larger numbers would overflow SQLite's counters."""


def insert_row(connection: sqlite3.Connection, new: Completion, now: float) -> int:
    """Add a completion, or increase its count if the same answer to the same query is stored; returns its id."""
    known = _whole_row_of_same(connection, new)
    if known is None:
        return _add_row(connection, new, now)
    connection.execute("UPDATE completion SET count = count + 1 WHERE id = ?", (known,))
    return known


def restore_row(connection: sqlite3.Connection, recorded: Completion) -> int:
    """Add a completion with its time and counters; an existing one keeps the larger of each. Returns its id."""
    row_id = _whole_row_of_same(connection, recorded) or _add_row(connection, recorded, recorded.created)
    names = ("count", "hits", "accepted", "rejected")
    larger = ", ".join(f"{name} = max({name}, ?)" for name in names)
    values = (recorded.created, *(getattr(recorded, name) for name in names), row_id)
    connection.execute(f"UPDATE completion SET created = min(created, ?), {larger} WHERE id = ?", values)
    return row_id


def _whole_row_of_same(connection: sqlite3.Connection, new: Completion) -> int | None:
    """The id of the same answer to the same query; deletes it if it is damaged, since it would never be served.

    Raises CacheError if only an index contains it.
    """
    known = id_of_same(connection, new)
    if known is None:
        return None
    row = connection.execute(f"SELECT {COLUMNS} FROM completion WHERE id = ?", (known,)).fetchone()
    found = None if row is None else completion_of(row)
    if found is not None and found.identity == new.identity:
        return known
    if found is not None or row is None:
        raise CacheError(
            f"an index of the cache names record {known} wrongly: export the cache, and import it at another path"
        )
    connection.execute("DELETE FROM completion WHERE id = ?", (known,))
    return None


def id_of_same(connection: sqlite3.Connection, new: Completion) -> int | None:
    """The id of the same answer to the same query; None if there is none."""
    query = "SELECT id FROM completion WHERE tenant = ? AND tokenizer = ? AND identity = ?"
    found = connection.execute(query, (new.tenant, new.tokenizer, new.identity)).fetchone()
    return None if found is None else int(found[0])


def _add_row(connection: sqlite3.Connection, new: Completion, now: float) -> int:
    values = inserted_values(new, now)
    insert = f"INSERT INTO completion ({INSERTED}) VALUES ({', '.join('?' * len(values))})"
    row = connection.execute(insert, values).lastrowid
    assert row is not None
    return row


def inserted_values(new: Completion, created: float) -> tuple[Any, ...]:
    """The values of a new row, in the order of `INSERTED`."""
    soft = (new.model, new.prompt_fingerprint, new.tools, new.workflow_step)
    large = (new.token_bytes, new.query, new.text, new.vector_bytes)
    sums = (new.checksum, new.vector_checksum)
    return (new.tenant, new.tokenizer, new.identity, created, new.size, *soft, *sums, *large)


def add_credit(connection: sqlite3.Connection, counts: Mapping[int, tuple[int, int]]) -> None:
    """Add (accepted, rejected) tokens by id, within the database: additions of other processes are kept."""
    update = "UPDATE completion SET hits = hits + ?, accepted = accepted + ?, rejected = rejected + ? WHERE id = ?"
    changes = [(accepted > 0, accepted, rejected, row_id) for row_id, (accepted, rejected) in counts.items()]
    connection.executemany(update, changes)


def completion_of(row: Sequence[Any]) -> Completion | None:
    """The completion in a row of `COLUMNS`, or None if its bytes differ from those that were written."""
    blob, *values, checksum = row
    try:
        completion = Completion(tuple(np.frombuffer(blob, "<i4").tolist()), *values)
        texts = all(isinstance(one, str) for one in values[: len(TEXTS)])  # bytes have the checksum of their text
        whole = texts and completion.has_plausible_record and completion.checksum == checksum
        return completion if whole else None
    except (TypeError, ValueError, AttributeError):  # a damaged row may hold a value of another type or length
        return None


def vector_of(blob: Any, checksum: Any, dimension: int | None = None) -> Vector | None:
    """The vector in a row, or None if its bytes differ from those that were written, or are not `dimension` numbers."""
    whole = isinstance(blob, bytes) and len(blob) % 4 == 0 and vector_checksum(blob) == checksum
    vector = np.frombuffer(blob, "<f4") if whole else None
    return vector if vector is not None and dimension in (None, vector.size) else None


def with_vector(row: Sequence[Any]) -> Completion | None:
    """The completion in a row of `COLUMNS`, `vector` and its checksum, or None if the completion is damaged."""
    completion = completion_of(row[:-2])
    return None if completion is None else replace(completion, vector=vector_of(row[-2], row[-1]))


def damage_of(row: Sequence[Any]) -> Damage | None:
    """What in a row of `COLUMNS`, `vector` and its checksum differs from what was written; None if nothing does."""
    row_id = row[ID]
    if completion_of(row[:NUM_COLUMNS]) is None:
        return Damage("record", f"record {row_id} is damaged", (row_id,))
    if tuple(row[-2:]) != (None, None) and vector_of(*row[-2:]) is None:
        return Damage("vector", f"the vector of record {row_id} is damaged", (row_id,))
    return None


class Undamaged:
    """Takes the undamaged completions and vectors of a store's rows, and warns once of every other one."""

    def __init__(self, name: str) -> None:
        self._name, self._reported = name, set[int]()

    def completions(self, found: Iterable[Sequence[Any]]) -> Completions:
        """Completions of rows of `COLUMNS`, or of more columns."""
        read = [(row[ID], completion_of(row[:NUM_COLUMNS])) for row in found]
        self._report(row_id for row_id, completion in read if completion is None)
        return [completion for _, completion in read if completion is not None]

    def vectors(self, found: Iterable[Sequence[Any]], dimension: int | None = None) -> tuple[Ids, Vector]:
        """Ids `[n]` and vectors `[n, dimension]` of rows of an id, a vector and its checksum."""
        read = [(row_id, vector_of(blob, checksum, dimension)) for row_id, blob, checksum in found]
        self._report(row_id for row_id, vector in read if vector is None)
        whole = [(row_id, vector) for row_id, vector in read if vector is not None]
        ids = np.array([row_id for row_id, _ in whole], dtype=np.int64)
        return ids, np.array([vector for _, vector in whole], dtype=np.float32)

    def _report(self, ids: Iterable[int]) -> None:
        for row_id in set(ids) - self._reported:
            self._reported.add(row_id)
            logger.warning("completion %d in %s is damaged and left out; forget it by its id", row_id, self._name)


def as_number(column: str) -> str:
    """SQL for a column as the integer it should be, 0 if a damaged row holds something else."""
    return f"coalesce(CAST({column} AS INTEGER), 0)"


def conditions(selection: Selection) -> tuple[str, list[object]]:
    """The WHERE clause of a selection, and its parameters."""
    needle = None if selection.containing is None else folded(selection.containing)
    ids = None if selection.ids is None else json.dumps(selection.ids)
    clauses: dict[str, object] = {
        "tenant = ?": selection.tenant,
        "created < ?": selection.before,
        "id IN (SELECT value FROM json_each(?))": ids,
        "folded_contains(CAST(query || char(10) || text AS BLOB), ?)": needle,
    }
    given = {clause: value for clause, value in clauses.items() if value is not None}
    return (f"WHERE {' AND '.join(given)}" if given else ""), list(given.values())


def delete_rows(connection: sqlite3.Connection, selection: Selection) -> int:
    """Delete the selected completions, tell other processes of a forget, and return the number deleted."""
    where, values = conditions(selection)
    number = connection.execute(f"DELETE FROM completion {where}", values).rowcount
    # once no vector is left, the next one may come from any embedder
    left = "EXISTS (SELECT 1 FROM completion WHERE vector_checksum IS NOT NULL)"
    connection.execute(f"DELETE FROM meta WHERE key = 'embedder' AND NOT {left}")
    connection.execute("INSERT OR REPLACE INTO meta VALUES ('forgets', ?)", (forgets_of(connection) + 1,))
    return number


def stats_by_tenant(connection: sqlite3.Connection) -> list[TenantStats]:
    """Each tenant's share, largest first."""
    names = ("num_tokens", "size", "hits", "accepted", "rejected")
    sums = ", ".join(f"CAST(total({name}) AS INTEGER)" for name in names)  # a sum of damaged numbers overflows
    query = f"SELECT CAST(tenant AS TEXT), count(*), {sums} FROM completion GROUP BY 1 ORDER BY 4 DESC, 1"
    return [TenantStats(*row) for row in connection.execute(query)]


def recorded_embedder(connection: sqlite3.Connection) -> EmbedderIdentity | None:
    """The embedder that made the vectors; None while there are none."""
    value = _meta(connection, "embedder")
    if value is None:
        return None
    recorded = embedder_in(value)
    if recorded is None:
        raise CacheError("the cache's record of its embedder is damaged")
    return recorded


def record_embedder(connection: sqlite3.Connection, identity: EmbedderIdentity) -> None:
    """Record the embedder of the first vector."""
    value = json.dumps({"name": identity.name, "fingerprint": identity.fingerprint, "dimension": identity.dimension})
    connection.execute("INSERT INTO meta VALUES ('embedder', ?)", (value,))


def embedder_in(value: Any) -> EmbedderIdentity | None:
    """The embedder that a JSON text names; None if the text is damaged."""
    try:
        found = EmbedderIdentity(**json.loads(value))
    except (TypeError, ValueError, RecursionError):
        return None
    named = isinstance(found.name, str) and isinstance(found.fingerprint, str)
    return found if named and type(found.dimension) is int and found.dimension > 0 else None


def epoch_of(connection: sqlite3.Connection) -> int:
    """The number that increases whenever records are removed. Raises CacheError if it is missing."""
    value = _meta(connection, "epoch")
    if type(value) is not int or not 0 <= value < MOST_RECORDS:
        raise CacheError("the table meta has no epoch, which counts removed records")
    return value


def forgets_of(connection: sqlite3.Connection) -> int:
    """The number of forgets; 0 before the first, and where the number is damaged, which is a change as well."""
    value = _meta(connection, "forgets")
    return value if type(value) is int and 0 < value < MOST_RECORDS else 0


def _meta(connection: sqlite3.Connection, key: str) -> Any:
    row = connection.execute("SELECT value FROM meta WHERE key = ?", (key,)).fetchone()
    return None if row is None else row[0]


def check_numbers(connection: sqlite3.Connection) -> None:
    """Raise CacheError unless the numbers of the next record and of the next removal can be told."""
    epoch_of(connection)
    found = connection.execute("SELECT seq FROM sqlite_sequence WHERE name = 'completion'").fetchone()
    highest = connection.execute("SELECT max(id) FROM completion").fetchone()[0]
    last = 0 if found is None else found[0]
    if type(last) is not int or not (highest or 0) <= last < MOST_RECORDS:
        raise CacheError(f"the number of the last record is {last!r}, and the highest is {highest!r}")
