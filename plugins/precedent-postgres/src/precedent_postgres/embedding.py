"""Ensures one embedder per server: the first vector's embedder is recorded beside the records."""

from __future__ import annotations

import json
from collections.abc import Iterable
from dataclasses import asdict
from typing import Any

import psycopg

from precedent.cache.backend import EmbedderIdentity, Payload, embedder_in, maker_of, require_same
from precedent.errors import CacheError
from precedent_postgres.schema import SCHEMA

Connection = psycopg.Connection[Any]


def recorded_embedder(connection: Connection, lock: str = "") -> EmbedderIdentity | None:
    """The embedder that made the vectors; None while there are none."""
    found = connection.execute(f"SELECT value FROM {SCHEMA}.meta WHERE key = 'embedder' {lock}").fetchone()
    if found is None:
        return None
    recorded = embedder_in(found[0])
    if recorded is None:
        raise CacheError("the server's record of the embedder is damaged; restore a backup")
    return recorded


def claim(connection: Connection, payloads: Iterable[Payload], embedder: EmbedderIdentity | None, where: str) -> None:
    """Record the first vector's embedder as the cache's and refuse every other, until the transaction ends."""
    makers = [maker_of(payload.vector, embedder) for payload in payloads if payload.vector is not None]
    if not makers:
        return
    maker = makers[0]
    insert = f"INSERT INTO {SCHEMA}.meta VALUES ('embedder', %s) ON CONFLICT (key) DO NOTHING"
    recorded = recorded_embedder(connection, "FOR SHARE")
    while recorded is None:  # again, if another engine was first or the last vector has just been removed
        connection.execute(insert, (json.dumps(asdict(maker)),))
        recorded = recorded_embedder(connection, "FOR SHARE")
    require_same(recorded, maker, where)
