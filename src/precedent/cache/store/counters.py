"""What a cache file counts: removed records, and calls of `forget` by any process."""

from __future__ import annotations

import sqlite3

from precedent.cache.store import rows
from precedent.cache.store.database import Database


class Counters:
    """Reads the counters of a file again only when the file has changed."""

    def __init__(self, database: Database) -> None:
        self._database = database
        self._known: tuple[object, int, int] | None = None

    @property
    def epoch(self) -> int:
        """Increases whenever records are removed."""
        return self._read()[1]

    @property
    def forgets(self) -> int:
        """Changes at every `forget`, of any process."""
        return self._read()[2]

    def _read(self) -> tuple[object, int, int]:
        stamp, known = self._database.stamp(), self._known
        if known is None or known[0] != stamp:
            with self._database.read() as connection:
                known = stamp, rows.epoch_of(connection), _forgets_of(connection)
            self._known = known
        return known


def count_forget(connection: sqlite3.Connection) -> None:
    """Tell other processes that something was forgotten, not just evicted."""
    connection.execute("INSERT OR REPLACE INTO meta VALUES ('forgets', ?)", (_forgets_of(connection) + 1,))


def _forgets_of(connection: sqlite3.Connection) -> int:
    """The number of forgets; 0 before the first, and where the number is damaged, which is a change as well."""
    row = connection.execute("SELECT value FROM meta WHERE key = 'forgets'").fetchone()
    return row[0] if row is not None and type(row[0]) is int and 0 < row[0] < rows.MOST_RECORDS else 0
