"""Removes records from the server: forgotten ones, and the least useful ones of a full cache."""

from __future__ import annotations

import math
import time
from collections.abc import Sequence
from typing import Any

import psycopg

from precedent.cache.eviction import KEPT_SHARE, common_level, first_to_free
from precedent.cache.records import Bounds, Selection
from precedent.cache.rows import ID
from precedent.errors import CacheError
from precedent_postgres.rows import TABLE, selected
from precedent_postgres.schema import SCHEMA

Connection = psycopg.Connection[Any]

EVICTION_LOCK = int.from_bytes(b"precevic", "big")

EVICTED_AT_ONCE = 5000
"""Most records of a tenant that one insertion evicts, since others wait for it; later insertions evict the rest."""

LEAST_USEFUL = f"""
SELECT id, size FROM {TABLE} WHERE tenant = %s
ORDER BY (accepted + 0.5) / ((SELECT max(id) FROM {TABLE}) - id + 20.0) / (size + 400), id LIMIT %s
"""
"""As in the embedded store: saved tokens per byte, decayed by the number of completions stored since."""


def lock_all(connection: Connection) -> None:
    """Wait for all insertions and block new ones until the transaction ends; every caller locks in the same order."""
    connection.execute(f"SELECT tenant FROM {SCHEMA}.tenant ORDER BY tenant FOR UPDATE").fetchall()


def delete_selected(connection: Connection, selection: Selection) -> int:
    """Delete the selected completions, and count that something was forgotten; returns their number."""
    lock_all(connection)
    ids = [row[ID] for row in selected(connection, selection, "ASC")]
    delete(connection, ids)
    one_more = "ON CONFLICT (key) DO UPDATE SET value = (meta.value::bigint + 1)::text"
    connection.execute(f"INSERT INTO {SCHEMA}.meta VALUES ('forgets', '1') {one_more}")
    return len(ids)


def delete(connection: Connection, ids: Sequence[int]) -> None:
    """Delete rows by id, update the tenants' sums and the epoch. All tenants must be locked."""
    if not ids:
        return
    gone = connection.execute(f"DELETE FROM {TABLE} WHERE id = ANY(%s) RETURNING tenant, size", (list(ids),)).fetchall()
    update = f"UPDATE {SCHEMA}.meta SET value = (value::bigint + %s)::text WHERE key = 'epoch'"
    connection.execute(update, (len(gone),))
    for tenant in {row[0] for row in gone}:
        sizes = [row[1] for row in gone if row[0] == tenant]
        update = f"UPDATE {SCHEMA}.tenant SET records = records - %s, bytes = bytes - %s WHERE tenant = %s"
        connection.execute(update, (len(sizes), sum(sizes), tenant))
    connection.execute(f"DELETE FROM {SCHEMA}.tenant WHERE records = 0")
    _drop_unused_embedder(connection)


def _drop_unused_embedder(connection: Connection) -> None:
    """Once no vector is left, the next one may come from any embedder."""
    connection.execute(f"SELECT 1 FROM {SCHEMA}.meta WHERE key = 'embedder' FOR UPDATE").fetchone()
    left = f"EXISTS (SELECT 1 FROM {TABLE} WHERE vector IS NOT NULL)"
    connection.execute(f"DELETE FROM {SCHEMA}.meta WHERE key = 'embedder' AND NOT {left}")


def evict(connection: Connection, bounds: Bounds) -> None:
    """Delete until the bounds hold again, each down to `KEPT_SHARE`; does nothing while another engine evicts."""
    if not one(connection, "SELECT pg_try_advisory_xact_lock(%s)", (EVICTION_LOCK,))[0]:
        return
    lock_all(connection)
    if bounds.max_age is not None:
        _delete_older(connection, time.time() - bounds.max_age)
    for measure, bound in bounds_by_measure(bounds).items():
        for tenant, excess in _to_free(connection, measure, bound, bounds.max_tenant_bytes).items():
            rows = connection.execute(LEAST_USEFUL, (tenant, EVICTED_AT_ONCE))
            delete(connection, first_to_free(rows, measure, excess))


def _delete_older(connection: Connection, time_of_oldest: float) -> None:
    query = f"SELECT id FROM {TABLE} WHERE created < %s ORDER BY created LIMIT %s"
    delete(connection, [row[0] for row in connection.execute(query, (time_of_oldest, EVICTED_AT_ONCE)).fetchall()])


def bounds_by_measure(bounds: Bounds) -> dict[str, float]:
    """The limits on the sums of the columns of the table `tenant`."""
    return {"bytes": bounds.max_bytes, "records": math.inf if bounds.max_records is None else bounds.max_records}


def exceeds(connection: Connection, bounds: Bounds) -> bool:
    """Return whether `evict` would delete anything; reads one small table."""
    sums = ", ".join(f"coalesce({sum_of}, 0)" for sum_of in ("sum(bytes)", "sum(records)", "max(bytes)"))
    num_bytes, num_records, largest = one(connection, f"SELECT {sums} FROM {SCHEMA}.tenant")
    most = bounds_by_measure(bounds)
    quota = math.inf if bounds.max_tenant_bytes is None else bounds.max_tenant_bytes
    return num_bytes > most["bytes"] or num_records > most["records"] or largest > quota or bounds.max_age is not None


def _to_free(connection: Connection, measure: str, bound: float, quota: int | None) -> dict[str, float]:
    """Amount that each tenant has to free: the excess over its quota, and what brings the largest to a common level."""
    query = f"SELECT tenant, {measure} FROM {SCHEMA}.tenant ORDER BY {measure} DESC, tenant"
    held = {tenant: float(share) for tenant, share in connection.execute(query).fetchall()}
    most = quota if quota is not None and measure == "bytes" else math.inf
    left = {tenant: KEPT_SHARE * most if share > most else share for tenant, share in held.items()}
    if sum(left.values()) > bound:
        level = common_level(sorted(map(int, left.values()), reverse=True), sum(left.values()) - KEPT_SHARE * bound)
        left = {tenant: min(share, level) for tenant, share in left.items()}
    return {tenant: held[tenant] - left[tenant] for tenant in held if left[tenant] < held[tenant]}


def one(connection: Connection, query: str, values: tuple[object, ...] = ()) -> tuple[Any, ...]:
    """The first row that a query finds. Raises CacheError if it was deleted."""
    found: tuple[Any, ...] | None = connection.execute(query, values).fetchone()
    if found is None:
        raise CacheError("a row that every cache has is missing on the server; restore a backup")
    return found
