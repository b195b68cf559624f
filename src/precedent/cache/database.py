"""An open cache file: transactions, write access, and erasing deleted bytes. It does not know completions."""

from __future__ import annotations

import contextlib
import ctypes
import logging
import sqlite3
import threading
import unicodedata
import weakref
from collections.abc import Iterator
from functools import cache
from pathlib import Path

from precedent.cache.files import beside, bytes_in, new_file
from precedent.errors import CacheError
from precedent.runtime.process import Lock, OfOneProcess, in_forked_processes

logger = logging.getLogger("precedent.cache")

APPLICATION_ID = int.from_bytes(b"PRCD", "big")
FORMAT_VERSION = 1

SCHEMA = """
CREATE TABLE meta (key TEXT PRIMARY KEY, value) WITHOUT ROWID;
INSERT INTO meta VALUES ('epoch', 0);
CREATE TABLE completion (
    id INTEGER PRIMARY KEY AUTOINCREMENT,
    tenant TEXT NOT NULL,
    tokenizer TEXT NOT NULL,
    identity BLOB NOT NULL,
    created REAL NOT NULL,
    count INTEGER NOT NULL DEFAULT 1,
    hits INTEGER NOT NULL DEFAULT 0,
    accepted INTEGER NOT NULL DEFAULT 0,
    rejected INTEGER NOT NULL DEFAULT 0,
    size INTEGER NOT NULL,
    model TEXT NOT NULL,
    prompt_fingerprint TEXT NOT NULL,
    tools TEXT NOT NULL,
    workflow_step TEXT NOT NULL,
    checksum BLOB NOT NULL,
    vector_checksum BLOB,
    token_ids BLOB NOT NULL,
    query TEXT NOT NULL,
    text TEXT NOT NULL,
    vector BLOB,
    num_tokens INTEGER GENERATED ALWAYS AS (length(token_ids) / 4) VIRTUAL
);
CREATE UNIQUE INDEX completion_identity ON completion (tenant, tokenizer, identity);
CREATE TABLE usage (tenant TEXT PRIMARY KEY, bytes INTEGER NOT NULL, records INTEGER NOT NULL) WITHOUT ROWID;
CREATE INDEX completion_partition ON completion
    (tenant, tokenizer, id, checksum, vector_checksum, count, prompt_fingerprint, num_tokens);
CREATE INDEX completion_worth ON completion (tenant, id, accepted, size);
CREATE INDEX completion_created ON completion (created);
CREATE TRIGGER completion_came AFTER INSERT ON completion BEGIN
    INSERT INTO usage VALUES (new.tenant, new.size, 1)
    ON CONFLICT (tenant) DO UPDATE SET bytes = bytes + excluded.bytes, records = records + 1;
END;
CREATE TRIGGER completion_went AFTER DELETE ON completion BEGIN
    UPDATE usage SET bytes = bytes - old.size, records = records - 1 WHERE tenant = old.tenant;
    DELETE FROM usage WHERE tenant = old.tenant AND records <= 0;
    UPDATE meta SET value = value + 1 WHERE key = 'epoch';
END;
"""
"""Triggers maintain sums and epoch for every writer; large columns come last, so that scans need not read them."""


def schema_difference(connection: sqlite3.Connection) -> str | None:
    """Name an object in which a file's schema differs from a cache's; None for exactly a cache's schema.

    The statements of a foreign schema are read, not run.
    """
    found, wanted = _objects_in(connection), _objects_of_a_cache()
    if found == wanted:
        return None
    kind, name, _ = min(set(found) ^ set(wanted) or found)
    return f"its {kind[:20]!r} {name[:80]!r} is not a cache's"  # another program may have chosen the name


def _objects_in(connection: sqlite3.Connection) -> list[tuple[str, str, str]]:
    """Tables, indexes and triggers, sorted: each one's kind, its name, and the statement that creates it."""
    found = connection.execute("SELECT type, name, tbl_name, sql FROM sqlite_master")
    return sorted((str(kind), str(name), f"{table}: {sql}") for kind, name, table, sql in found)


@cache
def _objects_of_a_cache() -> list[tuple[str, str, str]]:
    with contextlib.closing(sqlite3.connect(":memory:")) as connection:
        connection.executescript(SCHEMA)
        return _objects_in(connection)


def create_file(path: Path) -> None:
    """Create a database at `path` unless there is one: complete or not at all, even under kill -9."""
    if path.exists():
        return
    log = beside(path, "-wal")
    # SQLite would replay a lost file's log into the new one; checked twice, since both may just have been created
    if log.exists() and not path.exists():
        raise CacheError(f"{log} is the log of a cache file that is gone; restore {path.name} or move the log away")
    path.parent.mkdir(parents=True, exist_ok=True)
    with new_file(path, over=False) as file:
        file.write(_empty_database())


@cache
def _empty_database() -> bytes:
    with contextlib.closing(sqlite3.connect(":memory:")) as connection:
        connection.execute(f"PRAGMA application_id={APPLICATION_ID}")
        connection.execute(f"PRAGMA user_version={FORMAT_VERSION}")
        connection.executescript(SCHEMA)
        content = bytearray(connection.serialize())
    content[18:20] = b"\x02\x02"  # the file format's mark for WAL mode, which no database in memory has
    return bytes(content)


BUSY_SECONDS = 20.0
"""Seconds that a transaction waits for another process's transaction."""

BUSY_ERRORS = ("SQLITE_BUSY", "SQLITE_LOCKED", "SQLITE_PROTOCOL")

PASSING_ERRORS = (
    *BUSY_ERRORS,
    *("SQLITE_FULL", "SQLITE_READONLY", "SQLITE_IOERR", "SQLITE_CANTOPEN"),
    *("SQLITE_PERM", "SQLITE_AUTH", "SQLITE_NOMEM", "SQLITE_INTERRUPT", "SQLITE_NOLFS"),
)
"""Prefixes of the names of errors that are not the file's fault."""


class _Connection(sqlite3.Connection):
    """A connection that is registered while it is open; `file` is the device and inode of its file."""

    file: tuple[int, int] | None = None

    def close(self) -> None:
        """Close the connection and unregister it."""
        super().close()
        _OPEN.discard(self)

    def __del__(self) -> None:
        """Close what nobody closed: Python 3.13 and newer warn of it otherwise, wherever it is collected."""
        with contextlib.suppress(sqlite3.ProgrammingError):  # it was never opened
            self.close()


_OPEN: weakref.WeakSet[_Connection] = weakref.WeakSet()
_OPEN_BEFORE_FORK: set[tuple[int, int]] = set()
"""Files that the parent process had open when it forked this one. SQLite's record of its locks was copied along, so
SQLite would take the parent's locks for this process's: two writers at once."""


UNCHANGING = "mode=ro&immutable=1"
"""The mode of `connect` for a file that no process is writing. Without `mode`, SQLite creates a file that is gone."""


def connect(path: Path | None, mode: str = "mode=rw") -> sqlite3.Connection:
    """Open an existing file (None: a new database in memory) for use from any thread, one at a time.

    Raises CacheError for a file that was open when this process was forked.
    """
    file = None
    if path is not None:
        with contextlib.suppress(OSError):  # SQLite says why it cannot be opened
            found = path.stat()
            file = found.st_dev, found.st_ino
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
    """Return whether an error concerns the file itself, not a passing state, the machine or access rights."""
    return not error_name(error).startswith(PASSING_ERRORS)


def advice(error: sqlite3.Error) -> str:
    """Tell the user what to do about an error."""
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


def _leave_open() -> None:
    """In a forked process: record the open files, and never close them, which SQLite forbids too."""
    for connection in list(_OPEN):
        if connection.file is not None:
            _OPEN_BEFORE_FORK.add(connection.file)
            ctypes.pythonapi.Py_IncRef(ctypes.py_object(connection))


in_forked_processes(_leave_open)


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
        self._changes, self.closed, self._warned = 0, False, False
        shared = path is None or read_only
        self._write_lock = threading.RLock()
        self._read_lock = self._write_lock if shared else threading.RLock()
        with _OPENING:
            self._writer = self._open_writer()
            self._reader = self._writer if shared else connect(path, "mode=ro")
            _DATABASES.add(self)

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
            if bytes_in(beside(path, "-wal")):
                raise
            connection = connect(path, UNCHANGING)  # no log and no right to create one: no process is writing
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
        """True if nothing new is stored: the cache was opened so, or its last write failed (a full disk)."""
        return self.opened_read_only or self._cannot_write

    def _can_write_again(self) -> None:
        if self._cannot_write:
            self._cannot_write = self._warned = False
            logger.warning("%s can be written again: new completions are stored", self)

    def refuses_writes(self) -> bool:
        """Return whether the cache is read-only; logs it the first time."""
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
        return bytes_in(self.path) + bytes_in(beside(self.path, "-wal"))

    def close(self) -> None:
        """Close the file; the last process to do so folds the log into it."""
        if not self.is_here:
            return
        with self._write_lock, self._read_lock:
            if not self.closed:
                self.closed = True
                self._reader.close()
                self._writer.close()

    @contextlib.contextmanager
    def _reported(self) -> Iterator[None]:
        if self.closed:
            raise CacheError(f"{self} is closed; open it again")
        try:
            yield
        except sqlite3.Error as error:
            if error_name(error).startswith(LAST_WRITE_ERRORS):
                self._cannot_write = True
            raise CacheError(f"{self}: {error}; {advice(error)}") from error

    def is_open_at(self, path: Path) -> bool:
        """Return whether this database is open, in this process, on the file at `path`."""
        if self.path is None or self.closed or not self.is_here:
            return False
        return self.path.exists() and self.path.samefile(path)


_DATABASES: weakref.WeakSet[Database] = weakref.WeakSet()
_OPENING = Lock()
"""Held while a file is opened or set aside: SQLite's locks work between processes, not within one."""


@contextlib.contextmanager
def unopened(path: Path) -> Iterator[None]:
    """Keep this process from opening any cache. Raises CacheError if it has this one open."""
    with _OPENING:
        if any(database.is_open_at(path) for database in _DATABASES):
            raise CacheError(f"{path} is damaged, and this process has it open; close it and open it again")
        yield


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
