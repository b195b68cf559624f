"""A cache file's place, the files that belong to it, and its creation: complete or not at all, even under kill -9."""

from __future__ import annotations

import contextlib
import logging
import os
import shutil
import sqlite3
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import BinaryIO

from precedent.cache.store.locks import locked
from precedent.cache.store.schema import APPLICATION_ID, FORMAT_VERSION, SCHEMA
from precedent.cache.store.store_url import StoreURL, place_of
from precedent.errors import CacheError

logger = logging.getLogger("precedent.cache")

FILE_NAME = "precedent.sqlite"
FILE_SUFFIXES = (".sqlite", ".sqlite3", ".db")
PAGE_BYTES = 4096

_HALF_MADE = (".precedent-", ".new")
"""Prefix and suffix of the folder in which a file is made."""


def database_path(path: str | Path) -> Path:
    """The database file for `path`: a file or a path ending in .sqlite, .sqlite3 or .db itself, else a file in it."""
    if not str(path):
        raise CacheError("the cache's path is empty; give a folder or a file that ends in .sqlite")
    if isinstance(place := place_of(path), StoreURL):
        raise CacheError(f"{place} is not a folder or file; SpeculationCache.open also opens URLs")
    given = Path(path).expanduser()
    if given.is_dir() or (given.suffix not in FILE_SUFFIXES and not given.is_file()):
        return given / FILE_NAME
    return given


def log_of(path: Path) -> Path:
    """SQLite's log: what was written since it was last folded into the file."""
    return path.with_name(path.name + "-wal")


def journal_of(path: Path) -> Path:
    """What SQLite rolls back when it opens a file; a cache has none, unless another program changed its mode."""
    return path.with_name(path.name + "-journal")


def shared_memory_of(path: Path) -> Path:
    """The index of SQLite's log, which all processes that have the file open share."""
    return path.with_name(path.name + "-shm")


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
    handle = locked(folder, wait=True)
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
        shutil.rmtree(made, ignore_errors=True)
        if handle is not None:
            os.close(handle)


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
    """Overwrite, then delete: so even a reader that still has the file open finds nothing in it."""
    with contextlib.suppress(PermissionError, FileNotFoundError), file.open("r+b") as opened:
        opened.write(bytes(file.stat().st_size))
        opened.flush()
        os.fsync(opened.fileno())
    file.unlink(missing_ok=True)


def sweep(folder: Path) -> None:
    """Remove the leftovers of processes that were killed while making a file; never those of a living process."""
    prefix, suffix = _HALF_MADE
    for left in folder.glob(f"{prefix}*{suffix}*"):
        handle = locked(left, wait=False)
        if handle is None:
            continue
        try:
            logger.info("%s is an unfinished file of a dead process; it is removed", left)
            shutil.rmtree(left, ignore_errors=True)
        except OSError as error:
            logger.info("%s cannot be removed: %s", left, error)
        finally:
            os.close(handle)
