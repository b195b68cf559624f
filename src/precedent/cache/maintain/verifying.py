"""Checks every page of a cache file, and every record against its checksum."""

from __future__ import annotations

import sqlite3
from collections.abc import Iterator
from pathlib import Path

from precedent.cache.store import rows
from precedent.cache.store.files import check_folders, database_path
from precedent.cache.store.inspection import UnreadableError, inspecting
from precedent.cache.store.report import Finding, VerifyReport
from precedent.errors import CacheError

RECORDS_AT_ONCE = 1000


def verify_cache(path: str | Path) -> VerifyReport:
    """Check a cache's pages, schema, records and vectors; changes nothing.

    A damaged record or vector is never used; forget it by its id. A file with a damaged structure is set aside when it
    is opened next. Raises CacheError if there is no cache at `path`, if it cannot be read now,
    or if a link stands in place of a folder beside it.
    """
    file = database_path(path)
    if not file.exists():
        raise CacheError(f"there is no cache at {file}")
    check_folders(file)
    try:
        with inspecting(file, whole=True) as connection:
            findings = tuple(_damage(connection))
            records = connection.execute("SELECT count(*) FROM completion").fetchone()[0]
    except UnreadableError as error:
        return VerifyReport(str(file), 0, (Finding("structure", error.reason),))
    except (OSError, sqlite3.Error) as error:
        raise CacheError(f"cannot verify {file}: {error}") from error
    return VerifyReport(str(file), records - sum(finding.kind == "record" for finding in findings), findings)


def _damage(connection: sqlite3.Connection) -> Iterator[Finding]:
    query = f"SELECT {rows.COLUMNS}, vector, vector_checksum FROM completion WHERE id > ? ORDER BY id LIMIT ?"
    last = 0
    while page := connection.execute(query, (last, RECORDS_AT_ONCE)).fetchall():
        for *row, vector, checksum in page:
            last = row[rows.ID]
            if rows.completion_of(tuple(row)) is None:
                yield Finding("record", f"record {last} is damaged", (last,))
            elif (vector, checksum) != (None, None) and rows.vector_of(vector, checksum) is None:
                yield Finding("vector", f"the vector of record {last} is damaged", (last,))
