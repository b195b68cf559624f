"""A cache file's place, the files that belong to it, and its creation: complete or not at all, even under kill -9."""

from __future__ import annotations

import contextlib
import errno
import os
import re
import stat
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import BinaryIO

from precedent.cache.store_url import StoreURL, place_of
from precedent.errors import CacheError

try:
    import fcntl
except ImportError:
    fcntl = None  # type: ignore[assignment]

HAS_LOCKS = fcntl is not None

NO_LINK = getattr(os, "O_NOFOLLOW", 0) | getattr(os, "O_NONBLOCK", 0) | getattr(os, "O_CLOEXEC", 0)
"""Flags that open a file itself: not what a link leads to, and without waiting for the other end of a pipe."""

SQLITE_FROM, SQLITE_BYTES = 2**30, 512
"""The range of SQLite's shared locks in a file: a process that has the file open and has read from it holds one."""


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


FILE_NAME = "precedent.sqlite"
FILE_SUFFIXES = (".sqlite", ".sqlite3", ".db")

NEW_FILE = re.compile(r"\.precedent-\w{8}\.new")
"""The names that `new_file` gives to unfinished files."""

ABANDONED = 3_600.0
"""Seconds after which an unfinished file is taken for one of a dead process."""


def database_path(path: str | Path) -> Path:
    """The database file for `path`: a file or a path ending in .sqlite, .sqlite3 or .db itself, else a file in it."""
    if not str(path):
        raise CacheError("the cache's path is empty; give a folder or a file that ends in .sqlite")
    if isinstance(place := place_of(path), StoreURL):
        raise CacheError(f"{place} is not a folder or file; SpeculationCache.open also opens URLs")
    given = Path(path).expanduser()
    file = given
    if given.is_dir() or (given.suffix not in FILE_SUFFIXES and not given.is_file()):
        file = given / FILE_NAME
    return file.resolve() if file.is_symlink() else file  # SQLite puts its log beside the file that a link names


BESIDE = ("-wal", "-journal", "-shm", "-prefixes")
"""Endings of names beside a cache's file: SQLite's log (what was written since it was last folded into the file), the
journal that SQLite rolls back (only another program leaves one), the index of the log, and the kept prefixes."""


def beside(path: Path, ending: str) -> Path:
    """The file or folder beside a cache's file whose name has one of the endings `BESIDE`."""
    return path.with_name(path.name + ending)


def check_links(path: Path) -> None:
    """Raise CacheError if one of the names beside a cache's file, which is written to, is a link."""
    for ending in BESIDE:
        if beside(path, ending).is_symlink():
            raise _is_a_link(beside(path, ending))


def _is_a_link(path: Path) -> CacheError:
    return CacheError(
        f"{path} is a link, which Precedent does not follow: move it away (to keep a cache elsewhere, link its whole "
        "folder)"
    )


def is_own_folder(path: Path) -> bool:
    """Return whether a folder is there. Raises CacheError for a link: files elsewhere would be read and erased."""
    try:
        mode = path.lstat().st_mode
    except (FileNotFoundError, NotADirectoryError):
        return False
    if stat.S_ISLNK(mode):
        raise _is_a_link(path)
    return stat.S_ISDIR(mode)


def open_own(path: Path, flags: int = os.O_RDONLY, mode: int = 0o600) -> int:
    """Open a regular file that Precedent made. Raises OSError for a link, a pipe, a device or a folder."""
    handle = os.open(path, flags | NO_LINK | getattr(os, "O_BINARY", 0), mode)
    if not stat.S_ISREG(os.fstat(handle).st_mode):
        os.close(handle)
        raise OSError(errno.EINVAL, "not a regular file", str(path))
    return handle


def read_own(path: Path, most: int = sys.maxsize) -> bytes:
    """The content of a file that Precedent made. Raises OSError, also for one of more than `most` bytes."""
    with os.fdopen(open_own(path), "rb") as file:
        if os.fstat(file.fileno()).st_size > most:
            raise OSError(errno.EFBIG, f"larger than {most} bytes", str(path))
        return file.read()


def bytes_in(path: Path) -> int:
    """The size of a file; 0 if there is none."""
    try:
        return path.stat().st_size
    except FileNotFoundError:
        return 0


def wait_for_folder(folder: Path) -> None:
    """Wait until file names are on disk, where the system supports that."""
    with contextlib.suppress(OSError):
        handle = os.open(folder, os.O_RDONLY)
        try:
            os.fsync(handle)
        finally:
            os.close(handle)


@contextlib.contextmanager
def alone_in(folder: Path) -> Iterator[None]:
    """Let one thread or process at a time run the body, among those that ask for this folder.

    The lock ends with its process. Windows has no such locks, but refuses to rename a file that is open.
    """
    handle = None
    try:
        if fcntl is not None:
            with contextlib.suppress(OSError):  # a file system without locks
                handle = os.open(folder.resolve(), os.O_RDONLY | NO_LINK)
                fcntl.flock(handle, fcntl.LOCK_EX)
        yield
    finally:
        if handle is not None:
            os.close(handle)


@contextlib.contextmanager
def new_file(target: Path, mode: int = 0o600, *, over: bool = True) -> Iterator[BinaryIO]:
    """A file beside `target` that takes its place once it is complete and on disk.

    Without `over`, a target that another process has made meanwhile stays.
    """
    handle, name = tempfile.mkstemp(prefix=".precedent-", suffix=".new", dir=target.parent)
    new = Path(name)
    try:
        with os.fdopen(handle, "wb") as file:
            yield file
            file.flush()
            os.fsync(file.fileno())
        new.chmod(mode)
        if over:
            new.replace(target)
        else:
            _link(new, target)
    finally:
        new.unlink(missing_ok=True)


def _link(new: Path, target: Path) -> None:
    try:
        os.link(new, target)
    except FileExistsError:
        return
    except OSError:  # a file system without hard links
        if not target.exists():
            new.rename(target)
    wait_for_folder(target.parent)


def sweep(folder: Path) -> None:
    """Remove the unfinished files of processes that were killed."""
    for left in folder.iterdir():
        if NEW_FILE.fullmatch(left.name) is not None:
            with contextlib.suppress(OSError):  # another process was first
                if time.time() - left.lstat().st_mtime > ABANDONED:
                    left.unlink()


def erase_file(file: Path) -> None:
    """Overwrite, then delete: so even a reader that still has the file open finds nothing in it.

    Of a link, a pipe or a file that has another name too, only this name goes: the rest is not Precedent's.
    """
    try:
        handle = open_own(file, os.O_RDWR)
    except OSError:  # a link, a pipe, a file of another user, or one that is gone
        file.unlink(missing_ok=True)
        return
    try:
        _overwrite(handle)
    finally:
        file.unlink(missing_ok=True)


def _overwrite(handle: int) -> None:
    with os.fdopen(handle, "r+b") as opened:
        found = os.fstat(handle)
        if found.st_nlink == 1:
            opened.write(bytes(found.st_size))
            opened.flush()
            os.fsync(handle)
