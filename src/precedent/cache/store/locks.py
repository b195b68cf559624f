"""Locks between processes that end with the process that holds them, even if it is killed.

Windows has no such locks, but it refuses to delete or replace an open file, which serves the same purpose.
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

NO_LINK = getattr(os, "O_NOFOLLOW", 0) | getattr(os, "O_NONBLOCK", 0) | getattr(os, "O_CLOEXEC", 0)
"""Flags that open a file itself: not what a link leads to, and without waiting for the other end of a pipe."""

SQLITE_FROM, SQLITE_BYTES = 2**30, 512
"""The range of SQLite's shared locks in a file: a process that has the file open and has read from it holds one."""


def locked(path: Path, *, wait: bool) -> int | None:
    """An open handle that locks a file or folder; None if another process has it locked, or it cannot be locked.

    A link cannot be locked.
    """
    if fcntl is None:
        return None
    handle = None
    try:
        handle = os.open(path, os.O_RDONLY | NO_LINK)
        fcntl.flock(handle, fcntl.LOCK_EX | (0 if wait else fcntl.LOCK_NB))
    except OSError:
        if handle is not None:
            os.close(handle)
        return None
    return handle


def lock_as_sqlite_does(opened: BinaryIO) -> bool:
    """Keep other processes from using a file through SQLite while it is open; False if one is using it now.

    Closing any descriptor of the file drops this process's locks on it.
    """
    if fcntl is None:
        return True
    try:
        fcntl.lockf(opened, fcntl.LOCK_EX | fcntl.LOCK_NB, SQLITE_BYTES, SQLITE_FROM)
    except (BlockingIOError, PermissionError):
        return False
    return True
