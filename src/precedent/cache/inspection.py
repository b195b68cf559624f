"""Inspects a cache file before anything trusts it, and sets aside one that cannot be read.

An inspection changes nothing and is cheap: it copies nothing, and reads all pages only up to `CHECKED_WHOLE` bytes.

- Without a log, the file alone is the cache. It is opened as `immutable`, which takes no lock and creates no files.
- With a log, SQLite combines the two, whether processes are using them or a killed process left them: after an
  interrupted checkpoint, the file is valid only together with its log. The connection is read-only and works under
  SQLite's own locks, so it sees one moment while others write, and does not fold the log into the file.
- A file of zero bytes, or one, is never opened with SQLite, which would take it for new and delete the log beside it.

Only SQLite opens the file during an inspection: closing another descriptor of it would drop this process's locks on it.
"""

from __future__ import annotations

import contextlib
import itertools
import logging
import shlex
import sqlite3
import time
from collections.abc import Iterator
from pathlib import Path

from precedent.cache import database, files, rows
from precedent.cache.database import UNCHANGING, advice, connect, error_name, is_damage, schema_difference, unopened
from precedent.cache.files import beside, bytes_in
from precedent.cache.records import Damage, VerifyReport
from precedent.errors import CacheError, CacheMismatchError

logger = logging.getLogger("precedent.cache")

CHECKED_WHOLE = 16 * 2**20
"""A cache up to this size is checked page by page each time it is opened (some 20 ms); `verify` checks any size."""

LOOKS = 3
"""Number of times to inspect a file that other processes keep changing meanwhile."""

FRAME_HEADER_BYTES = 24
"""Bytes that a log adds to each page."""

PAUSE_SECONDS = 0.05


class UnreadableError(CacheError):
    """A cache that cannot be read, for `reason`. `state` is the file's as it was inspected."""

    def __init__(self, path: Path, reason: str) -> None:
        super().__init__(
            f"{path} is damaged ({reason}); left untouched: restore a copy, move it away, or recover its rows with "
            f"`{_recover(path)}`"
        )
        self.reason = reason
        self.state: tuple[object, ...] = ()


@contextlib.contextmanager
def inspecting(path: Path, *, whole: bool = False) -> Iterator[sqlite3.Connection]:
    """A read-only connection that shows the cache at one moment, after all checks.

    `whole` reads every page, whatever their number. Raises UnreadableError for a damaged cache, CacheMismatchError for
    another program's file, another format or a schema that is not a cache's, CacheError for what cannot be read now.
    """
    for look in range(1, LOOKS + 1):
        before = _state(path)
        try:
            connection = _checked(path, whole)
            break
        except CacheError as error:
            if isinstance(error, UnreadableError):
                error.state = before
            if look == LOOKS or _state(path) == before:
                raise
    with contextlib.closing(connection):
        yield connection


def set_aside(path: Path, error: UnreadableError) -> Path:
    """Rename a damaged file and its log, and log one warning; returns the file's new place.

    Call it alone in the file's folder (`files.alone_in`). Raises CacheError if a process has it open, or has changed it
    since the inspection that found the damage.
    """
    with _alone(path):
        if _state(path) != error.state:
            raise CacheError(f"{path} was changed while it was inspected; open it again")
        kept = _free_name(path)
        for ending in ("-wal", "-journal", "-shm"):  # the log first: SQLite would replay it into a new file
            if beside(path, ending).exists():
                beside(path, ending).rename(beside(kept, ending))
        path.rename(kept)
        files.wait_for_folder(path.parent)
    logger.warning(
        "%s cannot be read (%s): it was set aside as %s, and the cache starts empty; `%s` prints what can still be "
        "read of it",
        *(path, error.reason, kept.name, _recover(kept)),
    )
    return kept


def _recover(path: Path) -> str:
    return f"sqlite3 {shlex.quote(str(path))} .recover"


@contextlib.contextmanager
def _alone(path: Path) -> Iterator[None]:
    """Keep all processes from using the file through SQLite.

    A process that has it open would delete the log of its successor when it closes.
    """
    with contextlib.ExitStack() as stack:
        stack.enter_context(unopened(path))
        opened = stack.enter_context(path.open("rb+"))
        give_up = time.monotonic() + database.BUSY_SECONDS
        while not files.lock_as_sqlite_does(opened):
            if time.monotonic() > give_up:
                raise CacheError(f"{path} is damaged, and another process has it open; close that process")
            time.sleep(PAUSE_SECONDS)
        if not files.HAS_LOCKS:  # Windows cannot rename an open file
            opened.close()
        yield


def _free_name(path: Path) -> Path:
    """A name that no file has: one that was set aside earlier may hold the only copy of something."""
    names = (f"{path.name}.damaged" + (f"-{number}" if number > 1 else "") for number in itertools.count(1))
    return next(kept for name in names if not (kept := path.with_name(name)).exists())


def _state(path: Path) -> tuple[object, ...]:
    """Changes when another process has changed or replaced the file."""
    found = path.stat()
    return found.st_ino, found.st_size, found.st_mtime_ns, bytes_in(beside(path, "-wal"))


def _checked(path: Path, whole: bool) -> sqlite3.Connection:
    files.check_links(path)
    if bytes_in(path) <= 1:
        raise UnreadableError(path, "it is empty")
    alone = not bytes_in(beside(path, "-wal")) and not bytes_in(beside(path, "-journal"))
    connection = connect(path, UNCHANGING if alone else "mode=ro")
    try:
        _check_marks(connection, path)
        connection.execute("BEGIN")  # check everything else at one moment
        difference = schema_difference(connection)  # what was added to it could run when a record is stored
        if difference is not None:
            raise _not_a_cache(path, difference)
        _check_pages(connection, path, alone=alone, whole=whole)
        try:  # the few values without which no record can be read or stored
            rows.check_numbers(connection)
            rows.recorded_embedder(connection)
        except CacheError as error:
            raise UnreadableError(path, str(error)) from error
        return connection
    except (sqlite3.Error, UnicodeDecodeError) as error:  # a damaged name in SQLite's message is not UTF-8
        connection.close()
        raise _refusal(path, error) from error
    except BaseException:
        connection.close()
        raise


def _check_marks(connection: sqlite3.Connection, path: Path) -> None:
    """Check the file's program and format, even if its end is missing, which SQLite refuses without writable_schema."""
    try:
        connection.execute("PRAGMA writable_schema=ON")
        mark, version = (
            connection.execute(f"PRAGMA {name}").fetchone()[0] for name in ("application_id", "user_version")
        )
        connection.execute("PRAGMA writable_schema=OFF")
    except sqlite3.DatabaseError as error:
        if not is_damage(error) or path.name == files.FILE_NAME:
            raise
        raise _not_a_cache(path, str(error)) from error
    if mark != database.APPLICATION_ID:
        raise _not_a_cache(path, "it is another program's database")
    if version != database.FORMAT_VERSION:
        raise CacheMismatchError(
            f"{path} has cache format {version}, and this version of precedent reads {database.FORMAT_VERSION}; left "
            "untouched, upgrade precedent or give another path"
        )


def _not_a_cache(path: Path, reason: str) -> CacheMismatchError:
    return CacheMismatchError(f"{path} is not a cache ({reason}); left untouched, give another path")


def _check_pages(connection: sqlite3.Connection, path: Path, *, alone: bool, whole: bool) -> None:
    pages, size = (connection.execute(f"PRAGMA {name}").fetchone()[0] for name in ("page_count", "page_size"))
    missing = pages - path.stat().st_size // size
    if alone and missing > 0:  # SQLite would read zeros there
        raise UnreadableError(path, "its end is missing")
    if not alone and missing * (FRAME_HEADER_BYTES + size) > bytes_in(beside(path, "-wal")):
        raise UnreadableError(path, f"{missing} pages are missing at its end, more than its log can hold")
    if whole or pages * size <= CHECKED_WHOLE:
        check = "integrity_check(1)" if whole else "quick_check(1)"
        verdict = str(connection.execute(f"PRAGMA {check}").fetchone()[0])
        if verdict != "ok":
            raise UnreadableError(path, " ".join(verdict.split()))


def _refusal(path: Path, error: Exception) -> CacheError:
    reason = " ".join(str(error).split())
    if error_name(error) == "SQLITE_READONLY_ROLLBACK":
        return CacheError(
            f"another program left {path.name}-journal beside {path}, to be rolled back into it; left untouched, "
            "open it with that program once, or move the journal away"
        )
    if isinstance(error, sqlite3.Error) and not is_damage(error):
        return CacheError(f"{path} cannot be inspected now: {reason}; {advice(error)}")
    return UnreadableError(path, reason)


def verify_cache(path: str | Path) -> VerifyReport:
    """Check a cache's pages, schema, records and vectors; changes nothing.

    A damaged record or vector is never used; forget it by its id. A file with a damaged structure is set aside when it
    is opened next. Raises CacheError if there is no cache at `path`, if it cannot be read now, or if a link stands in
    place of a folder beside it.
    """
    file = files.database_path(path)
    if not file.exists():
        raise CacheError(f"there is no cache at {file}")
    try:
        with inspecting(file, whole=True) as connection:
            found = connection.execute(f"SELECT {rows.COLUMNS}, vector, vector_checksum FROM completion ORDER BY id")
            damages = [rows.damage_of(row) for row in found]
    except UnreadableError as error:
        return VerifyReport(str(file), 0, (Damage("structure", error.reason),))
    except (OSError, sqlite3.Error) as error:
        raise CacheError(f"cannot verify {file}: {error}") from error
    return VerifyReport.of(str(file), damages)
