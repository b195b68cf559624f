"""Checks every record on the server against its checksums."""

from __future__ import annotations

from typing import Any

import psycopg

from precedent.cache.backend import Finding, Selection
from precedent_postgres.rows import ID, completion_in, record_in, selected

Connection = psycopg.Connection[Any]


def check(connection: Connection) -> tuple[int, tuple[Finding, ...]]:
    """The number of sound records, and all findings."""
    sound, findings = 0, []
    for row, vector in selected(connection, Selection(), "ASC"):
        row_id, record = row[ID], record_in(row, vector)
        if completion_in(row) is None:
            findings.append(Finding("record", f"record {row_id} is damaged", (row_id,)))
            continue
        sound += 1
        if record is None or (vector[0] is not None and record.vector is None):
            findings.append(Finding("vector", f"the vector of record {row_id} is damaged", (row_id,)))
    return sound, tuple(findings)
