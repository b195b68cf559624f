"""The tables of a cache file, and the number of their format."""

from __future__ import annotations

import sqlite3
from contextlib import closing
from functools import cache

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

"""Triggers maintain sums and epoch for every writer; large columns come last, so that scans need not read them.

`gone` records which id was removed at which epoch, and nothing else: an index can drop exactly those ids.
"""

Objects = tuple[tuple[str, str, str], ...]
"""Tables, indexes and triggers, sorted: each one's kind, its name, and the statement that creates it."""


def objects_in(connection: sqlite3.Connection) -> Objects:
    """All objects in a file's schema; their statements are read, not run."""
    found = connection.execute("SELECT type, name, tbl_name, sql FROM sqlite_master")
    return tuple(sorted((str(kind), str(name), f"{table}: {sql}") for kind, name, table, sql in found))


def first_difference(connection: sqlite3.Connection) -> str | None:
    """In words, an object that only the file or only a cache has, or one that differs; None for a cache's schema."""
    found, wanted = objects_in(connection), _of_a_cache()
    if found == wanted:
        return None
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
def _of_a_cache() -> Objects:
    with closing(sqlite3.connect(":memory:")) as connection:
        connection.executescript(SCHEMA)
        return objects_in(connection)
