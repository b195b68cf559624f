"""What goes when the cache is full: the least useful completions of the tenants that hold the most.

Usefulness is (accepted tokens + 1/2) / (age + 20), the age counted in completions stored since. Replayed on agent
traces this gives more tokens per step than dropping the least recently used or the oldest first; dividing by length
makes it worse. Tenants are brought down to a common level, so that a busy one cannot push out a quiet one.
"""

from __future__ import annotations

import sqlite3
from collections.abc import Sequence

KEPT_SHARE = 0.9
"""Eviction goes down to this share of `max_bytes`, so that it happens rarely and indexes are rebuilt rarely."""

EVICTABLE = """
SELECT tenant, bytes - coalesce((SELECT size FROM completion WHERE id = ? AND tenant = usage.tenant), 0) AS evictable
FROM usage WHERE evictable > 0 ORDER BY evictable DESC, tenant
"""

LEAST_USEFUL = """
SELECT id, size FROM completion WHERE tenant = ? AND id != ?
ORDER BY (accepted + 0.5) / ((SELECT max(id) FROM completion) - id + 20.0), id
"""


def evict(connection: sqlite3.Connection, max_bytes: int, *, keep_id: int) -> None:
    """If more than `max_bytes` are held, delete down to `KEPT_SHARE` of them; the completion `keep_id` stays."""
    held = connection.execute("SELECT coalesce(sum(bytes), 0) FROM usage").fetchone()[0]
    if held <= max_bytes:
        return
    tenants = connection.execute(EVICTABLE, (keep_id,)).fetchall()
    level = common_level([size for _, size in tenants], held - KEPT_SHARE * max_bytes)
    for tenant, size in tenants:
        gone = _least_useful(connection, tenant, keep_id, size - level)
        connection.executemany("DELETE FROM completion WHERE id = ?", gone)


def common_level(sizes: Sequence[int], excess: float) -> float:
    """The level to which the largest must come down for `excess` to go in all; `sizes` are falling."""
    total, level = 0, 0.0
    for count, size in enumerate(sizes, 1):
        total += size
        level = max(0.0, (total - excess) / count)
        if count < len(sizes) and level >= sizes[count]:
            break
    return level


def _least_useful(connection: sqlite3.Connection, tenant: str, keep_id: int, wanted: float) -> list[tuple[int]]:
    """The ids of a tenant's least useful completions that free `wanted` bytes together."""
    gone: list[tuple[int]] = []
    for row_id, size in connection.execute(LEAST_USEFUL, (tenant, keep_id)):
        if wanted <= 0:
            break
        gone.append((row_id,))
        wanted -= size
    return gone
