"""An open cache file: transactions, who may write, and how deleted bytes are erased. Knows nothing of completions."""

from __future__ import annotations

import contextlib
import logging
import sqlite3
import threading
from collections.abc import Iterator
from pathlib import Path

from precedent.cache.connection import BUSY_SECONDS, connect
from precedent.cache.schema import FORMAT_VERSION, SCHEMA, migrate
from precedent.errors import CacheError, CacheMismatchError
from precedent.process import OfOneProcess

logger = logging.getLogger("precedent.cache")

LAST_WRITE_ERRORS = ("SQLITE_FULL", "SQLITE_READONLY", "SQLITE_IOERR")


class Database(OfOneProcess):
    """An open cache file, or a database in memory: one connection that writes and one that reads, each behind a lock.

    A commit waits for the disk; readers do not wait for it. In memory both are the same connection. SQLite forbids to
    carry them over a fork.
    """

    instead = "open the cache only in the process that uses it"
    refused_as = CacheError

    def __init__(self, path: Path | None, *, read_only: bool = False) -> None:
        self.path, self.read_only = path, read_only
        self._changes, self._closed, self._warned = 0, False, False
        self._writer = self._open_writer()
        self._write_lock = threading.RLock()
        shared = path is None or read_only
        self._reader = self._writer if shared else connect(path, "mode=ro")
        self._read_lock = self._write_lock if shared else threading.RLock()

    def _open_writer(self) -> sqlite3.Connection:
        if self.path is None:
            connection = connect(None)
            connection.executescript(SCHEMA)
        elif self.read_only:
            return self._open_read_only(self.path)
        else:
            connection = connect(self.path)
            connection.execute("PRAGMA synchronous=FULL")  # a commit that was reported survives a power cut
            _bring_up_to_date(connection)
        connection.execute("PRAGMA secure_delete=ON")
        return connection

    @staticmethod
    def _open_read_only(path: Path) -> sqlite3.Connection:
        connection = connect(path, "mode=ro")
        try:
            connection.execute("SELECT count(*) FROM sqlite_master")
        except sqlite3.OperationalError:  # no log yet and no right to create one: nobody can be writing here either
            connection.close()
            connection = connect(path, "immutable=1")
        version = connection.execute("PRAGMA user_version").fetchone()[0]
        if version != FORMAT_VERSION:
            connection.close()
            raise CacheMismatchError(
                f"{path} has cache format {version} and is read-only; open it once where it may be written, which "
                f"brings it to format {FORMAT_VERSION}"
            )
        return connection

    def __str__(self) -> str:
        return "the cache in memory" if self.path is None else str(self.path)

    @contextlib.contextmanager
    def read(self) -> Iterator[sqlite3.Connection]:
        """The reading connection, alone. Raises CacheError when the file cannot be read."""
        self.check_process()
        with self._read_lock, self._reported():
            yield self._reader

    @contextlib.contextmanager
    def write(self) -> Iterator[sqlite3.Connection]:
        """One transaction: committed and on disk when the block ends, rolled back when it raises."""
        self.check_process()
        with self._write_lock, self._reported():
            self._writer.execute("BEGIN IMMEDIATE")
            try:
                yield self._writer
                self._writer.execute("COMMIT")
                self._changes += 1
            finally:
                if self._writer.in_transaction:
                    self._writer.execute("ROLLBACK")

    def stamp(self) -> tuple[int, int]:
        """Changes with every commit, by this or another process."""
        self.check_process()
        with self._read_lock, self._reported():
            return self._reader.execute("PRAGMA data_version").fetchone()[0], self._changes

    def erase_freed(self) -> None:
        """Rewrite the file and empty its log, so that deleted content is in neither. Raises CacheError if in use."""
        self.check_process()
        with self._write_lock, self._reported():
            try:
                self._writer.execute("VACUUM")
                busy = self._writer.execute("PRAGMA wal_checkpoint(TRUNCATE)").fetchone()[0]
            except sqlite3.OperationalError as error:
                raise CacheError(self._not_erased(str(error))) from error
        if busy:
            raise CacheError(self._not_erased("another process is reading it"))

    def _not_erased(self, reason: str) -> str:
        return f"the records are forgotten, but {self} still holds their bytes ({reason}); run forget once more later"

    def refuses_writes(self) -> bool:
        """True when the cache is read-only; says so once."""
        if self.read_only and not self._warned:
            self._warned = True
            logger.warning("%s is read-only: it is used, but nothing new is stored in it", self)
        return self.read_only

    def size(self) -> int:
        """Bytes on disk, the log included (in memory: bytes of its pages)."""
        if self.path is None:
            with self.read() as connection:
                sizes = "SELECT page_count * page_size FROM pragma_page_count, pragma_page_size"
                return int(connection.execute(sizes).fetchone()[0])
        files = (self.path, self.path.with_name(self.path.name + "-wal"))
        return sum(file.stat().st_size for file in files if file.exists())

    def close(self) -> None:
        """Close the file; the last process to do so folds the log into it."""
        if not self.is_here:
            return
        with self._write_lock, self._read_lock:
            if not self._closed:
                self._closed = True
                self._reader.close()
                self._writer.close()

    @contextlib.contextmanager
    def _reported(self) -> Iterator[None]:
        if self._closed:
            raise CacheError(f"{self} is closed; open it again")
        try:
            yield
        except sqlite3.Error as error:
            if _name(error).startswith(LAST_WRITE_ERRORS):
                self.read_only = True
            raise CacheError(f"{self}: {error}; {_advice(error)}") from error


def _bring_up_to_date(connection: sqlite3.Connection) -> None:
    """Bring a file of an earlier format to today's, whole or not at all; whoever else does so is waited for."""
    if connection.execute("PRAGMA user_version").fetchone()[0] == FORMAT_VERSION:
        return
    connection.execute("BEGIN IMMEDIATE")
    try:
        migrate(connection)
        connection.execute("COMMIT")
    finally:
        if connection.in_transaction:
            connection.execute("ROLLBACK")


def _name(error: sqlite3.Error) -> str:
    return getattr(error, "sqlite_errorname", None) or ""  # absent where Python itself raised


def _advice(error: sqlite3.Error) -> str:
    if _name(error).startswith(("SQLITE_BUSY", "SQLITE_LOCKED")):
        return f"another process has held it for {BUSY_SECONDS:.0f} seconds; try again, or close that process"
    if _name(error).startswith(LAST_WRITE_ERRORS):
        return "free some disk space or make it writable; until it is opened again nothing new is stored"
    return "restore a copy of the file or move it away"
