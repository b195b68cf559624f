"""Opens and configures every connection to the SQLite file."""

from __future__ import annotations

import ctypes
import sqlite3
import unicodedata
import weakref
from pathlib import Path

from precedent.errors import CacheError
from precedent.runtime.process import in_forked_processes

BUSY_SECONDS = 20.0
"""How long a transaction waits for another process's transaction."""

BUSY_ERRORS = ("SQLITE_BUSY", "SQLITE_LOCKED", "SQLITE_PROTOCOL")

PASSING_ERRORS = (
    *BUSY_ERRORS,
    *("SQLITE_FULL", "SQLITE_READONLY", "SQLITE_IOERR", "SQLITE_CANTOPEN"),
    *("SQLITE_PERM", "SQLITE_AUTH", "SQLITE_NOMEM", "SQLITE_INTERRUPT", "SQLITE_NOLFS"),
)
"""Prefixes of the names of errors that are not the file's fault."""


FileIdentity = tuple[int, int]
"""Device and inode of a file."""


class _Connection(sqlite3.Connection):
    """A connection that is registered while it is open."""

    file: FileIdentity | None = None

    def close(self) -> None:
        """Close the connection and unregister it."""
        super().close()
        _OPEN.discard(self)


_OPEN: weakref.WeakSet[_Connection] = weakref.WeakSet()
_OPEN_BEFORE_FORK: set[FileIdentity] = set()
"""Files that the parent process had open when it forked this one. SQLite's record of its locks was copied along, so
SQLite would take the parent's locks for this process's: two writers at once."""


def connect(path: Path | None, mode: str = "mode=rw") -> sqlite3.Connection:
    """Open an existing file (None: a new database in memory) for use from any thread, one at a time.

    Raises CacheError for a file that was open when this process was forked.
    """
    file = None if path is None else _identity(path)
    if file in _OPEN_BEFORE_FORK:
        raise CacheError(
            f"{path} was open when this process was forked, and SQLite cannot open it here too: open it only after the "
            "fork, or start the process with spawn"
        )
    target = ":memory:" if path is None else f"{path.resolve().as_uri()}?{mode}"
    connection = sqlite3.connect(
        target, uri=path is not None, timeout=BUSY_SECONDS, isolation_level=None, check_same_thread=False,
        factory=_Connection,
    )  # fmt: skip
    connection.file = file
    _OPEN.add(connection)
    connection.text_factory = _decoded
    connection.create_function("folded_contains", 2, _folded_contains, deterministic=True)
    connection.execute("PRAGMA temp_store=MEMORY")  # a temporary file would be another place to erase from
    connection.execute("PRAGMA trusted_schema=OFF")  # a file's schema may not call functions with side effects
    connection.execute("PRAGMA cell_size_check=ON")  # report a damaged page where it is read, not somewhere later
    return connection


def error_name(error: Exception) -> str:
    """SQLite's name for an error; empty if Python itself raised it."""
    return getattr(error, "sqlite_errorname", None) or ""


def is_damage(error: sqlite3.Error) -> bool:
    """Whether an error concerns the file itself, not a passing state, the machine or access rights."""
    return not error_name(error).startswith(PASSING_ERRORS)


def advice(error: sqlite3.Error) -> str:
    """What the user can do about an error."""
    if error_name(error).startswith(BUSY_ERRORS):
        return f"another process has held it for {BUSY_SECONDS:.0f} seconds; try again, or close that process"
    if error_name(error).startswith(PASSING_ERRORS):
        return "free some disk space or make it writable, its folder too, and try again"
    return "open it again: a file that is damaged is then set aside, and the cache starts empty"


def folded(text: str) -> str:
    """`text` in a form for comparison that ignores case and how accents are composed."""
    return unicodedata.normalize("NFKC", unicodedata.normalize("NFKC", text).casefold())


def _folded_contains(text: bytes | None, folded_needle: str) -> bool:
    return folded_needle in folded(_decoded(text or b""))


def _decoded(data: bytes) -> str:
    return data.decode("utf-8", "replace")  # one damaged text must not make other rows unreadable


def _identity(path: Path) -> FileIdentity | None:
    try:
        found = path.stat()
    except OSError:
        return None
    return found.st_dev, found.st_ino


def _leave_open() -> None:
    """In a forked process: record the open files, and never close them, which SQLite forbids too."""
    for connection in list(_OPEN):
        if connection.file is not None:
            _OPEN_BEFORE_FORK.add(connection.file)
            ctypes.pythonapi.Py_IncRef(ctypes.py_object(connection))


in_forked_processes(_leave_open)
