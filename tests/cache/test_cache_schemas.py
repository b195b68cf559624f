"""A file whose schema, format or mark is not a cache's is refused and left as it was; nothing in it runs."""

from __future__ import annotations

import re
import sqlite3
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest
from helpers.cache_files import changed, damaged, fill, filled, refused

from precedent.cache import SQLiteStore
from precedent.cache.database import SCHEMA, connect
from precedent.errors import CacheError
from precedent_testing.store_contract import completion

PLANTED = {
    "trigger 'planted' does not belong to": "CREATE TRIGGER planted AFTER INSERT ON completion BEGIN "
    "DELETE FROM completion WHERE id = new.id; END",
    "view 'planted' does not belong to": "CREATE VIEW planted AS SELECT * FROM completion",
    "table 'planted' does not belong to": "CREATE TABLE planted (x)",
    "index 'planted' does not belong to": "CREATE INDEX planted ON completion (abs(accepted - 9223372036854775807))",
    "index 'completion_identity' is missing": "DROP INDEX completion_identity",
    "trigger 'completion_went' is missing": "DROP TRIGGER completion_went",
    "table 'gone' is missing": "DROP TABLE gone",
    "table 'completion' differs from a cache's": "ALTER TABLE completion ADD COLUMN more TEXT DEFAULT 'x'",
}


@pytest.mark.parametrize("said", PLANTED)
def test_a_schema_that_is_not_ours_is_refused(tmp_path, said):
    """With the first of them, `insert` would return the id of a record that is not there."""
    file = filled(tmp_path)
    changed(file, PLANTED[said])
    refused(file, re.escape(said))


def test_every_object_of_the_schema_is_checked(tmp_path):
    names = sqlite3.connect(":memory:")
    names.executescript(SCHEMA)
    objects = names.execute("SELECT type, name FROM sqlite_master WHERE sql NOT NULL AND name NOT LIKE 'sqlite%'")
    for kind, name in objects.fetchall():
        file = filled(tmp_path / name)
        changed(file, f"DROP {kind} {name}")
        refused(file, "is missing|differs from a cache's")


def test_a_file_without_a_single_object_is_refused(tmp_path):
    """One whose mark and format are a cache's, so that nothing but its schema says that it is none."""
    file = filled(tmp_path)
    changed(file, "PRAGMA writable_schema=ON", "DELETE FROM sqlite_master")
    refused(file, "is missing")


def test_another_format_is_refused(tmp_path):
    file = filled(tmp_path)
    changed(file, "PRAGMA user_version=999")
    refused(file, r"has cache format 999, .*reads 1; left untouched, upgrade precedent or give another path$")


def test_another_programs_mark_is_refused(tmp_path):
    file = filled(tmp_path)
    changed(file, "PRAGMA application_id=7")
    refused(file, "another program's database")


@pytest.mark.parametrize(
    "statement",
    [
        "DELETE FROM meta",
        "UPDATE meta SET value = 'x' WHERE key = 'epoch'",
        "DELETE FROM sqlite_sequence",
        "UPDATE sqlite_sequence SET seq = 9223372036854775807",
    ],
)
def test_rows_that_every_cache_has_are_looked_for(tmp_path, statement):
    file = filled(tmp_path)
    changed(file, statement)
    damaged(file, "has no epoch|number of the last record")


def test_a_meta_row_that_goes_while_the_cache_is_open_is_a_clear_error(tmp_path):
    store = SQLiteStore.open(filled(tmp_path))
    changed(tmp_path / "precedent.sqlite", "DELETE FROM meta")
    for ask in (store.epoch, lambda: store.gone_since(0), lambda: store.insert(completion(999), None, None)):
        with pytest.raises(CacheError, match="has no epoch"):
            ask()
    store.close()


@pytest.mark.parametrize("path", [None, "a.db"])
def test_no_connection_trusts_what_a_schema_calls(tmp_path, path):
    file = None if path is None else tmp_path / path
    if file is not None:
        file.touch()
    connection = connect(file)
    assert connection.execute("PRAGMA trusted_schema").fetchone() == (0,)
    assert connection.execute("PRAGMA cell_size_check").fetchone() == (1,)
    connection.close()


def test_verifying_an_open_cache_keeps_its_locks(tmp_path):
    """Closing a descriptor of the file would let another process take the cache for unused."""
    file = filled(tmp_path)
    store = SQLiteStore.open(file)
    fill(store, range(100, 101))
    assert store.verify().sound
    code = f"""
        import sqlite3
        connection = sqlite3.connect({str(file)!r}, isolation_level=None)
        connection.execute("SELECT count(*) FROM completion").fetchone()
        connection.close()
    """
    subprocess.run([sys.executable, "-c", textwrap.dedent(code)], check=True)
    assert Path(f"{file}-wal").stat().st_size > 0, "the last one to close it would have folded the log in"
    store.close()
