"""Converts completions to rows on the server and rows to completions."""

from __future__ import annotations

import time
from collections.abc import Iterator
from typing import Any

import psycopg

from precedent.cache.backend import (
    Payload,
    Record,
    Selection,
    StoredCompletion,
    completion_of,
    folded,
    vector_of,
)
from precedent.errors import CacheError
from precedent_postgres.schema import SCHEMA

Connection = psycopg.Connection[Any]
Row = tuple[Any, ...]

TABLE = f"{SCHEMA}.completion"

# the order of StoredCompletion's fields, then the checksum
COLUMNS = (
    "token_ids, tokenizer, model, tenant, query, prompt_fingerprint, tools, workflow_step, text, "
    "id, created, count, hits, accepted, rejected, checksum"
)
NAMES = COLUMNS.split(", ")
ID = NAMES.index("id")
ROWS_AT_ONCE = 1000

INSERT = f"""
INSERT INTO {TABLE} (tenant, tokenizer, identity, created, size, model, prompt_fingerprint, tools, workflow_step,
                     checksum, vector_checksum, token_ids, query, text, vector)
VALUES (%s, %s, %s, %s, %s, %s, %s, %s, %s, %s, %s, %s, %s, %s, %s) RETURNING id
"""


def lock_tenant(connection: Connection, tenant: str) -> None:
    """Block other insertions for this tenant until the transaction ends, and record a change.

    So ids increase in the order in which transactions end: a reader that has read up to an id has missed none below.
    """
    row = f"INSERT INTO {SCHEMA}.tenant VALUES (%s, 0, 0, 1)"
    connection.execute(f"{row} ON CONFLICT (tenant) DO UPDATE SET changes = tenant.changes + 1", (tenant,))


def row_of_same(connection: Connection, payload: Payload) -> int | None:
    """The id of the same answer to the same query; None if there is none."""
    key = (payload.completion.tenant, payload.completion.tokenizer.encode(), payload.identity)
    query = f"SELECT id FROM {TABLE} WHERE tenant = %s AND tokenizer = %s AND identity = %s"
    found = connection.execute(query, key).fetchone()
    return None if found is None else int(found[0])


def add_row(connection: Connection, payload: Payload, created: float) -> int:
    """Add a completion that is not stored yet; returns its id. The tenant must be locked."""
    new = payload.completion
    key = (new.tenant, new.tokenizer.encode(), payload.identity)
    soft = [text.encode() for text in (new.model, new.prompt_fingerprint, new.tools, new.workflow_step)]
    large = (payload.token_blob, new.query.encode(), new.text.encode(), payload.vector_blob)
    values = (*key, created, payload.size, *soft, payload.checksum, payload.vector_checksum, *large)
    update = f"UPDATE {SCHEMA}.tenant SET records = records + 1, bytes = bytes + %s WHERE tenant = %s"
    connection.execute(update, (payload.size, new.tenant))
    found = connection.execute(INSERT, values).fetchone()
    if found is None:  # a trigger or rule added after the store was opened
        raise CacheError("the server stored nothing without reporting an error; look for triggers on its tables")
    return int(found[0])


def insert(connection: Connection, payload: Payload) -> int:
    """Add a completion, or increase its count if the same answer to the same query is stored; returns its id."""
    tenant = payload.completion.tenant
    lock_tenant(connection, tenant)
    known = row_of_same(connection, payload)
    if known is None:
        return add_row(connection, payload, time.time())
    connection.execute(f"UPDATE {TABLE} SET count = count + 1 WHERE tenant = %s AND id = %s", (tenant, known))
    return known


def restore(connection: Connection, payload: Payload, recorded: StoredCompletion) -> int:
    """Add a record with its time and counters; an existing one keeps the larger of each. The tenant must be locked."""
    row_id = row_of_same(connection, payload) or add_row(connection, payload, recorded.created)
    names = ("count", "hits", "accepted", "rejected")
    larger = ", ".join(f"{name} = greatest({name}, %s)" for name in names)
    connection.execute(
        f"UPDATE {TABLE} SET created = least(created, %s), {larger} WHERE tenant = %s AND id = %s",
        (recorded.created, *(getattr(recorded, name) for name in names), recorded.tenant, row_id),
    )
    return row_id


def completion_in(row: Row) -> StoredCompletion | None:
    """The completion in a row of `COLUMNS`, or None if its bytes differ from those that were written."""
    values = [
        value.decode("utf-8", "replace")
        if isinstance(value, bytes) and name not in ("token_ids", "checksum")
        else value
        for name, value in zip(NAMES, row, strict=True)
    ]
    return completion_of(tuple(values))


def selected(connection: Connection, selection: Selection, order: str, after_id: int = 0) -> Iterator[tuple[Row, Row]]:
    """Rows of `COLUMNS`, each with its vector and checksum apart, read on demand; `order` is ASC or DESC."""
    clauses = {"tenant = %s": selection.tenant, "created < %s": selection.before, "id = ANY(%s)": _as_list(selection)}
    given = {"id > %s": after_id, **{clause: value for clause, value in clauses.items() if value is not None}}
    query = f"SELECT {COLUMNS}, vector, vector_checksum FROM {TABLE} WHERE {' AND '.join(given)} ORDER BY id {order}"
    needle = None if selection.containing is None else folded(selection.containing)
    with connection.cursor("selected") as cursor:
        cursor.itersize = ROWS_AT_ONCE
        for row in cursor.execute(query, list(given.values())):
            if needle is None or needle in folded(_said(row)):
                yield row[:-2], row[-2:]


def _as_list(selection: Selection) -> list[int] | None:
    return None if selection.ids is None else list(selection.ids)


def _said(row: Row) -> str:
    """The text that `containing` searches; compared here, because the server has other rules for case."""
    return "\n".join(row[NAMES.index(name)].decode("utf-8", "replace") for name in ("query", "text"))


def record_in(row: Row, vector: Row) -> Record | None:
    """A row with its vector, or None if it is damaged."""
    completion = completion_in(row)
    return None if completion is None else Record(completion, vector_of(*vector))
