"""Replaces a damaged file by a new one with every record that can still be read from the file and its log.

The damaged file is only read, page by page and without SQLite, so neither its tables nor its trees are trusted: a
record is whatever has a record's shape and checksum. Records listed as removed are not brought back.

The new file is complete and on disk, beside the damaged one, before anything else changes. From then on no process
opens the cache until the new file has replaced the damaged one; if this repair is killed, a later one finishes it.
"""

from __future__ import annotations

import contextlib
import itertools
import os
import shutil
import sqlite3
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, BinaryIO

from precedent.cache.maintain.cells import Row, rows_on
from precedent.cache.store import connection as connections
from precedent.cache.store import rows
from precedent.cache.store.database import repairing
from precedent.cache.store.files import (
    bytes_in,
    half_made,
    journal_of,
    log_of,
    repaired_of,
    wait_for_folder,
    write_database,
)
from precedent.cache.store.inspection import RepairableError
from precedent.cache.store.locks import HAS_LOCKS, lock_as_sqlite_does
from precedent.cache.store.pages import Pages
from precedent.cache.store.records import Payload
from precedent.errors import CacheError

PAUSE_SECONDS = 0.05

_STORED = (
    *("id", "tenant", "tokenizer", "identity", "created", "count", "hits", "accepted", "rejected", "size", "model"),
    *("prompt_fingerprint", "tools", "workflow_step", "checksum", "vector_checksum", "token_ids", "query", "text"),
    "vector",
)
"""The stored columns of a completion, in the order of all formats."""

_INSERT = f"INSERT OR IGNORE INTO completion ({', '.join(_STORED)}) VALUES ({', '.join('?' * len(_STORED))})"


def salvage(file: Path, refusal: RepairableError) -> str:
    """Replace a damaged file by a new one with all readable records; returns a line about it.

    The damaged file and its log stay beside it with the ending `.damaged`. Raises CacheError if the file is in use or
    the new one does not fit on the disk, and `refusal` itself if nothing shows that the file ever was a cache.
    """
    try:
        with _alone(file) as opened:
            if not repaired_of(file).exists():
                _write_repaired(file, opened, refusal)
            kept = _swap(file, opened)
    except (OSError, sqlite3.Error) as error:
        advice = connections.advice(error) if isinstance(error, sqlite3.Error) else "nothing was changed"
        raise CacheError(f"{file} cannot be repaired now: {error}; {advice}") from error
    return f"{_count(file)} records were saved; the damaged file is kept as {kept.name}, delete it when you like"


@contextlib.contextmanager
def _alone(file: Path) -> Iterator[BinaryIO]:
    """The file, opened, and locked against all use through SQLite.

    Closing it drops all locks that this process has on it, so this process must not use it either.
    """
    with repairing(file), file.open("rb+") as opened:
        give_up = time.monotonic() + connections.BUSY_SECONDS
        while not lock_as_sqlite_does(opened):
            if time.monotonic() > give_up:
                raise CacheError(f"{file} is in use by another process; close that process and repair it again")
            time.sleep(PAUSE_SECONDS)
        yield opened


def _write_repaired(file: Path, opened: BinaryIO, refusal: RepairableError) -> None:
    found = _Found()
    with half_made(file.parent) as new:
        with contextlib.ExitStack() as stack:
            has_log = refusal.own_log and log_of(file).exists()
            log = stack.enter_context(log_of(file).open("rb")) if has_log else None
            pages = Pages(opened, log)
            write_database(new, lambda target: _fill(target, pages, found))
        something = bytes_in(file) + bytes_in(log_of(file)) > 0
        if not found.saved and something and not (refusal.surely_a_cache and bytes_in(file)):
            raise refusal
        shutil.copymode(file, new)
        with contextlib.suppress(PermissionError, AttributeError):  # only the superuser can change a file's owner
            os.chown(new, file.stat().st_uid, file.stat().st_gid)
        new.replace(repaired_of(file))
    wait_for_folder(file.parent)


@dataclass
class _Found:
    """What a damaged file holds beside completions."""

    saved: int = 0
    gone: set[int] = field(default_factory=set)
    embedder: str | None = None
    epoch: int = 0
    highest_id: int = 0

    def note(self, row: Row) -> None:
        """Record the content of a row with two columns, whichever table it is from."""
        first, second = row.values
        if first is None and type(second) is int and 0 < second < rows.MOST_RECORDS:
            self.gone.add(second)
            self.epoch = max(self.epoch, row.rowid if row.rowid < rows.MOST_RECORDS else 0)
        elif first == "embedder" and rows.embedder_in(second) is not None:
            self.embedder = second
        elif first == "epoch" and type(second) is int and second < rows.MOST_RECORDS:
            self.epoch = max(self.epoch, second)
        elif first == "completion" and type(second) is int and second < rows.MOST_RECORDS:
            self.highest_id = max(self.highest_id, second)


def _fill(target: sqlite3.Connection, pages: Pages, found: _Found) -> None:
    target.execute("PRAGMA secure_delete=ON")
    target.execute("BEGIN")
    for row in _rows(pages):
        if len(row.values) == 2:
            found.note(row)
        elif len(row.values) == len(_STORED):
            values = _stored(row)
            if values is not None:
                target.execute(_INSERT, values)
    target.executemany("DELETE FROM completion WHERE id = ?", [(row_id,) for row_id in found.gone])
    _fill_meta(target, found)
    rows.count_again(target)
    found.saved = target.execute("SELECT count(*) FROM completion").fetchone()[0]
    target.execute("COMMIT")


def _rows(pages: Pages) -> Iterator[Row]:
    """All readable rows: first those that SQLite would read, then those after damage in the log."""
    for number in range(1, pages.count + 1):
        yield from rows_on(number, pages)
    for number in pages.behind_damage():
        yield from rows_on(number, pages)


def _stored(row: Row) -> tuple[Any, ...] | None:
    """The columns of a completion as they were written; None for a damaged one. A damaged vector is left out."""
    if row.values[0] is not None or not 0 < row.rowid < rows.MOST_RECORDS:  # the id is the row's own number
        return None
    values = dict(zip(_STORED, (row.rowid, *row.values[1:]), strict=True))
    completion = rows.completion_of(tuple(values[name] for name in rows.COLUMNS.split(", ")))
    if completion is None:
        return None
    payload = Payload(completion, rows.vector_of(values["vector"], values["vector_checksum"]))
    values |= {"identity": payload.identity, "size": payload.size}
    values |= {"vector": payload.vector_blob, "vector_checksum": payload.vector_checksum}
    return tuple(values.values())


def _fill_meta(target: sqlite3.Connection, found: _Found) -> None:
    """Restore the embedder, without which vectors are useless, and numbers above any that lost records can have had."""
    recorded = None if found.embedder is None else rows.embedder_in(found.embedder)
    wrong = "vector IS NOT NULL" if recorded is None else f"length(vector) != {4 * recorded.dimension}"
    target.execute(f"{rows.DROP_VECTOR} WHERE {wrong}")
    if recorded is not None:
        target.execute("INSERT INTO meta VALUES ('embedder', ?)", (found.embedder,))
    target.execute("DELETE FROM gone")
    target.execute("UPDATE meta SET value = ? WHERE key = 'epoch'", (found.epoch + 1,))
    in_table = target.execute("SELECT coalesce(max(id), 0) FROM completion").fetchone()[0]
    target.execute("DELETE FROM sqlite_sequence")
    highest = max([found.highest_id, in_table, *found.gone])
    target.execute("INSERT INTO sqlite_sequence VALUES ('completion', ?)", (highest,))


def _swap(file: Path, opened: BinaryIO) -> Path:
    """Put the new file in the damaged one's place; returns the path under which the damaged file is kept.

    The log is moved before the new file comes, because SQLite would replay it into that.
    """
    kept = _kept(file)
    _keep(file, kept, opened)
    for beside in (log_of, journal_of):
        if beside(file).exists():
            beside(file).replace(beside(kept))
    wait_for_folder(file.parent)
    if not HAS_LOCKS:  # Windows cannot replace an open file
        opened.close()
    repaired_of(file).replace(file)
    wait_for_folder(file.parent)
    return kept


def _kept(file: Path) -> Path:
    """A free name: the file that an earlier repair kept may hold the only copy of something."""
    for number in itertools.count(1):
        kept = file.with_name(f"{file.name}.damaged" + (f"-{number}" if number > 1 else ""))
        if not kept.exists() or kept.samefile(file):  # the same file: an interrupted repair linked it already
            return kept
    raise AssertionError("there is always one more number")


def _keep(file: Path, kept: Path, opened: BinaryIO) -> None:
    if kept.exists():
        return
    try:
        os.link(file, kept)
    except OSError:  # a file system without hard links
        opened.seek(0)
        with kept.open("xb") as copy:
            shutil.copyfileobj(opened, copy)
            os.fsync(copy.fileno())
        shutil.copymode(file, kept)


def _count(file: Path) -> int:
    with contextlib.closing(connections.connect(file, "immutable=1")) as connection:
        return int(connection.execute("SELECT count(*) FROM completion").fetchone()[0])
