"""Evicts completions from a full cache: first those that are too old, then the least useful ones.

Usefulness is saved tokens per byte, decayed: (accepted tokens + 1/2) / (age + 20) / bytes. The age counts the
completions stored since, so it needs no clock. The tenants that hold most are reduced to a common level, so that a busy
tenant cannot displace a quiet one.
"""

from __future__ import annotations

import sqlite3
from collections.abc import Iterable, Sequence

from precedent.cache.records import Bounds
from precedent.cache.rows import as_number

KEPT_SHARE = 0.9
"""Eviction goes down to this share of a bound, so that it happens rarely."""

CLOCK_SLACK = 60.0
"""Seconds that a completion's time may lie in the future before it is set to now."""

ROW_BYTES = 400
"""Approximate bytes of a row besides its payload."""

LEAST_USEFUL = f"""
SELECT id, {as_number("size")} FROM completion WHERE tenant = ? AND id != ?
ORDER BY (accepted + 0.5) / ((SELECT max(id) FROM completion) - id + 20.0) / (size + {ROW_BYTES}), id
"""


def evict(connection: sqlite3.Connection, bounds: Bounds, *, keep_id: int, now: float) -> None:
    """Delete until all bounds hold, reducing each exceeded one to `KEPT_SHARE` of it; `keep_id` stays."""
    expire(connection, bounds, now, keep_id=keep_id)
    if bounds.max_tenant_bytes is not None:
        _keep_quota(connection, bounds.max_tenant_bytes, keep_id)
    _keep_bound(connection, "bytes", bounds.max_bytes, keep_id)
    if bounds.max_records is not None:
        _keep_bound(connection, "records", bounds.max_records, keep_id)


def expire(connection: sqlite3.Connection, bounds: Bounds, now: float, *, keep_id: int = 0) -> None:
    """Delete what is older than `max_age`. If the clock was set back, future times count as now."""
    if bounds.max_age is None:
        return
    connection.execute("UPDATE completion SET created = ? WHERE created > ?", (now, now + CLOCK_SLACK))
    connection.execute("DELETE FROM completion WHERE created < ? AND id != ?", (now - bounds.max_age, keep_id))


def _keep_quota(connection: sqlite3.Connection, max_bytes: int, keep_id: int) -> None:
    """Reduce the tenant of `keep_id` to its quota: only a tenant that has just stored something can exceed it."""
    share = f"SELECT tenant, {as_number('bytes')} FROM usage"
    of_newest = f"{share} WHERE tenant = (SELECT tenant FROM completion WHERE id = ?)"
    for tenant, held in connection.execute(of_newest, (keep_id,)).fetchall():
        if held > max_bytes:
            _delete_least_useful(connection, "bytes", tenant, keep_id, held - KEPT_SHARE * max_bytes)


def _keep_bound(connection: sqlite3.Connection, measure: str, bound: int, keep_id: int) -> None:
    held = connection.execute(f"SELECT CAST(total({measure}) AS INTEGER) FROM usage").fetchone()[0]
    if held <= bound:
        return
    tenants = _evictable(connection, measure, keep_id)
    level = common_level([share for _, share in tenants], held - KEPT_SHARE * bound)
    for tenant, share in tenants:
        _delete_least_useful(connection, measure, tenant, keep_id, share - level)


def _evictable(connection: sqlite3.Connection, measure: str, keep_id: int) -> list[tuple[str, int]]:
    """Bytes or records that each tenant holds besides `keep_id`, largest first."""
    query = f"""
    SELECT tenant, {measure} - coalesce((SELECT {_of_row(measure)} FROM completion
                                         WHERE id = ? AND tenant = usage.tenant), 0) AS evictable
    FROM usage WHERE evictable > 0 ORDER BY evictable DESC, tenant
    """
    return connection.execute(query, (keep_id,)).fetchall()


def _of_row(measure: str) -> str:
    return "size" if measure == "bytes" else "1"


def common_level(sizes: Sequence[int], excess: float) -> float:
    """The level to which the largest sizes must shrink to free `excess` in total; `sizes` decrease."""
    total, level = 0, 0.0
    for count, size in enumerate(sizes, 1):
        total += size
        level = max(0.0, (total - excess) / count)
        if count < len(sizes) and level >= sizes[count]:
            break
    return level


def _delete_least_useful(
    connection: sqlite3.Connection, measure: str, tenant: str, keep_id: int, wanted: float
) -> None:
    gone = first_to_free(connection.execute(LEAST_USEFUL, (tenant, keep_id)), measure, wanted)
    connection.executemany("DELETE FROM completion WHERE id = ?", [(row_id,) for row_id in gone])


def first_to_free(rows: Iterable[tuple[int, int]], measure: str, wanted: float) -> list[int]:
    """The ids of the first rows, given as id and size, that free `wanted` bytes or records."""
    gone: list[int] = []
    for row_id, size in rows:
        if wanted <= 0:
            break
        gone.append(row_id)
        wanted -= size if measure == "bytes" else 1
    return gone
