"""Checks every record on the server against its checksums, and the sums of each tenant against its records."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import psycopg

from precedent.cache.backend import Finding, Selection
from precedent_postgres import removal
from precedent_postgres.rows import ID, TABLE, completion_in, record_in, selected
from precedent_postgres.schema import SCHEMA

Connection = psycopg.Connection[Any]

COUNTED = f"SELECT tenant, count(*) AS records, sum(size)::bigint AS bytes FROM {TABLE} GROUP BY tenant"
WRONG_SUMS = f"""
SELECT tenant FROM {SCHEMA}.tenant FULL JOIN ({COUNTED}) AS counted USING (tenant)
WHERE (tenant.records, tenant.bytes) IS DISTINCT FROM (counted.records, counted.bytes) ORDER BY tenant
"""


def check(connection: Connection, *, repair: bool) -> tuple[int, tuple[Finding, ...]]:
    """The number of sound records, and all findings; with `repair`, mends them within the transaction."""
    if repair:
        removal.lock_all(connection)
    sound, damaged = 0, []
    for row, vector in selected(connection, Selection(), "ASC"):
        record = record_in(row, vector)
        if record is None or (vector[0] is not None and record.vector is None):
            damaged.append((row[ID], "record" if completion_in(row) is None else "vector"))
        else:
            sound += 1
    if repair:
        removal.delete(connection, [row_id for row_id, _ in damaged])
    return sound, (*_damage(damaged, repair), *_sums(connection, repair))


def _damage(damaged: list[tuple[int, str]], repair: bool) -> Iterator[Finding]:
    for kind in ("record", "vector"):
        ids = tuple(row_id for row_id, of in damaged if of == kind)
        if ids:
            yield Finding(kind, f"{len(ids)} completions have a damaged {kind}", repaired=repair, ids=ids)


def _sums(connection: Connection, repair: bool) -> Iterator[Finding]:
    wrong = [row[0] for row in connection.execute(WRONG_SUMS).fetchall()]
    if wrong and repair:
        connection.execute(f"DELETE FROM {SCHEMA}.tenant WHERE tenant = ANY(%s)", (wrong,))
        connection.execute(
            f"INSERT INTO {SCHEMA}.tenant SELECT tenant, records, bytes, 1 FROM ({COUNTED}) AS counted "
            "WHERE tenant = ANY(%s)",
            (wrong,),
        )
        connection.execute(f"UPDATE {SCHEMA}.meta SET value = (value::bigint + 1)::text WHERE key = 'epoch'")
    if wrong:
        yield Finding("sums", f"the sums of {len(wrong)} tenants do not match their records", repaired=repair)
