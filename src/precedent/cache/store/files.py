"""A cache file's place, the files that belong to it, and its creation: complete or not at all, even under kill -9."""

from __future__ import annotations

import contextlib
import errno
import logging
import os
import re
import sqlite3
import stat
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import BinaryIO

from precedent.cache.store.locks import NO_LINK, locked
from precedent.cache.store.schema import APPLICATION_ID, FORMAT_VERSION, SCHEMA
from precedent.cache.store.store_url import StoreURL, place_of
from precedent.errors import CacheError

logger = logging.getLogger("precedent.cache")

FILE_NAME = "precedent.sqlite"
FILE_SUFFIXES = (".sqlite", ".sqlite3", ".db")
PAGE_BYTES = 4096

_HALF_MADE = (".precedent-", ".new")
"""Prefix and suffix of the folder in which a file is made."""

_MADE = re.compile(r"\.precedent-\w{8}\.new")
NEW_FILE = re.compile(r"\.\w{8}\.new")
"""The names that `new_file` gives to unfinished files."""


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


def log_of(path: Path) -> Path:
    """SQLite's log: what was written since it was last folded into the file."""
    return path.with_name(path.name + "-wal")


def journal_of(path: Path) -> Path:
    """What SQLite rolls back when it opens a file; a cache has none, unless another program changed its mode."""
    return path.with_name(path.name + "-journal")


def shared_memory_of(path: Path) -> Path:
    """The index of SQLite's log, which all processes that have the file open share."""
    return path.with_name(path.name + "-shm")


def check_links(path: Path) -> None:
    """Raise CacheError if one of the names beside a cache's file, which SQLite writes to, is a link."""
    for beside in (log_of(path), journal_of(path), shared_memory_of(path)):
        if beside.is_symlink():
            raise CacheError(f"{beside} is a link, which Precedent does not write through; move it away")


def is_own_folder(path: Path) -> bool:
    """Whether a folder is there. Raises CacheError if the path is a link: files elsewhere would be read and erased."""
    try:
        mode = path.lstat().st_mode
    except (FileNotFoundError, NotADirectoryError):
        return False
    if stat.S_ISLNK(mode):
        raise CacheError(
            f"{path} is a link, which Precedent does not follow: move it away (to keep a cache elsewhere, link its "
            "whole folder)"
        )
    return stat.S_ISDIR(mode)


def check_folders(path: Path) -> None:
    """Raise CacheError if one of the folders beside a cache's file is a link."""
    for ending in ("-index", "-prefixes"):
        is_own_folder(path.with_name(path.name + ending))


def open_own(path: Path, flags: int = os.O_RDONLY, mode: int = 0o600) -> int:
    """Open a regular file that Precedent made. Raises OSError for a link, a pipe, a device or a folder."""
    handle = os.open(path, flags | NO_LINK | getattr(os, "O_BINARY", 0), mode)
    if not stat.S_ISREG(os.fstat(handle).st_mode):
        os.close(handle)
        raise OSError(errno.EINVAL, "not a regular file", str(path))
    return handle


def read_own(path: Path) -> bytes:
    """The content of a file that Precedent made. Raises OSError."""
    with os.fdopen(open_own(path), "rb") as file:
        return file.read()


def touch_own(path: Path, mode: int = 0o600) -> None:
    """Make an empty file unless there is one. Raises OSError for a link or anything else that is not a file."""
    os.close(open_own(path, os.O_RDWR | os.O_CREAT, mode))


def bytes_in(path: Path) -> int:
    """The size of a file; 0 if there is none."""
    try:
        return path.stat().st_size
    except FileNotFoundError:
        return 0


def create_file(path: Path) -> None:
    """Create a database at `path` unless there is one: complete or not at all, even under kill -9."""
    if path.exists():
        return
    log = log_of(path)
    # SQLite would replay a lost file's log into the new one; checked twice, since both may just have been created
    if log.exists() and not path.exists():
        raise CacheError(f"{log} is the log of a cache file that is gone; restore {path.name} or move the log away")
    path.parent.mkdir(parents=True, exist_ok=True)
    with half_made(path.parent) as new:
        _write_database(new)
        _publish(new, path)


def _write_database(path: Path) -> None:
    """Turn an empty file into an empty cache; it is on disk when this returns.

    No other process uses the file yet, so nothing needs a rollback journal.
    """
    with contextlib.closing(sqlite3.connect(path, isolation_level=None)) as connection:
        for setting in ("journal_mode=MEMORY", "synchronous=OFF", "temp_store=MEMORY", f"page_size={PAGE_BYTES}"):
            connection.execute(f"PRAGMA {setting}")
        connection.execute(f"PRAGMA application_id={APPLICATION_ID}")
        connection.execute(f"PRAGMA user_version={FORMAT_VERSION}")
        connection.executescript(f"BEGIN; {SCHEMA} COMMIT")
        connection.execute("PRAGMA journal_mode=WAL")
    with path.open("rb+") as written:
        os.fsync(written.fileno())


def _publish(new: Path, path: Path) -> None:
    try:
        os.link(new, path)
    except FileExistsError:
        return  # another process was first, with the same content
    except OSError:  # a file system without hard links
        if not path.exists():
            new.rename(path)
    wait_for_folder(path.parent)


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
    """Let one thread or process at a time run the body, among those that ask for this folder."""
    handle = locked(folder.resolve(), wait=True)
    try:
        yield
    finally:
        if handle is not None:
            os.close(handle)


@contextlib.contextmanager
def half_made(folder: Path) -> Iterator[Path]:
    """An empty file to be filled and moved away, readable by its owner only.

    It is in a folder of its own, which stays locked while this process lives, so `sweep` can tell leftovers of dead
    processes. The lock is not on the file: closing that handle later would drop SQLite's locks on the file.
    """
    made, handle = _own_folder(folder)
    try:
        new = made / FILE_NAME
        new.touch(mode=0o600)
        yield new
    finally:
        _remove_made(made)
        if handle is not None:
            os.close(handle)


def _remove_made(folder: Path) -> None:
    """Remove a folder of `half_made`, and in it only what SQLite and `half_made` put there."""
    with contextlib.suppress(OSError):
        new = folder / FILE_NAME
        for file in (new, log_of(new), journal_of(new), shared_memory_of(new)):
            file.unlink(missing_ok=True)
        folder.rmdir()


def _own_folder(folder: Path) -> tuple[Path, int | None]:
    """A new folder and the open handle that keeps it locked; None if folders cannot be locked."""
    prefix, suffix = _HALF_MADE
    while True:
        made = Path(tempfile.mkdtemp(prefix=prefix, suffix=suffix, dir=folder))
        handle = locked(made, wait=True)
        if made.exists():
            return made, handle
        if handle is not None:  # another process removed it before it was locked
            os.close(handle)


@contextlib.contextmanager
def new_file(target: Path, mode: int = 0o600) -> Iterator[BinaryIO]:
    """A file beside `target` that takes its place once it is complete and on disk."""
    handle, name = tempfile.mkstemp(prefix=".", suffix=".new", dir=target.parent)
    try:
        with os.fdopen(handle, "wb") as file:
            yield file
            file.flush()
            os.fsync(file.fileno())
        Path(name).chmod(mode)
        Path(name).replace(target)
    finally:
        Path(name).unlink(missing_ok=True)


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


def sweep(folder: Path) -> None:
    """Remove the leftovers of processes that were killed while making a file; never those of a living process."""
    for left in folder.iterdir():
        if _MADE.fullmatch(left.name) is None:
            continue
        handle = locked(left, wait=False)
        if handle is None:
            continue
        try:
            logger.info("%s is an unfinished file of a dead process; it is removed", left)
            _remove_made(left)
        finally:
            os.close(handle)
