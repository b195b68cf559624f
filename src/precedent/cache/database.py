"""The SQLite file beneath the store: where it lies, how it is created, checked, opened, written to and erased from.

Nothing here knows what a completion is. A file that is refused is left as it was, byte for byte: it is only ever looked
at through a connection that cannot write.
"""

from __future__ import annotations

import contextlib
import logging
import os
import sqlite3
import tempfile
import threading
import unicodedata
from collections.abc import Iterator
from pathlib import Path

from precedent.errors import CacheError, CacheMismatchError

logger = logging.getLogger("precedent.cache")

APPLICATION_ID = int.from_bytes(b"PRCD", "big")
FORMAT_VERSION = 1
FILE_NAME = "precedent.sqlite"
FILE_SUFFIXES = (".sqlite", ".sqlite3", ".db")
PAGE_BYTES = 4096
BUSY_SECONDS = 20.0
LAST_WRITE_ERRORS = ("SQLITE_FULL", "SQLITE_READONLY", "SQLITE_IOERR")


def database_path(path: str | Path) -> Path:
    """The file meant by `path`: itself if it is a file or ends in .sqlite, .sqlite3 or .db, else one in that folder."""
    if not str(path):
        raise CacheError("the cache's path is empty; give a folder or a file that ends in .sqlite")
    given = Path(path).expanduser()
    if given.is_dir() or (given.suffix not in FILE_SUFFIXES and not given.is_file()):
        return given / FILE_NAME
    return given


def create_file(path: Path, schema: str) -> None:
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
        _write_schema(name, schema)
        _publish(Path(name), path)
    finally:
        Path(name).unlink(missing_ok=True)


def _write_schema(name: str, schema: str) -> None:
    with contextlib.closing(sqlite3.connect(name, isolation_level=None)) as connection:
        connection.execute(f"PRAGMA page_size={PAGE_BYTES}")
        connection.execute(f"PRAGMA application_id={APPLICATION_ID}")
        connection.execute(f"PRAGMA user_version={FORMAT_VERSION}")
        connection.executescript(schema)
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
    if version != FORMAT_VERSION:
        raise CacheMismatchError(
            f"{path} has cache format {version}, this version of precedent reads {FORMAT_VERSION}; left untouched, "
            "upgrade precedent or give another path"
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
        if _has_log(path):
            return _structure_checked(connect(path, "mode=ro"))
        if path.stat().st_size % PAGE_BYTES:
            raise sqlite3.DatabaseError("its last page is cut short")
        return _structure_checked(connect(path, "immutable=1"))
    except sqlite3.DatabaseError:
        if not _has_log(path):
            raise
        return _structure_checked(connect(path, "mode=ro"))  # another process began to write in the meantime


def _has_log(path: Path) -> bool:
    log = path.with_name(path.name + "-wal")
    return log.exists() and log.stat().st_size > 0


def _structure_checked(connection: sqlite3.Connection) -> sqlite3.Connection:
    try:
        verdict = str(connection.execute("PRAGMA quick_check(1)").fetchone()[0])
        if verdict != "ok":
            raise sqlite3.DatabaseError(verdict.replace("\n", " "))
    except BaseException:
        connection.close()
        raise
    return connection


def connect(path: Path | None, mode: str = "mode=rw") -> sqlite3.Connection:
    """Open an existing file (a new database in memory for None) for use from any thread, one at a time."""
    target = ":memory:" if path is None else f"{path.resolve().as_uri()}?{mode}"
    connection = sqlite3.connect(
        target, uri=path is not None, timeout=BUSY_SECONDS, isolation_level=None, check_same_thread=False
    )
    connection.text_factory = _decoded
    connection.create_function("folded_contains", 2, _folded_contains, deterministic=True)
    connection.execute("PRAGMA temp_store=MEMORY")  # a temporary file would be one more place to erase from
    return connection


def folded(text: str) -> str:
    """`text` for comparison without regard to case and to how accents are composed."""
    return unicodedata.normalize("NFKC", unicodedata.normalize("NFKC", text).casefold())


def _folded_contains(text: bytes | None, folded_needle: str) -> bool:
    return folded_needle in folded(_decoded(text or b""))


def _decoded(data: bytes) -> str:
    return data.decode("utf-8", "replace")  # damaged text must not make its neighbours unreadable


class Database:
    """An open cache file, or a database in memory: one connection that writes and one that reads, each behind a lock.

    A commit waits for the disk; readers do not wait for it. In memory both are the same connection.
    """

    def __init__(self, path: Path | None, *, schema: str, read_only: bool = False) -> None:
        self.path, self.read_only = path, read_only
        self._process, self._changes, self._closed, self._warned = os.getpid(), 0, False, False
        self._writer = self._open_writer(schema)
        self._write_lock = threading.RLock()
        shared = path is None or read_only
        self._reader = self._writer if shared else connect(path, "mode=ro")
        self._read_lock = self._write_lock if shared else threading.RLock()

    def _open_writer(self, schema: str) -> sqlite3.Connection:
        if self.path is None:
            connection = connect(None)
            connection.executescript(schema)
        elif self.read_only:
            return self._open_read_only(self.path)
        else:
            connection = connect(self.path)
            connection.execute("PRAGMA synchronous=FULL")  # a commit that was reported survives a power cut
        connection.execute("PRAGMA secure_delete=ON")
        return connection

    @staticmethod
    def _open_read_only(path: Path) -> sqlite3.Connection:
        connection = connect(path, "mode=ro")
        try:
            connection.execute("SELECT count(*) FROM sqlite_master")
        except sqlite3.OperationalError:  # no log yet and no right to create one: nobody can be writing here either
            connection.close()
            return connect(path, "immutable=1")
        return connection

    def __str__(self) -> str:
        return "the cache in memory" if self.path is None else str(self.path)

    @contextlib.contextmanager
    def read(self) -> Iterator[sqlite3.Connection]:
        """The reading connection, alone. Raises CacheError when the file cannot be read."""
        with self._read_lock, self._reported():
            yield self._reader

    @contextlib.contextmanager
    def write(self) -> Iterator[sqlite3.Connection]:
        """One transaction: committed and on disk when the block ends, rolled back when it raises."""
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
        with self._read_lock, self._reported():
            return self._reader.execute("PRAGMA data_version").fetchone()[0], self._changes

    def erase_freed(self) -> None:
        """Rewrite the file and empty its log, so that deleted content is in neither. Raises CacheError if in use."""
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
        with self._write_lock, self._read_lock:
            if not self._closed and self._process == os.getpid():
                self._closed = True
                self._reader.close()
                self._writer.close()

    @contextlib.contextmanager
    def _reported(self) -> Iterator[None]:
        if self._closed:
            raise CacheError(f"{self} is closed; open it again")
        if self._process != os.getpid():  # SQLite forbids carrying a connection over a fork
            raise CacheError(f"{self} was opened before this process was forked; open it again here")
        try:
            yield
        except sqlite3.Error as error:
            if _name(error).startswith(LAST_WRITE_ERRORS):
                self.read_only = True
            raise CacheError(f"{self}: {error}; {_advice(error)}") from error


def _name(error: sqlite3.Error) -> str:
    return getattr(error, "sqlite_errorname", None) or ""  # absent where Python itself raised


def _advice(error: sqlite3.Error) -> str:
    if _name(error).startswith(("SQLITE_BUSY", "SQLITE_LOCKED")):
        return f"another process has held it for {BUSY_SECONDS:.0f} seconds; try again, or close that process"
    if _name(error).startswith(LAST_WRITE_ERRORS):
        return "free some disk space or make it writable; until it is opened again nothing new is stored"
    return "restore a copy of the file or move it away"
