"""An open cache file: transactions, write access, and erasing deleted bytes. It does not know completions."""

from __future__ import annotations

import contextlib
import logging
import sqlite3
import threading
import weakref
from collections.abc import Iterator
from pathlib import Path

from precedent.cache.store.connection import advice, connect, error_name
from precedent.cache.store.files import bytes_in, log_of
from precedent.cache.store.schema import SCHEMA
from precedent.errors import CacheError
from precedent.runtime.process import Lock, OfOneProcess

logger = logging.getLogger("precedent.cache")

LAST_WRITE_ERRORS = ("SQLITE_FULL", "SQLITE_READONLY", "SQLITE_IOERR")


class Database(OfOneProcess):
    """An open cache file, or a database in memory: one connection to write and one to read, each behind a lock.

    A commit waits for the disk; readers do not wait for the commit. In memory, both are the same connection. SQLite
    forbids using connections across a fork.
    """

    instead = "open the cache only in the process that uses it"
    refused_as = CacheError

    def __init__(self, path: Path | None, *, read_only: bool = False) -> None:
        self.path, self.opened_read_only, self._cannot_write = path, read_only, False
        self._changes, self._closed, self._warned = 0, False, False
        if path is not None:
            _OPEN_HERE.note(self, path)
        shared = path is None or read_only
        self._write_lock = threading.RLock()
        self._read_lock = self._write_lock if shared else threading.RLock()
        try:
            self._writer = self._open_writer()
            self._reader = self._writer if shared else connect(path, "mode=ro")
        except BaseException:
            self._closed = True  # nothing is open, even before garbage collection
            raise

    def _open_writer(self) -> sqlite3.Connection:
        if self.path is not None and self.opened_read_only:
            return self._open_read_only(self.path)
        connection = connect(None) if self.path is None else _connect_to_stay(self.path)
        try:
            connection.execute("PRAGMA secure_delete=ON")
            if self.path is None:
                connection.executescript(SCHEMA)
            else:
                connection.execute("PRAGMA journal_mode=WAL")  # already set, unless another program changed it
                connection.execute("PRAGMA synchronous=FULL")  # a reported commit survives a power cut
            return connection
        except BaseException:
            connection.close()
            raise

    @staticmethod
    def _open_read_only(path: Path) -> sqlite3.Connection:
        connection = connect(path, "mode=ro")
        try:
            connection.execute("SELECT count(*) FROM sqlite_master")
        except sqlite3.OperationalError:
            connection.close()
            if bytes_in(log_of(path)):
                raise
            connection = connect(path, "immutable=1")  # no log and no right to create one: no process is writing
        return connection

    def __str__(self) -> str:
        return "the cache in memory" if self.path is None else str(self.path)

    @contextlib.contextmanager
    def read(self) -> Iterator[sqlite3.Connection]:
        """The reading connection, locked for one thread. Raises CacheError if the file cannot be read."""
        self.check_process()
        with self._read_lock, self._reported():
            yield self._reader

    @contextlib.contextmanager
    def write(self) -> Iterator[sqlite3.Connection]:
        """One transaction: committed and on disk when the block ends, rolled back if it raises."""
        self.check_process()
        with self._write_lock, self._reported():
            self._writer.execute("BEGIN IMMEDIATE")
            try:
                yield self._writer
                self._writer.execute("COMMIT")
                self._changes += 1
                self._can_write_again()
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
        self._can_write_again()

    def _not_erased(self, reason: str) -> str:
        return (
            f"the records are forgotten, but {self} still holds their bytes ({reason}); they are erased later, when a "
            "completion is stored or the cache is closed; to erase them now, run forget again"
        )

    @property
    def read_only(self) -> bool:
        """Whether nothing new is stored: the cache was opened so, or its last write failed (a full disk)."""
        return self.opened_read_only or self._cannot_write

    def _can_write_again(self) -> None:
        if self._cannot_write:
            self._cannot_write = self._warned = False
            logger.warning("%s can be written again: new completions are stored", self)

    @property
    def closed(self) -> bool:
        """Whether the file has been closed."""
        return self._closed

    def refuses_writes(self) -> bool:
        """Whether the cache is read-only; logs it the first time."""
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
        return bytes_in(self.path) + bytes_in(log_of(self.path))

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
            if error_name(error).startswith(LAST_WRITE_ERRORS):
                self._cannot_write = True
            raise CacheError(f"{self}: {error}; {advice(error)}") from error

    def is_open_at(self, path: Path) -> bool:
        """Whether this database is open, in this process, on the file at `path`."""
        if self.path is None or self._closed or not self.is_here:
            return False
        return self.path.exists() and self.path.samefile(path)


class _OpenHere:
    """The files that this process has open or sets aside; file locks work between processes, not within one."""

    def __init__(self) -> None:
        self._lock = Lock()
        self._opened: weakref.WeakSet[Database] = weakref.WeakSet()
        self._moving: set[Path] = set()

    def note(self, database: Database, path: Path) -> None:
        """Record that a file is being opened. Raises CacheError while it is being set aside."""
        with self._lock:
            if path.resolve() in self._moving:
                raise CacheError(f"{path} is damaged and being set aside; open it again")
            self._opened.add(database)

    def _is_open(self, path: Path) -> bool:
        return any(database.is_open_at(path) for database in self._opened)

    @contextlib.contextmanager
    def moving(self, path: Path) -> Iterator[None]:
        """Keep this process from opening the file. Raises CacheError if it has it open."""
        with self._lock:
            if path.resolve() in self._moving or self._is_open(path):
                raise CacheError(f"{path} is damaged, and this process has it open; close it and open it again")
            self._moving.add(path.resolve())
        try:
            yield
        finally:
            with self._lock:
                self._moving.discard(path.resolve())


_OPEN_HERE = _OpenHere()
moving = _OPEN_HERE.moving


def _connect_to_stay(path: Path) -> sqlite3.Connection:
    """A connection to the file at `path`, even if another process sets that file aside meanwhile.

    It may do so while no process has read from the file. A process that opened the old file just before would then
    write its data into the new file's log.
    """
    while True:
        before = path.stat()
        connection = connect(path)
        try:
            connection.execute("SELECT count(*) FROM sqlite_master")
            if path.stat().st_ino == before.st_ino:
                return connection
        except BaseException:
            connection.close()
            raise
        connection.close()
