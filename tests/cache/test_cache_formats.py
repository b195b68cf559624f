"""Files of an earlier format are upgraded when they are opened, completely or not at all."""

from __future__ import annotations

import sqlite3
from pathlib import Path

import pytest
from helpers.cache_files import COUNT, changed, filled, refused

from precedent.cache import Selection, SQLiteStore, verify_cache
from precedent.cache.store.schema import FORMAT_VERSION
from precedent.errors import CacheError, CacheMismatchError
from precedent.testing.store_contract import EMBEDDER, completion, unit_vector

FORMAT_1 = """
CREATE TABLE meta (key TEXT PRIMARY KEY, value) WITHOUT ROWID;
INSERT INTO meta VALUES ('epoch', 0);
CREATE TABLE usage (tenant TEXT PRIMARY KEY, bytes INTEGER NOT NULL) WITHOUT ROWID;
CREATE TABLE completion (
    id INTEGER PRIMARY KEY AUTOINCREMENT, tenant TEXT NOT NULL, tokenizer TEXT NOT NULL, identity BLOB NOT NULL,
    created REAL NOT NULL, count INTEGER NOT NULL DEFAULT 1, hits INTEGER NOT NULL DEFAULT 0,
    accepted INTEGER NOT NULL DEFAULT 0, rejected INTEGER NOT NULL DEFAULT 0, size INTEGER NOT NULL,
    model TEXT NOT NULL, prompt_fingerprint TEXT NOT NULL, tools TEXT NOT NULL, workflow_step TEXT NOT NULL,
    checksum BLOB NOT NULL, vector_checksum BLOB, token_ids BLOB NOT NULL, query TEXT NOT NULL, text TEXT NOT NULL,
    vector BLOB
);
CREATE UNIQUE INDEX completion_identity ON completion (tenant, tokenizer, identity);
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


def in_format_1(tmp_path: Path) -> Path:
    """The records of `filled` as the first format held them."""
    source, file = filled(tmp_path / "today"), tmp_path / "old.sqlite"
    connection = sqlite3.connect(file, isolation_level=None)
    connection.executescript(f"PRAGMA application_id=1347568452; PRAGMA user_version=1; {FORMAT_1}")
    connection.execute("ATTACH ? AS today", (str(source),))
    names = [row[1] for row in connection.execute("PRAGMA main.table_info(completion)")]
    connection.execute(f"INSERT INTO completion SELECT {', '.join(names)} FROM today.completion")
    connection.execute("INSERT INTO meta SELECT * FROM today.meta WHERE key = 'embedder'")
    connection.execute("PRAGMA journal_mode=WAL")
    connection.close()
    return file


def schema_of(file: Path) -> list[tuple[str, str]]:
    connection = sqlite3.connect(file)
    found = connection.execute("SELECT name, sql FROM sqlite_master WHERE sql NOT NULL AND name != 'completion'")
    schema = sorted((name, " ".join(sql.split())) for name, sql in found)
    schema += [("columns", str(row[1:])) for row in connection.execute("PRAGMA table_xinfo(completion)")]
    connection.close()
    return schema


def test_a_file_of_the_first_format_becomes_one_of_today(tmp_path):
    file = in_format_1(tmp_path)
    before = SQLiteStore.open(tmp_path / "today" / "precedent.sqlite")
    store = SQLiteStore.open(file)
    assert store.list() == before.list()
    assert store.stats().tenants == before.stats().tenants
    assert store.insert(completion(999), unit_vector(1), EMBEDDER) == COUNT + 1
    assert store.forget(Selection(ids=(3,))) == 1
    assert store.gone_since(0)[1].tolist() == [3]
    store.close()
    before.close()
    connection = sqlite3.connect(file)
    assert connection.execute("PRAGMA user_version").fetchone() == (FORMAT_VERSION,)
    connection.close()
    assert schema_of(file) == schema_of(tmp_path / "today" / "precedent.sqlite")
    assert verify_cache(file).findings == ()


def test_a_file_of_the_first_format_that_damage_keeps_from_migrating_is_repaired(tmp_path):
    """Sizes that add up to more than an integer holds. The damaged file is kept byte for byte."""
    file = in_format_1(tmp_path)
    # without a log, so that opening the file to write would change it
    changed(file, f"UPDATE completion SET size = {2**63 - 1}", "PRAGMA journal_mode=DELETE")
    refused(file, "integer overflow")
    before = file.read_bytes()
    report = verify_cache(file, repair=True)
    assert file.with_name(f"{file.name}.damaged").read_bytes() == before
    assert [(finding.kind, finding.repaired) for finding in report.findings] == [("structure", True)]
    assert report.records == COUNT
    assert verify_cache(file).sound


def test_a_migration_that_fails_leaves_the_file_as_it_was(tmp_path, monkeypatch):
    file = in_format_1(tmp_path)
    before = schema_of(file)
    monkeypatch.setattr("precedent.cache.store.schema._SINCE_2", "CREATE TABLE gone (id);\nnot SQL;\n")
    with pytest.raises(CacheError, match="syntax error"):
        SQLiteStore.open(file)
    assert schema_of(file) == before


def test_an_old_file_that_may_not_be_written_is_refused(tmp_path):
    file = in_format_1(tmp_path)
    before = file.read_bytes()
    with pytest.raises(CacheMismatchError, match="format 1 and is read-only"):
        SQLiteStore.open(file, read_only=True)
    assert file.read_bytes() == before
