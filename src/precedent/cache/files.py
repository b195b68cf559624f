"""Where a cache file lies, how it is created whole or not at all, and how it is checked before anything trusts it.

A file that is refused is left as it was, byte for byte: it is only ever looked at through a connection that cannot
write.
"""

from __future__ import annotations

import contextlib
import os
import sqlite3
import tempfile
from collections.abc import Iterator
from pathlib import Path

from precedent.cache.connection import connect
from precedent.cache.schema import APPLICATION_ID, FORMAT_VERSION, READABLE_FROM, SCHEMA
from precedent.cache.store_url import StoreURL, place_of
from precedent.errors import CacheError, CacheMismatchError

FILE_NAME = "precedent.sqlite"
FILE_SUFFIXES = (".sqlite", ".sqlite3", ".db")
PAGE_BYTES = 4096

CHECKED_WHOLE = 16 * 2**20
"""A file up to this size is checked page by page whenever it is opened (some 20 ms); `verify` does so with any."""


def database_path(path: str | Path) -> Path:
    """The file meant by `path`: itself if it is a file or ends in .sqlite, .sqlite3 or .db, else one in that folder."""
    if not str(path):
        raise CacheError("the cache's path is empty; give a folder or a file that ends in .sqlite")
    if isinstance(place := place_of(path), StoreURL):
        raise CacheError(f"{place} is no folder or file; SpeculationCache.open opens URLs as well")
    given = Path(path).expanduser()
    if given.is_dir() or (given.suffix not in FILE_SUFFIXES and not given.is_file()):
        return given / FILE_NAME
    return given


def create_file(path: Path) -> None:
    """Create a database at `path` unless there is one: whole or not at all, also under kill -9."""
    if path.exists():
        return
    log = path.with_name(path.name + "-wal")
    # SQLite would replay the log of the lost file into the new one; asked again, since both may just have been created
    if log.exists() and not path.exists():
        raise CacheError(f"{log} is the log of a cache file that is gone; restore {path.name} or move the log away")
    path.parent.mkdir(parents=True, exist_ok=True)
    handle, name = tempfile.mkstemp(prefix=".precedent-", suffix=".new", dir=path.parent)  # readable by its owner only
    os.close(handle)
    try:
        _write_schema(name)
        _publish(Path(name), path)
    finally:
        Path(name).unlink(missing_ok=True)


def _write_schema(name: str) -> None:
    with contextlib.closing(sqlite3.connect(name, isolation_level=None)) as connection:
        connection.execute(f"PRAGMA page_size={PAGE_BYTES}")
        connection.execute(f"PRAGMA application_id={APPLICATION_ID}")
        connection.execute(f"PRAGMA user_version={FORMAT_VERSION}")
        connection.executescript(SCHEMA)
        connection.execute("PRAGMA journal_mode=WAL")


def _publish(new: Path, path: Path) -> None:
    try:
        os.link(new, path)
    except FileExistsError:
        return  # another process was first, with the same content
    except OSError:  # a file system without hard links
        if not path.exists():
            new.rename(path)


def check_header(path: Path) -> None:
    """Raise CacheError unless the file is a cache in a format that this version reads.

    SQLite reads the header, not `open()`: closing another descriptor of the file would drop this process's locks on it.
    """
    try:
        with contextlib.closing(connect(path, "immutable=1")) as connection:
            marks = [connection.execute(f"PRAGMA {name}").fetchone()[0] for name in ("application_id", "user_version")]
    except sqlite3.DatabaseError as error:
        raise CacheError(f"{path} is not a cache ({error}); left untouched, give another path") from error
    if marks[0] != APPLICATION_ID:
        raise CacheMismatchError(f"{path} is not a cache but some other file; left untouched, give another path")
    check_version(path, marks[1])


def check_version(path: Path, version: int) -> None:
    """Raise CacheMismatchError unless this version of the library reads that format."""
    if not READABLE_FROM <= version <= FORMAT_VERSION:
        raise CacheMismatchError(
            f"{path} has cache format {version}, this version of precedent reads {READABLE_FROM} to {FORMAT_VERSION}; "
            "left untouched, upgrade precedent or give another path"
        )


@contextlib.contextmanager
def inspecting(path: Path) -> Iterator[sqlite3.Connection]:
    """A connection that looks at the file as it is and cannot change it; the structure has been checked."""
    try:
        connection = _checked_snapshot(path)
    except sqlite3.DatabaseError as error:
        raise CacheError(f"{path} is damaged ({error}); left untouched, restore a copy or move it away") from error
    try:
        yield connection
    finally:
        connection.close()


def _checked_snapshot(path: Path) -> sqlite3.Connection:
    try:
        if has_log(path):
            return _structure_checked(connect(path, "mode=ro"), path)
        if path.stat().st_size % PAGE_BYTES:
            raise sqlite3.DatabaseError("its last page is cut short")
        return _structure_checked(connect(path, "immutable=1"), path)
    except sqlite3.DatabaseError:
        if not has_log(path):
            raise
        return _structure_checked(connect(path, "mode=ro"), path)  # another process began to write in the meantime


def has_log(path: Path) -> bool:
    """Whether part of the cache stands in its log."""
    log = path.with_name(path.name + "-wal")
    return log.exists() and log.stat().st_size > 0


def _structure_checked(connection: sqlite3.Connection, path: Path) -> sqlite3.Connection:
    try:
        verdict = "ok"
        size, pages = path.stat().st_size, connection.execute("PRAGMA page_count").fetchone()[0]
        if size < pages * PAGE_BYTES and not has_log(path):
            verdict = f"{pages * PAGE_BYTES - size} bytes are missing at its end"
        elif size <= CHECKED_WHOLE:
            verdict = str(connection.execute("PRAGMA quick_check(1)").fetchone()[0])
        if verdict != "ok":
            raise sqlite3.DatabaseError(verdict.replace("\n", " "))
        connection.execute("SELECT count(*) FROM sqlite_master").fetchone()
    except BaseException:
        connection.close()
        raise
    return connection
