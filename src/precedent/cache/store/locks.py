"""Locks between processes that go with the process that holds them, also when it is killed.

Where the system has none of them (Windows), it refuses to delete or replace a file that is open, which serves as well.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import BinaryIO

try:
    import fcntl
except ImportError:
    fcntl = None  # type: ignore[assignment]

HAS_LOCKS = fcntl is not None

SQLITE_FROM, SQLITE_BYTES = 2**30, 512
"""Where SQLite's locks on a file lie: whoever has read from it and has it open holds one of them."""


def locked(path: Path, *, wait: bool) -> int | None:
    """An open handle that locks a file or folder; None where another process does, or it cannot be locked."""
    if fcntl is None:
        return None
    handle = None
    try:
        handle = os.open(path, os.O_RDONLY)
        fcntl.flock(handle, fcntl.LOCK_EX | (0 if wait else fcntl.LOCK_NB))
    except OSError:
        if handle is not None:
            os.close(handle)
        return None
    return handle


def lock_as_sqlite_does(opened: BinaryIO) -> bool:
    """Keep every other process from using a file through SQLite as long as it is open; False where one uses it now.

    Closing any descriptor of the file drops this process's locks on it.
    """
    if fcntl is None:
        return True
    try:
        fcntl.lockf(opened, fcntl.LOCK_EX | fcntl.LOCK_NB, SQLITE_BYTES, SQLITE_FROM)
    except (BlockingIOError, PermissionError):
        return False
    return True
