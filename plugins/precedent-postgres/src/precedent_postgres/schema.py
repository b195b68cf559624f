"""The tables on the server: created once, under a lock, and only ever used in the format that is written down there.

Texts and keys are stored as bytes, since PostgreSQL's text cannot hold a NUL character, which a model may write.
`tenant.changes` grows with every insertion, `meta.epoch` by one for every record that goes; `gone` says which went.

Row security is a second lock on the door: a statement sees the rows of the tenant that its transaction named, and none
without, unless it asked for every tenant's (`precedent_postgres.connections`).
"""

from __future__ import annotations

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
CREATE TABLE {SCHEMA}.gone (epoch bigint PRIMARY KEY, id bigint NOT NULL);
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


def prepare(connection: psycopg.Connection[Any], *, create: bool) -> bool:
    """Create the tables unless they are there, or only look; False where there are none and none were wanted.

    Raises CacheMismatchError for tables of another format.
    """
    with connection.transaction():
        connection.execute("SELECT pg_advisory_xact_lock(%s)", (CREATION_LOCK,))
        there = connection.execute("SELECT to_regclass(%s)", (f"{SCHEMA}.meta",)).fetchone()
        if there is not None and there[0] is not None:
            _check_format(connection)
            return True
        if create:
            connection.execute(CREATE)
        return create


def _check_format(connection: psycopg.Connection[Any]) -> None:
    found = connection.execute(f"SELECT value FROM {SCHEMA}.meta WHERE key = 'format'").fetchone()
    version = None if found is None else found[0]
    if version != str(FORMAT_VERSION):
        raise CacheMismatchError(
            f"the cache on the server has format {version}, this version of precedent-postgres reads {FORMAT_VERSION}; "
            "left untouched, upgrade precedent-postgres or give another database"
        )
