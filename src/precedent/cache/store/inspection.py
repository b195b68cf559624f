"""Inspects a cache file before anything trusts it. A refused file stays as it was, byte for byte.

An inspection is cheap: it copies nothing, and does not read all pages of a cache above `CHECKED_WHOLE`.

- Without a log, the file alone is the cache. It is opened as `immutable`, which takes no lock and creates no files.
- With a log, SQLite combines the two, whether processes are using them or a killed process left them: after an
  interrupted checkpoint, the file is valid only together with its log. The connection is read-only. It works under
  SQLite's own locks, so it sees one moment while others write, and does not fold the log into the file.
- A file of zero bytes, or one, is never opened with SQLite, which would take it for new and delete the log beside it.

Only SQLite ever opens the file: closing another descriptor of it would drop this process's locks on it.
"""

from __future__ import annotations

import contextlib
import sqlite3
from collections.abc import Iterator
from pathlib import Path

from precedent.cache.store.connection import advice, connect, error_name, is_damage
from precedent.cache.store.database import header_of
from precedent.cache.store.files import bytes_in, journal_of, log_of, repaired_of
from precedent.cache.store.pages import FRAME_HEADER, Log, log_in
from precedent.cache.store.rows import GONE_SINCE, check_numbers, check_removals
from precedent.cache.store.schema import (
    APPLICATION_ID,
    FORMAT_VERSION,
    READABLE_FROM,
    first_difference,
    format_of,
    is_current,
    migrate,
    objects_in,
)
from precedent.errors import CacheError, CacheMismatchError

CHECKED_WHOLE = 16 * 2**20
"""A cache up to this size is checked page by page each time it is opened (some 20 ms); `verify` checks any size."""

WRITTEN_AS, READ_AS, ENCODING = 18, 19, slice(56, 60)
"""Places in a file's header: the versions that may write and read it, and the encoding of its texts."""

WAL, UTF_8 = 2, (1).to_bytes(4, "big")

LOOKS = 3
"""How often to inspect a file that other processes keep changing meanwhile."""


class RepairableError(CacheError):
    """A cache that cannot be used as it is, for `reason`; a repair saves what is still readable.

    `surely_a_cache` is False if nothing shows that the file ever was one, `own_log` if its log belongs to another file.
    """

    def __init__(self, text: str, reason: str, *, surely_a_cache: bool = True, own_log: bool = True) -> None:
        super().__init__(text)
        self.reason, self.surely_a_cache, self.own_log = reason, surely_a_cache, own_log


class MisnumberedError(RepairableError, CacheMismatchError):
    """The tables are a cache's, but the numbers in the file's header contradict them."""


@contextlib.contextmanager
def inspecting(path: Path, *, whole: bool = False) -> Iterator[sqlite3.Connection]:
    """A read-only connection that shows the cache at one moment, after all checks.

    `whole` reads every page and the log, whatever their size. Raises RepairableError for what can be repaired,
    CacheMismatchError for another program's file or a newer format, CacheError for what cannot be read now.
    """
    if repaired_of(path).exists():
        raise _damaged(path, "its repair was interrupted; repair it again to finish that")
    if bytes_in(path) <= 1:
        raise _empty(path)
    connection = _checked(path, whole)
    try:
        yield connection
    finally:
        connection.close()


def _checked(path: Path, whole: bool) -> sqlite3.Connection:
    for look in range(1, LOOKS + 1):
        before = _state(path)
        try:
            return _checked_once(path, whole)
        except CacheError:
            if look == LOOKS or _state(path) == before:
                raise
    raise AssertionError("the last look returns or raises")


def _state(path: Path) -> tuple[object, ...]:
    """Changes when another process has changed or replaced the file."""
    found = path.stat()
    return found.st_ino, found.st_size, found.st_mtime_ns, bytes_in(log_of(path)) > 0


def _checked_once(path: Path, whole: bool) -> sqlite3.Connection:
    alone = not bytes_in(log_of(path)) and not bytes_in(journal_of(path))
    connection = connect(path, "immutable=1" if alone else "mode=ro")
    try:
        _check_marks(connection, path)
        if whole:
            _check_bytes(path)  # first, because a log with readers can only grow
        connection.execute("BEGIN")  # check everything else at one moment
        _check_tables(connection, path)
        _check_pages(connection, path, alone=alone, whole=whole)
        _check_removals(connection, path)
        _try_upgrade(connection)
        return connection
    except (sqlite3.Error, UnicodeDecodeError) as error:  # a damaged name in SQLite's message is not UTF-8
        connection.close()
        raise _refusal(path, error) from error
    except BaseException:
        connection.close()
        raise


def _check_marks(connection: sqlite3.Connection, path: Path) -> None:
    """Check the file's program and format, even if its end is missing, which SQLite refuses without writable_schema."""
    connection.execute("PRAGMA writable_schema=ON")
    mark, version = (connection.execute(f"PRAGMA {name}").fetchone()[0] for name in ("application_id", "user_version"))
    connection.execute("PRAGMA writable_schema=OFF")
    _check_numbers(connection, path, mark, version)


def _check_numbers(connection: sqlite3.Connection, path: Path, mark: int, version: int) -> None:
    if mark == APPLICATION_ID and READABLE_FROM <= version <= FORMAT_VERSION:
        return
    try:
        tables = format_of(objects_in(connection))
    except (sqlite3.Error, UnicodeDecodeError):
        tables = None
    if mark != APPLICATION_ID:
        text = f"{path} is not a cache but some other file; left untouched, give another path"
        reason = f"it has a cache's tables, and another program's mark {mark}"
    else:
        readable = f"this version of precedent reads {READABLE_FROM} to {FORMAT_VERSION}"
        text = f"{path} has cache format {version}, {readable}; left untouched, upgrade precedent or give another path"
        reason = f"its header says format {version}, and its tables have format {tables}"
    if tables is None and mark != APPLICATION_ID and _is_marked_without_its_log(path):
        raise _damaged(path, "its log is another program's", own_log=False)
    if tables is None:
        raise CacheMismatchError(text)
    raise MisnumberedError(f"{text}; or, since {reason}, {_how_to_repair(path)}", reason)


def _is_marked_without_its_log(path: Path) -> bool:
    try:
        with contextlib.closing(connect(path, "immutable=1")) as connection:
            connection.execute("PRAGMA writable_schema=ON")
            return bool(connection.execute("PRAGMA application_id").fetchone()[0] == APPLICATION_ID)
    except sqlite3.Error:
        return False


def _check_tables(connection: sqlite3.Connection, path: Path) -> None:
    """Check that the schema is the one that `version` creates: additions could run when a record is stored."""
    version = connection.execute("PRAGMA user_version").fetchone()[0]
    found = objects_in(connection)
    tables = format_of(found)
    if tables is not None and tables != version:
        reason = f"its header says format {version}, and its tables have format {tables}"
        raise MisnumberedError(f"{path} cannot be opened: {reason}; left untouched, {_how_to_repair(path)}", reason)
    if tables is None:
        raise _damaged(path, f"{first_difference(found, version)} in format {version}")
    try:
        check_numbers(connection)
    except CacheError as error:
        raise _damaged(path, str(error)) from error


def _check_removals(connection: sqlite3.Connection, path: Path) -> None:
    if connection.execute("PRAGMA user_version").fetchone()[0] < GONE_SINCE:
        return
    try:
        check_removals(connection)
    except CacheError as error:
        raise _damaged(path, str(error)) from error


def _try_upgrade(connection: sqlite3.Connection) -> None:
    """Upgrade a temporary copy of an earlier format: a file for which that fails is left as it was."""
    if not is_current(connection):
        with contextlib.closing(sqlite3.connect("")) as copy:
            connection.backup(copy)
            migrate(copy)


def _check_pages(connection: sqlite3.Connection, path: Path, *, alone: bool, whole: bool) -> None:
    pages, size = (connection.execute(f"PRAGMA {name}").fetchone()[0] for name in ("page_count", "page_size"))
    missing = pages - path.stat().st_size // size
    if alone and path.stat().st_size < pages * size:  # SQLite would read zeros there
        raise _damaged(path, "its last page is truncated")
    if not alone and missing * (FRAME_HEADER.size + size) > bytes_in(log_of(path)):
        raise _damaged(path, f"{missing} pages are missing at its end, more than its log can hold")
    if whole or pages * size <= CHECKED_WHOLE:
        check = "integrity_check(1)" if whole else "quick_check(1)"
        verdict = str(connection.execute(f"PRAGMA {check}").fetchone()[0])
        if verdict != "ok":
            raise _damaged(path, " ".join(verdict.split()))


def _check_bytes(path: Path) -> None:
    """Check what SQLite does not report: records after damage in the log, and a header that SQLite refuses to write.

    SQLite has no locks on the log, so the log may be opened here.
    """
    log = _log_beside(path)
    if log.torn:
        raise _damaged(path, "its log is damaged, and there are records after the damage")
    header = log.file_header or header_of(path)
    if header is not None and not (header[WRITTEN_AS] <= WAL and header[READ_AS] <= WAL and header[ENCODING] == UTF_8):
        raise _damaged(path, "its header is not a cache's")


def _log_beside(path: Path) -> Log:
    try:
        with log_of(path).open("rb") as file:
            return log_in(file)
    except FileNotFoundError:
        return Log()


def _refusal(path: Path, error: Exception) -> CacheError:
    reason = " ".join(str(error).split())
    if error_name(error) == "SQLITE_NOTADB":
        return _no_cache(path, reason)
    if error_name(error) == "SQLITE_READONLY_ROLLBACK":
        return _damaged(path, f"what another program left in {journal_of(path).name} would be rolled back into it")
    if isinstance(error, sqlite3.Error) and not is_damage(error):
        return CacheError(f"{path} cannot be inspected now: {reason}; {advice(error)}")
    return _damaged(path, reason)


def _damaged(path: Path, reason: str, *, own_log: bool = True) -> RepairableError:
    text = f"{path} is damaged ({reason}); left untouched, restore a copy, move it away, or {_how_to_repair(path)}"
    return RepairableError(text, reason, own_log=own_log)


def _no_cache(path: Path, reason: str) -> RepairableError:
    text = f"{path} is not a cache ({reason}); left untouched, give another path; if it was one, {_how_to_repair(path)}"
    return RepairableError(text, reason, surely_a_cache=False)


def _empty(path: Path) -> RepairableError:
    if bytes_in(log_of(path)):
        return _damaged(path, "it is empty and its log is not")
    return _no_cache(path, "it is empty")


def _how_to_repair(path: Path) -> str:
    return f"save what can be read of it with `precedent cache verify {path} --repair`"
