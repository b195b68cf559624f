"""Converts completions to rows on the server and rows to completions."""

from __future__ import annotations

import json
import time
from collections.abc import Iterable, Iterator
from dataclasses import asdict
from typing import Any

import psycopg

from precedent.cache.database import folded
from precedent.cache.embedder import maker_of, require_same
from precedent.cache.records import TEXTS, Completion, Damage, EmbedderIdentity, Selection
from precedent.cache.rows import COLUMNS, INSERTED, NAMES, damage_of, embedder_in, inserted_values, with_vector
from precedent.errors import CacheError
from precedent_postgres.schema import SCHEMA

Connection = psycopg.Connection[Any]
Row = tuple[Any, ...]

TABLE = f"{SCHEMA}.completion"

ROWS_AT_ONCE = 1000


def lock_tenant(connection: Connection, tenant: str) -> None:
    """Block other insertions for this tenant until the transaction ends, and record a change.

    So ids increase in the order in which transactions end: a reader that has read up to an id has missed none below.
    """
    row = f"INSERT INTO {SCHEMA}.tenant VALUES (%s, 0, 0, 1)"
    connection.execute(f"{row} ON CONFLICT (tenant) DO UPDATE SET changes = tenant.changes + 1", (tenant,))


def row_of_same(connection: Connection, new: Completion) -> int | None:
    """The id of the same answer to the same query; None if there is none."""
    key = (new.tenant, new.tokenizer.encode(), new.identity)
    query = f"SELECT id FROM {TABLE} WHERE tenant = %s AND tokenizer = %s AND identity = %s"
    found = connection.execute(query, key).fetchone()
    return None if found is None else int(found[0])


def add_row(connection: Connection, new: Completion, created: float) -> int:
    """Add a completion that is not stored yet; returns its id. The tenant must be locked."""
    tenant, *others = inserted_values(new, created)
    values = (tenant, *(value.encode() if isinstance(value, str) else value for value in others))
    insert = f"INSERT INTO {TABLE} ({INSERTED}) VALUES ({', '.join(['%s'] * len(values))}) RETURNING id"
    update = f"UPDATE {SCHEMA}.tenant SET records = records + 1, bytes = bytes + %s WHERE tenant = %s"
    connection.execute(update, (new.size, new.tenant))
    found = connection.execute(insert, values).fetchone()
    if found is None:  # a trigger or rule added after the store was opened
        raise CacheError("the server stored nothing without reporting an error; look for triggers on its tables")
    return int(found[0])


def insert(connection: Connection, new: Completion) -> int:
    """Add a completion, or increase its count if the same answer to the same query is stored; returns its id."""
    lock_tenant(connection, new.tenant)
    known = row_of_same(connection, new)
    if known is None:
        return add_row(connection, new, time.time())
    connection.execute(f"UPDATE {TABLE} SET count = count + 1 WHERE tenant = %s AND id = %s", (new.tenant, known))
    return known


def restore(connection: Connection, recorded: Completion) -> int:
    """Add a record with its time and counters; an existing one keeps the larger of each. The tenant must be locked."""
    row_id = row_of_same(connection, recorded) or add_row(connection, recorded, recorded.created)
    names = ("count", "hits", "accepted", "rejected")
    larger = ", ".join(f"{name} = greatest({name}, %s)" for name in names)
    connection.execute(
        f"UPDATE {TABLE} SET created = least(created, %s), {larger} WHERE tenant = %s AND id = %s",
        (recorded.created, *(getattr(recorded, name) for name in names), recorded.tenant, row_id),
    )
    return row_id


def decoded(row: Row) -> Row:
    """A row that begins with `COLUMNS`, its texts decoded."""
    texts = (
        value.decode("utf-8", "replace") if isinstance(value, bytes) and name in TEXTS else value
        for name, value in zip(NAMES, row, strict=False)
    )
    return (*texts, *row[len(NAMES) :])


def record_in(row: Row) -> Completion | None:
    """The completion in a row of `COLUMNS`, vector and its checksum, or None if the completion is damaged."""
    return with_vector(decoded(row))


def check(connection: Connection) -> list[Damage | None]:
    """What differs in each row from what was written."""
    return [damage_of(decoded(row)) for row in selected(connection, Selection(), "ASC")]


def selected(connection: Connection, selection: Selection, order: str, after_id: int = 0) -> Iterator[Row]:
    """Rows of `COLUMNS`, vector and its checksum, read on demand; `order` is ASC or DESC."""
    clauses = {"tenant = %s": selection.tenant, "created < %s": selection.before, "id = ANY(%s)": _as_list(selection)}
    given = {"id > %s": after_id, **{clause: value for clause, value in clauses.items() if value is not None}}
    query = f"SELECT {COLUMNS}, vector, vector_checksum FROM {TABLE} WHERE {' AND '.join(given)} ORDER BY id {order}"
    needle = None if selection.containing is None else folded(selection.containing)
    with connection.cursor("selected") as cursor:
        cursor.itersize = ROWS_AT_ONCE
        for row in cursor.execute(query, list(given.values())):
            if needle is None or needle in folded(_said(row)):
                yield row


def _as_list(selection: Selection) -> list[int] | None:
    return None if selection.ids is None else list(selection.ids)


def _said(row: Row) -> str:
    """The text that `containing` searches; compared here, because the server has other rules for case."""
    return "\n".join(row[NAMES.index(name)].decode("utf-8", "replace") for name in ("query", "text"))


def recorded_embedder(connection: Connection, lock: str = "") -> EmbedderIdentity | None:
    """The embedder that made the vectors; None while there are none."""
    found = connection.execute(f"SELECT value FROM {SCHEMA}.meta WHERE key = 'embedder' {lock}").fetchone()
    if found is None:
        return None
    recorded = embedder_in(found[0])
    if recorded is None:
        raise CacheError("the server's record of the embedder is damaged; restore a backup")
    return recorded


def claim(
    connection: Connection, completions: Iterable[Completion], embedder: EmbedderIdentity | None, where: str
) -> None:
    """Record the first vector's embedder as the cache's and refuse every other, until the transaction ends."""
    makers = [maker_of(one.vector, embedder) for one in completions if one.vector is not None]
    if not makers:
        return
    maker = makers[0]
    insert = f"INSERT INTO {SCHEMA}.meta VALUES ('embedder', %s) ON CONFLICT (key) DO NOTHING"
    recorded = recorded_embedder(connection, "FOR SHARE")
    while recorded is None:  # again, if another engine was first or the last vector has just been removed
        connection.execute(insert, (json.dumps(asdict(maker)),))
        recorded = recorded_embedder(connection, "FOR SHARE")
    require_same(recorded, maker, where)
