"""A connection to the SQLite file: how every one of them is set up."""

from __future__ import annotations

import sqlite3
import unicodedata
from pathlib import Path

BUSY_SECONDS = 20.0
"""How long a transaction waits for that of another process."""

BUSY_ERRORS = ("SQLITE_BUSY", "SQLITE_LOCKED", "SQLITE_PROTOCOL")

PASSING_ERRORS = (
    *BUSY_ERRORS,
    *("SQLITE_FULL", "SQLITE_READONLY", "SQLITE_IOERR", "SQLITE_CANTOPEN"),
    *("SQLITE_PERM", "SQLITE_AUTH", "SQLITE_NOMEM", "SQLITE_INTERRUPT", "SQLITE_NOLFS"),
)
"""Names with which errors begin that are not the file's fault."""


def connect(path: Path | None, mode: str = "mode=rw") -> sqlite3.Connection:
    """Open an existing file (a new database in memory for None) for use from any thread, one at a time."""
    target = ":memory:" if path is None else f"{path.resolve().as_uri()}?{mode}"
    connection = sqlite3.connect(
        target, uri=path is not None, timeout=BUSY_SECONDS, isolation_level=None, check_same_thread=False
    )
    connection.text_factory = _decoded
    connection.create_function("folded_contains", 2, _folded_contains, deterministic=True)
    connection.execute("PRAGMA temp_store=MEMORY")  # a temporary file would be one more place to erase from
    connection.execute("PRAGMA trusted_schema=OFF")  # nothing that a file's schema says may call functions with effects
    connection.execute("PRAGMA cell_size_check=ON")  # a damaged page is an error where it is read, not somewhere later
    return connection


def error_name(error: Exception) -> str:
    """SQLite's name for an error, empty where Python itself raised it."""
    return getattr(error, "sqlite_errorname", None) or ""


def is_damage(error: sqlite3.Error) -> bool:
    """Whether an error says something of the file, not of the moment, the machine or the rights to it."""
    return not error_name(error).startswith(PASSING_ERRORS)


def advice(error: sqlite3.Error) -> str:
    """What to do about an error."""
    if error_name(error).startswith(BUSY_ERRORS):
        return f"another process has held it for {BUSY_SECONDS:.0f} seconds; try again, or close that process"
    if error_name(error).startswith(PASSING_ERRORS):
        return "free some disk space or make it writable, its folder too, and open it again"
    return "restore a copy of the file, move it away, or repair it with `precedent cache verify`"


def folded(text: str) -> str:
    """`text` for comparison without regard to case and to how accents are composed."""
    return unicodedata.normalize("NFKC", unicodedata.normalize("NFKC", text).casefold())


def _folded_contains(text: bytes | None, folded_needle: str) -> bool:
    return folded_needle in folded(_decoded(text or b""))


def _decoded(data: bytes) -> str:
    return data.decode("utf-8", "replace")  # damaged text must not make its neighbours unreadable
