"""A file whose schema, number, mark or rows are not a cache's is refused and left as it was; nothing in it runs."""

from __future__ import annotations

import re
import sqlite3
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest
from helpers.cache_files import COUNT, changed, contents, fill, filled, refused, tokens_in

from precedent.cache import Selection, SQLiteStore, verify_cache
from precedent.cache.store.connection import connect
from precedent.cache.store.inspection import RepairableError, inspecting
from precedent.cache.store.schema import APPLICATION_ID, FORMATS
from precedent.errors import CacheError, CacheMismatchError
from precedent.testing.store_contract import EMBEDDER, completion, ids_of, unit_vector

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
def test_a_schema_that_is_not_ours_is_refused_and_can_be_repaired(tmp_path, said):
    """With the first of them, `insert` would return the id of a record that is not there."""
    file = filled(tmp_path)
    changed(file, PLANTED[said])
    refused(file, re.escape(said), RepairableError)
    (finding,) = verify_cache(file).findings
    assert said in finding.detail
    assert verify_cache(file, repair=True).sound
    assert tokens_in(file) == list(range(COUNT))
    store = SQLiteStore.open(file)
    row_id = store.insert(completion(999), unit_vector(1), EMBEDDER)
    assert ids_of(store.list(Selection(ids=(row_id,)))) == [row_id]
    store.close()


def test_what_is_checked_is_every_object_of_every_format(tmp_path):
    """Each object left out of each format's schema in turn, and each one's statement changed: all are refused."""
    for number, script in FORMATS:
        names = sqlite3.connect(":memory:")
        names.executescript(script)
        objects = names.execute("SELECT type, name FROM sqlite_master WHERE sql NOT NULL AND name NOT LIKE 'sqlite%'")
        for kind, name in objects.fetchall():
            file = tmp_path / f"{number} {len(script)} {name}" / "precedent.sqlite"
            file.parent.mkdir()
            marks = f"PRAGMA application_id={APPLICATION_ID}; PRAGMA user_version={number}"
            made = sqlite3.connect(file, isolation_level=None)
            made.executescript(f"{marks}; {script}")
            made.close()
            with inspecting(file):
                pass
            changed(file, f"DROP {kind} {name}")
            refused(file, "is missing|differs from a cache's|no such table", RepairableError)


def test_a_number_that_does_not_fit_the_tables_is_said(tmp_path):
    file = filled(tmp_path / "a")
    changed(file, "PRAGMA user_version=1")
    refused(file, "its header says format 1, and its tables have format 2", CacheMismatchError)
    assert verify_cache(file, repair=True).sound
    assert tokens_in(file) == list(range(COUNT))


def test_a_newer_number_asks_for_an_upgrade_first(tmp_path):
    """With tables of today it may also be damage, and is repaired when that is asked for; with others it never is."""
    file = filled(tmp_path / "a")
    changed(file, "PRAGMA user_version=999")
    refused(file, "format 999.*reads 1 to 2.*upgrade precedent.*its tables have format 2", CacheMismatchError)
    assert verify_cache(file, repair=True).sound
    newer = filled(tmp_path / "b")
    changed(newer, "PRAGMA user_version=999", "CREATE TABLE of_the_future (x)")
    before = contents(newer)
    for repair in (False, True):
        with pytest.raises(CacheMismatchError, match=r"upgrade precedent or give another path$"):
            verify_cache(newer, repair=repair)
    assert contents(newer) == before


def test_another_programs_mark_on_our_tables_is_said(tmp_path):
    file = filled(tmp_path)
    changed(file, "PRAGMA application_id=7")
    refused(file, "some other file.*it has a cache's tables, and another program's mark 7", CacheMismatchError)
    assert verify_cache(file, repair=True).sound


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
    refused(file, "has no epoch|number of the last record", RepairableError)
    assert verify_cache(file, repair=True).sound
    assert tokens_in(file) == list(range(COUNT))


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


def test_a_header_with_which_sqlite_would_not_write_is_found(tmp_path):
    """Its format's number for writers is one that no SQLite writes: the cache would be read-only for ever."""
    file = filled(tmp_path)
    for at, value in ((18, 9), (59, 4)):
        content = bytearray(file.read_bytes())
        content[at] = value
        file.write_bytes(content)
        assert [finding.kind for finding in verify_cache(file).findings] == ["structure"]
        assert verify_cache(file, repair=True).sound
        assert tokens_in(file) == list(range(COUNT))


def test_verifying_an_open_cache_keeps_its_locks(tmp_path):
    """The header is not read through a descriptor whose closing would let another process take the cache for unused."""
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
