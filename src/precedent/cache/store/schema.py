"""The tables of a cache file, the number of their format, and the upgrade from earlier formats."""

from __future__ import annotations

import re
import sqlite3
from contextlib import closing
from functools import cache

APPLICATION_ID = int.from_bytes(b"PRCD", "big")
FORMAT_VERSION = 2
READABLE_FROM = 1
"""The oldest format that `migrate` upgrades."""

_TABLES = """
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
    vector BLOB
);
CREATE UNIQUE INDEX completion_identity ON completion (tenant, tokenizer, identity);
"""

# `gone` records which id was removed at which epoch, and nothing else: an index can drop exactly those ids
_SINCE_2 = """
ALTER TABLE completion ADD COLUMN num_tokens INTEGER GENERATED ALWAYS AS (length(token_ids) / 4) VIRTUAL;
CREATE TABLE usage (tenant TEXT PRIMARY KEY, bytes INTEGER NOT NULL, records INTEGER NOT NULL) WITHOUT ROWID;
INSERT INTO usage SELECT tenant, sum(size), count(*) FROM completion GROUP BY tenant;
CREATE TABLE gone (epoch INTEGER PRIMARY KEY, id INTEGER NOT NULL);
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
    INSERT INTO gone SELECT value, old.id FROM meta WHERE key = 'epoch';
END;
"""

# format 1: an earlier version of the library made this index, and its first version made a shorter one
_ONLY_1 = """
CREATE TABLE usage (tenant TEXT PRIMARY KEY, bytes INTEGER NOT NULL) WITHOUT ROWID;
CREATE INDEX completion_partition ON completion (tenant, tokenizer, id, checksum, count, prompt_fingerprint);
CREATE TRIGGER completion_came AFTER INSERT ON completion BEGIN
    INSERT INTO usage VALUES (new.tenant, new.size) ON CONFLICT (tenant) DO UPDATE SET bytes = bytes + excluded.bytes;
END;
CREATE TRIGGER completion_went AFTER DELETE ON completion BEGIN
    UPDATE usage SET bytes = bytes - old.size WHERE tenant = old.tenant;
    DELETE FROM usage WHERE tenant = old.tenant AND bytes <= 0;
    UPDATE meta SET value = value + 1 WHERE key = 'epoch';
END;
"""

_DROPPED_BY_2 = """
DROP TRIGGER completion_came;
DROP TRIGGER completion_went;
DROP TABLE usage;
DROP INDEX completion_partition;
"""

SCHEMA = _TABLES + _SINCE_2
"""Triggers maintain sums and epoch for every writer; large columns come last, so that scans need not read them."""


FORMATS = (
    (FORMAT_VERSION, SCHEMA),
    (1, _TABLES + _ONLY_1),
    (1, _TABLES + _ONLY_1.replace("id, checksum, count, prompt_fingerprint", "id")),
)
"""The formats that can be read, each with a script that creates its tables."""

Objects = tuple[tuple[str, str, str], ...]
"""Tables, indexes and triggers, sorted: each one's kind, its name, and the statement that creates it."""


def objects_in(connection: sqlite3.Connection) -> Objects:
    """All objects in a file's schema; their statements are read, not run."""
    found = connection.execute("SELECT type, name, tbl_name, sql FROM sqlite_master")
    return tuple(sorted((str(kind), str(name), f"{table}: {_in_one_form(sql)}") for kind, name, table, sql in found))


def format_of(found: Objects) -> int | None:
    """The format with exactly these objects, triggers included; None if there is none."""
    return next((number for number, script in FORMATS if _made_by(script) == found), None)


def first_difference(found: Objects, number: int) -> str:
    """In words, an object that only the schema or only the format has, or one that differs."""
    wanted = next(_made_by(script) for each, script in FORMATS if each == number)
    names = [{(kind, name) for kind, name, _ in objects} for objects in (found, wanted)]
    for kind, name in sorted(names[0] - names[1]):
        return f"{_named(kind, name)} does not belong to a cache"
    for kind, name in sorted(names[1] - names[0]):
        return f"{_named(kind, name)} is missing"
    kind, name, _ = next(one for one in found if one not in wanted or found.count(one) > 1)
    return f"{_named(kind, name)} differs from a cache's"


def _named(kind: str, name: str) -> str:
    """An object's kind and name for a message, shortened, since another program may have chosen them."""
    return f"{' '.join(kind.split())[:20]} {name[:80]!r}"


@cache
def _made_by(script: str) -> Objects:
    with closing(sqlite3.connect(":memory:")) as connection:
        connection.executescript(script)
        return objects_in(connection)


def _in_one_form(sql: object) -> str:
    """A statement without insignificant spaces; earlier versions broke lines elsewhere."""
    return re.sub(r"\s*([(),;])\s*", r"\1", " ".join(str(sql or "").split()))


def is_current(connection: sqlite3.Connection) -> bool:
    """Whether the tables are those of `FORMAT_VERSION`."""
    return int(connection.execute("PRAGMA user_version").fetchone()[0]) == FORMAT_VERSION


def migrate(connection: sqlite3.Connection) -> None:
    """Upgrade the tables to `FORMAT_VERSION` in the open transaction; does nothing if they are current."""
    if is_current(connection):
        return
    for statement in statements(_DROPPED_BY_2 + _SINCE_2):
        connection.execute(statement)
    connection.execute(f"PRAGMA user_version={FORMAT_VERSION}")


def statements(script: str) -> list[str]:
    """The statements of a script one by one: `executescript` would commit the open transaction."""
    found, statement = [], ""
    for line in script.strip().splitlines(keepends=True):
        statement += line
        if sqlite3.complete_statement(statement):
            found.append(statement)
            statement = ""
    return found
