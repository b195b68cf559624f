"""The tables on the server: created once, under a lock, and used only in the format that is recorded there.

Texts and keys are stored as bytes, since PostgreSQL's text cannot hold a NUL character, which a model may write.
`tenant.changes` increases with every insertion, `meta.epoch` by one for every removed record.

Row security is a second safeguard: a statement sees only the rows of the tenant that its transaction named, and none
without a tenant, unless it asked for every tenant's (`precedent_postgres.connections`).
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Any

import psycopg

from precedent.errors import CacheMismatchError

FORMAT_VERSION = 1
SCHEMA = "precedent"
CREATION_LOCK = int.from_bytes(b"precednt", "big")
"""Key of the advisory lock under which the schema is created."""

CREATE = f"""
CREATE SCHEMA IF NOT EXISTS {SCHEMA};
CREATE TABLE {SCHEMA}.meta (key text PRIMARY KEY, value text NOT NULL);
INSERT INTO {SCHEMA}.meta VALUES ('format', '{FORMAT_VERSION}'), ('epoch', '0');
CREATE TABLE {SCHEMA}.tenant (
    tenant text PRIMARY KEY, records bigint NOT NULL, bytes bigint NOT NULL, changes bigint NOT NULL
);
CREATE TABLE {SCHEMA}.completion (
    id bigint GENERATED ALWAYS AS IDENTITY PRIMARY KEY,
    tenant text NOT NULL,
    tokenizer bytea NOT NULL,
    identity bytea NOT NULL,
    created double precision NOT NULL,
    count bigint NOT NULL DEFAULT 1,
    hits bigint NOT NULL DEFAULT 0,
    accepted bigint NOT NULL DEFAULT 0,
    rejected bigint NOT NULL DEFAULT 0,
    size bigint NOT NULL,
    model bytea NOT NULL,
    prompt_fingerprint bytea NOT NULL,
    tools bytea NOT NULL,
    workflow_step bytea NOT NULL,
    checksum bytea NOT NULL,
    vector_checksum bytea,
    token_ids bytea NOT NULL,
    query bytea NOT NULL,
    text bytea NOT NULL,
    vector bytea,
    UNIQUE (tenant, tokenizer, identity)
);
CREATE INDEX completion_partition ON {SCHEMA}.completion (tenant, tokenizer, id);
CREATE INDEX completion_created ON {SCHEMA}.completion (created);
ALTER TABLE {SCHEMA}.completion ENABLE ROW LEVEL SECURITY;
ALTER TABLE {SCHEMA}.completion FORCE ROW LEVEL SECURITY;
CREATE POLICY one_tenant ON {SCHEMA}.completion USING (
    tenant = current_setting('precedent.tenant', true) OR current_setting('precedent.scope', true) = 'every tenant'
);
"""


_COLUMN = re.compile(r"\w+ (?:bigint|bytea|double precision|text)\b")
TABLES = {
    name: tuple(_COLUMN.findall(columns))
    for name, columns in re.findall(rf"CREATE TABLE {SCHEMA}\.(\w+) \((.*?)\n?\);", CREATE, re.DOTALL)
}
"""The tables that `CREATE` makes: columns with their types, in order."""

_COLUMNS = """
SELECT relation.relname, relation.relkind = 'r',
       array_agg(attname || ' ' || format_type(atttypid, atttypmod) ORDER BY attnum)
FROM pg_class AS relation JOIN pg_attribute ON attrelid = relation.oid AND attnum > 0 AND NOT attisdropped
WHERE relation.relnamespace = to_regnamespace(%s) AND relation.relname = ANY(%s) GROUP BY 1, 2
"""

_PLANTED = """
SELECT 'trigger ' || tgname FROM pg_trigger WHERE tgrelid = ANY(%(tables)s::regclass[]) AND NOT tgisinternal
UNION ALL SELECT 'rule ' || rulename FROM pg_rewrite WHERE ev_class = ANY(%(tables)s::regclass[])
UNION ALL SELECT 'policy ' || polname FROM pg_policy
    WHERE polrelid = ANY(%(tables)s::regclass[]) AND (polname, polcmd::text) != ('one_tenant', '*')
UNION ALL SELECT 'missing row security' FROM pg_class
    WHERE oid = %(completion)s::regclass AND NOT (relrowsecurity AND relforcerowsecurity)
UNION ALL SELECT 'missing policy' WHERE NOT EXISTS (SELECT FROM pg_policy WHERE polrelid = %(completion)s::regclass)
"""


def prepare(connection: psycopg.Connection[Any], *, create: bool) -> bool:
    """Create the tables if they are missing and `create` is set; returns whether they exist now.

    Raises CacheMismatchError for tables of another format or another program, and for additions to them that could act
    on records.
    """
    with connection.transaction():
        connection.execute("SELECT pg_advisory_xact_lock(%s)", (CREATION_LOCK,))
        found = connection.execute(_COLUMNS, (SCHEMA, list(TABLES))).fetchall()
        tables = {name: tuple(columns) if is_table else () for name, is_table, columns in found}
        if tables:
            _check_format(connection, tables)
        elif create:
            connection.execute(CREATE)
        return create or bool(tables)


def _check_format(connection: psycopg.Connection[Any], tables: Mapping[str, Sequence[str]]) -> None:
    if tables.get("meta") != TABLES["meta"]:
        raise _not_ours("its table meta is not a cache's" if "meta" in tables else "the table meta is missing")
    numbers = dict(connection.execute(f"SELECT key, value FROM {SCHEMA}.meta").fetchall())
    if numbers.get("format") != str(FORMAT_VERSION):
        raise CacheMismatchError(
            f"the cache on the server has format {numbers.get('format')}, and this version of precedent-postgres reads "
            f"{FORMAT_VERSION}; left untouched, upgrade precedent-postgres or give another database"
        )
    for name, columns in TABLES.items():
        if tables.get(name) != columns:
            raise _not_ours(f"it has format {FORMAT_VERSION}, and the table {name} is not one of that format")
    if not numbers.get("epoch", "").isdecimal():
        raise _not_ours("the table meta has no epoch, which counts removed records")
    names = {"tables": [f"{SCHEMA}.{name}" for name in TABLES], "completion": f"{SCHEMA}.completion"}
    planted = connection.execute(_PLANTED, names).fetchone()
    if planted is not None:
        raise _not_ours(f"its triggers, rules or policies were changed: {planted[0]}")


def _not_ours(reason: str) -> CacheMismatchError:
    return CacheMismatchError(
        f"the schema {SCHEMA} on the server cannot be used as a cache: {reason}; left untouched, restore a backup or "
        "give another database"
    )
