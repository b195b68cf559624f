"""The tables of a cache file, the number of their format, and how a file of an earlier format becomes one of today."""

from __future__ import annotations

import re
import sqlite3
from contextlib import closing
from functools import cache

APPLICATION_ID = int.from_bytes(b"PRCD", "big")
FORMAT_VERSION = 2
READABLE_FROM = 1
"""The oldest format that `migrate` brings up to date."""

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

# `gone` says which ids went at which epoch, and nothing else about them: whoever keeps an index drops exactly those
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

# an earlier version of the library made this index, its first one a shorter one
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
"""Triggers keep sums and epoch right whoever writes; the large columns stand last, so that scans need not read them."""


FORMATS = (
    (FORMAT_VERSION, SCHEMA),
    (1, _TABLES + _ONLY_1),
    (1, _TABLES + _ONLY_1.replace("id, checksum, count, prompt_fingerprint", "id")),
)
"""The numbers of formats that can be read, each with a script that makes its tables."""

Objects = tuple[tuple[str, str, str], ...]
"""Tables, indexes and triggers: of each its kind, its name, and the statement that makes it; sorted."""


def objects_in(connection: sqlite3.Connection) -> Objects:
    """Everything that the schema of a file holds; its statements are read, none is run."""
    found = connection.execute("SELECT type, name, tbl_name, sql FROM sqlite_master")
    return tuple(sorted((str(kind), str(name), f"{table}: {_in_one_form(sql)}") for kind, name, table, sql in found))


def format_of(found: Objects) -> int | None:
    """The format whose tables these are, to the last trigger; None where they are those of none."""
    return next((number for number, script in FORMATS if _made_by(script) == found), None)


def first_difference(found: Objects, number: int) -> str:
    """What a schema holds that this format's does not, or the other way round, in words."""
    wanted = next(_made_by(script) for each, script in FORMATS if each == number)
    names = [{(kind, name) for kind, name, _ in objects} for objects in (found, wanted)]
    for kind, name in sorted(names[0] - names[1]):
        return f"{_named(kind, name)} is none of a cache's"
    for kind, name in sorted(names[1] - names[0]):
        return f"{_named(kind, name)} is missing"
    kind, name, _ = next(one for one in found if one not in wanted or found.count(one) > 1)
    return f"{_named(kind, name)} is not a cache's own"


def _named(kind: str, name: str) -> str:
    """Kind and name of an object in a line for people; somebody else may have chosen them."""
    return f"{' '.join(kind.split())[:20]} {name[:80]!r}"


@cache
def _made_by(script: str) -> Objects:
    with closing(sqlite3.connect(":memory:")) as connection:
        connection.executescript(script)
        return objects_in(connection)


def _in_one_form(sql: object) -> str:
    """A statement without what does not matter in it; earlier versions broke their lines elsewhere."""
    return re.sub(r"\s*([(),;])\s*", r"\1", " ".join(str(sql or "").split()))


def migrate(connection: sqlite3.Connection) -> None:
    """Bring the tables to `FORMAT_VERSION` in the transaction that is open; nothing to do where they are."""
    if int(connection.execute("PRAGMA user_version").fetchone()[0]) == FORMAT_VERSION:
        return
    for statement in statements(_DROPPED_BY_2 + _SINCE_2):
        connection.execute(statement)
    connection.execute(f"PRAGMA user_version={FORMAT_VERSION}")


def statements(script: str) -> list[str]:
    """The statements of a script one by one: `executescript` would commit the transaction that is open."""
    found, statement = [], ""
    for line in script.strip().splitlines(keepends=True):
        statement += line
        if sqlite3.complete_statement(statement):
            found.append(statement)
            statement = ""
    return found
