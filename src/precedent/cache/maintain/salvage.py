"""A file whose structure is damaged: what is wrong with it, and a new file from the records that can still be read."""

from __future__ import annotations

import contextlib
import json
import os
import sqlite3
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path
from typing import Any

from precedent.cache.store import rows
from precedent.cache.store.connection import connect
from precedent.cache.store.files import PAGE_BYTES, create_file, has_log
from precedent.cache.store.schema import FORMAT_VERSION
from precedent.errors import CacheError

IDS_AT_ONCE = 500
_STORED = (
    "id, tenant, tokenizer, identity, created, count, hits, accepted, rejected, size, model, prompt_fingerprint, "
    "tools, workflow_step, checksum, vector_checksum, token_ids, query, text, vector"
)


def structure_problem(file: Path) -> str | None:
    """The first thing SQLite finds wrong with the whole file, None when it is sound; reads all of it."""
    try:
        logged = has_log(file)
        if not logged and file.stat().st_size % PAGE_BYTES:
            return "its last page is cut short"
        with closing(connect(file, "mode=ro" if logged else "immutable=1")) as connection:
            verdict = str(connection.execute("PRAGMA integrity_check(1)").fetchone()[0])
        return None if verdict == "ok" else verdict.splitlines()[-1]
    except sqlite3.DatabaseError as error:
        return str(error)


def salvage(file: Path) -> str:
    """Put a new file with all readable records in the place of a damaged one; returns a line about it.

    The damaged file stays beside it with the ending `.damaged`. Raises CacheError when another process uses the file,
    or nothing can be read of it.
    """
    if _reindexed(file):
        return "its indexes did not agree with its table; they were made anew"
    fresh = file.with_name(f".{file.name}.salvaged")
    for old in (fresh, _log_of(fresh)):
        old.unlink(missing_ok=True)
    create_file(fresh)
    try:
        with closing(_alone(file)) as source, closing(connect(fresh)) as target:
            saved = _copy(source, target)
        _swap(file, fresh)
    except sqlite3.Error as error:
        raise CacheError(
            f"{file} is damaged ({error}) and cannot be repaired; restore a copy or move it away"
        ) from error
    finally:
        fresh.unlink(missing_ok=True)
    return f"{saved} records were saved; the damaged file is kept as {_kept(file).name}, delete it when you like"


def _reindexed(file: Path) -> bool:
    """Whether making the indexes anew was all that it took."""
    try:
        with closing(connect(file)) as connection:
            if connection.execute("PRAGMA user_version").fetchone()[0] != FORMAT_VERSION:
                return False
            connection.execute("REINDEX")
            return bool(connection.execute("PRAGMA integrity_check(1)").fetchone()[0] == "ok")
    except sqlite3.DatabaseError:
        return False


def _alone(file: Path) -> sqlite3.Connection:
    """A connection that keeps all others out."""
    connection = connect(file)
    try:
        connection.execute("PRAGMA locking_mode=EXCLUSIVE")
        connection.execute("BEGIN EXCLUSIVE")
        connection.execute("COMMIT")
    except sqlite3.OperationalError as error:
        connection.close()
        raise CacheError(
            f"{file} is in use by another process ({error}); close that process and repair again"
        ) from error
    return connection


def _copy(source: sqlite3.Connection, target: sqlite3.Connection) -> int:
    marks = ", ".join("?" * len(_STORED.split(", ")))
    target.execute("BEGIN")
    saved = 0
    for row in _readable(source):
        with contextlib.suppress(sqlite3.IntegrityError):  # the same record twice: one of them is a ruin
            saved += target.execute(f"INSERT INTO completion ({_STORED}) VALUES ({marks})", row).rowcount
    _copy_meta(source, target)
    target.execute("COMMIT")
    target.execute("PRAGMA wal_checkpoint(TRUNCATE)")
    return saved


def _copy_meta(source: sqlite3.Connection, target: sqlite3.Connection) -> None:
    """The embedder, without which vectors are worthless, and an id that no lost record can have had."""
    embedder = _first(source, "SELECT value FROM meta WHERE key = 'embedder'")
    if _is_embedder(embedder):
        target.execute("INSERT INTO meta VALUES ('embedder', ?)", (embedder,))
    else:
        target.execute(f"{rows.DROP_VECTOR} WHERE vector_checksum IS NOT NULL")
        rows.count_again(target)
    epoch = _first(source, "SELECT value FROM meta WHERE key = 'epoch'")
    target.execute("UPDATE meta SET value = ? WHERE key = 'epoch'", (1 + epoch if isinstance(epoch, int) else 1,))
    target.execute("UPDATE sqlite_sequence SET seq = max(seq, ?)", (_highest_id(source),))


def _is_embedder(value: Any) -> bool:
    try:
        return set(json.loads(value)) == {"name", "fingerprint", "dimension"}
    except (TypeError, ValueError):
        return False


def _readable(source: sqlite3.Connection) -> Iterator[tuple[Any, ...]]:
    """All rows that are as they were written, as far as they can be read at all."""
    highest = _highest_id(source)
    for begin in range(0, highest, IDS_AT_ONCE):
        ids = range(begin + 1, min(highest, begin + IDS_AT_ONCE) + 1)
        try:
            found = _rows(source, ids)
        except sqlite3.DatabaseError:
            found = [row for one in ids for row in _rows_or_none(source, one)]
        yield from (row for row in found if _whole(row))


def _rows(source: sqlite3.Connection, ids: range) -> list[tuple[Any, ...]]:
    query = f"SELECT {_STORED} FROM completion NOT INDEXED WHERE id BETWEEN ? AND ? ORDER BY id"
    return source.execute(query, (ids.start, ids.stop - 1)).fetchall()


def _rows_or_none(source: sqlite3.Connection, row_id: int) -> list[tuple[Any, ...]]:
    try:
        return _rows(source, range(row_id, row_id + 1))
    except sqlite3.DatabaseError:
        return []


def _whole(row: tuple[Any, ...]) -> bool:
    values = dict(zip(_STORED.split(", "), row, strict=True))
    return rows.completion_of(tuple(values[name] for name in rows.COLUMNS.split(", "))) is not None


def _highest_id(source: sqlite3.Connection) -> int:
    queries = (
        "SELECT seq FROM sqlite_sequence WHERE name = 'completion'",
        "SELECT id FROM completion NOT INDEXED ORDER BY id DESC LIMIT 1",
        "SELECT max(id) FROM gone",
    )
    return max(value if isinstance(value, int) else 0 for value in (_first(source, query) for query in queries))


def _first(source: sqlite3.Connection, query: str) -> Any:
    try:
        found = source.execute(query).fetchone()
    except sqlite3.DatabaseError:
        return None
    return None if found is None else found[0]


def _swap(file: Path, fresh: Path) -> None:
    """The old log goes first: SQLite would replay it into the new file."""
    if _log_of(file).exists():
        _log_of(file).replace(_log_of(_kept(file)))
    _kept(file).unlink(missing_ok=True)
    try:
        os.link(file, _kept(file))
    except OSError:  # a file system without hard links
        file.rename(_kept(file))
    fresh.chmod(_kept(file).stat().st_mode & 0o777)
    fresh.replace(file)


def _kept(file: Path) -> Path:
    return file.with_name(file.name + ".damaged")


def _log_of(file: Path) -> Path:
    return file.with_name(file.name + "-wal")
