"""Opening a cache file: what is not a cache is refused and stays byte for byte; what cannot be written is used."""

from __future__ import annotations

import os
import shutil
import signal
import sqlite3
import stat
import subprocess
import sys
import threading
from contextlib import closing
from pathlib import Path
from textwrap import dedent

import pytest
from helpers.cache_files import COUNT, changed, contents, fill, filled, logged, refused, tokens_in, write
from helpers.forked import Program, run

from precedent.cache import Selection, SpeculationCache, SQLiteStore, database, verify_cache
from precedent.cache.database import connect, create_file
from precedent.cache.files import database_path
from precedent.cache.inspection import inspecting
from precedent.errors import CacheError, CacheMismatchError
from precedent_testing.embedders import HashEmbedder
from precedent_testing.store_contract import EMBEDDER, completion, unit_vector

# --- places ----------------------------------------------------------------------------------------------------------


def test_a_folder_gets_a_file_and_a_file_name_is_taken_as_it_is(tmp_path):
    assert database_path(tmp_path / "new") == tmp_path / "new" / "precedent.sqlite"
    assert database_path(tmp_path / "a.db") == tmp_path / "a.db"
    assert database_path(f"{tmp_path}/a.sqlite") == tmp_path / "a.sqlite"
    (tmp_path / "folder.db").mkdir()
    assert database_path(tmp_path / "folder.db") == tmp_path / "folder.db" / "precedent.sqlite"


@pytest.mark.parametrize("name", ["ünï çödé", "with?question#and%20percent", "a'b;--"])
def test_any_path_may_hold_a_cache_readable_by_its_owner_only(tmp_path, name):
    assert tokens_in(filled(tmp_path / name)) == list(range(COUNT))
    assert (tmp_path / name / "precedent.sqlite").stat().st_mode & 0o077 == 0
    assert [file.name for file in (tmp_path / name).iterdir()] == ["precedent.sqlite"]


@pytest.mark.parametrize("path", ["", "a\x00b", "x" * 5000, "file/cache"])
def test_an_impossible_path_is_refused(tmp_path, monkeypatch, path):
    monkeypatch.chdir(tmp_path)
    Path("file").write_text("mine")
    with pytest.raises(CacheError):
        SQLiteStore.open(path)
    assert Path("file").read_text() == "mine"


def test_a_missing_file_is_not_created_unasked(tmp_path):
    for options in ({"create": False}, {"read_only": True}):
        with pytest.raises(CacheError, match="there is no cache"):
            SQLiteStore.open(tmp_path / "none", **options)
    with pytest.raises(CacheError, match="there is no cache"):
        verify_cache(tmp_path)
    assert list(tmp_path.iterdir()) == []


def test_a_file_system_without_hard_links_may_hold_a_cache(tmp_path, monkeypatch):
    def fail(*paths):
        raise PermissionError

    monkeypatch.setattr(os, "link", fail)
    assert tokens_in(filled(tmp_path)) == list(range(COUNT))
    assert [file.name for file in tmp_path.iterdir()] == ["precedent.sqlite"]


def test_a_cache_that_another_process_holds_says_so(tmp_path, nobody_waits_long):
    with (
        closing(SQLiteStore.open(tmp_path)) as store,
        closing(connect(tmp_path / "precedent.sqlite", "mode=rw")) as other,
    ):
        other.execute("BEGIN IMMEDIATE")
        with pytest.raises(CacheError, match=r"another process has held it for .* seconds; try"):
            store.insert(completion(1), None, None)
        other.execute("ROLLBACK")
        assert store.insert(completion(1), None, None) == 1


# --- files that are not a cache --------------------------------------------------------------------------------------


PLANTED = {
    "CREATE TRIGGER planted AFTER INSERT ON completion BEGIN DELETE FROM completion WHERE id = new.id; END": "trigger",
    "CREATE VIEW planted AS SELECT * FROM completion": "view",
    "CREATE TABLE planted (x)": "table",
    "CREATE INDEX planted ON completion (abs(accepted - 9223372036854775807))": "index",
    "ALTER TABLE completion ADD COLUMN more TEXT DEFAULT 'x'": "'table' 'completion'",
    "PRAGMA user_version=999": "has cache format 999, .*reads 1; .*upgrade",
    "PRAGMA application_id=7": "another program's",
}


@pytest.mark.parametrize("statement", PLANTED)
def test_a_schema_that_is_not_ours_is_refused(tmp_path, statement):
    """With the first of them, `insert` would return the id of a record that is not there."""
    file, said = filled(tmp_path), PLANTED[statement]
    changed(file, statement)
    refused(file, f"its '{said}' 'planted'" if said.isalpha() else said)


# --- logs ------------------------------------------------------------------------------------------------------------


def test_looking_while_another_process_writes_believes_no_torn_state(tmp_path):
    """One process stores and folds its log in without a pause, while this one looks at the files again and again."""
    code = """
        import sys, threading
        from precedent.cache import Bounds, Completion, SQLiteStore
        def opened():
            store = SQLiteStore.open(sys.argv[1], bounds=Bounds(max_records=60))
            store._database._writer.execute("PRAGMA wal_autocheckpoint=20")
            store._database._writer.execute("PRAGMA synchronous=OFF")
            return store
        store = opened()
        done = threading.Event()
        threading.Thread(target=lambda: (sys.stdin.read(), done.set()), daemon=True).start()
        number = 0
        while not done.is_set():
            number += 1
            store.insert(Completion((number,), "tok", "model", text="x" * 20_000), None, None)
            if number % 50 == 0:
                store.close()
                store = opened()
            if number == 50:
                print("ready", flush=True)
        store.close()
        print(number)
    """
    with Program(["-c", dedent(code), tmp_path]) as writer:
        assert writer.stdout.readline() == "ready\n"
        for _ in range(4):
            with inspecting(tmp_path / "precedent.sqlite", whole=True) as connection:
                assert 50 <= connection.execute("SELECT count(*) FROM completion").fetchone()[0] <= 60
        writer.stdin.close()
        written = int(writer.stdout.readline())
    assert tokens_in(tmp_path / "precedent.sqlite")[-1] == written


def test_a_log_that_cannot_be_read_here_is_not_left_out_silently(tmp_path):
    """SQLite needs an index beside the log and may not make one; without the log half of the records would be gone."""
    file = write(tmp_path / "b", logged(tmp_path / "a"))
    os.mknod(f"{file}-shm", stat.S_IFSOCK | 0o600)
    refused(file, "cannot be inspected now: unable to open database file; .* make it writable", CacheError)


def test_the_log_of_a_lost_file_is_not_replayed_into_a_new_one(tmp_path):
    """Nor folded in by a refusal."""
    code = """
        import os, signal, sys
        from precedent.cache import Completion, SpeculationCache
        from precedent_testing.embedders import HashEmbedder
        cache = SpeculationCache.open(sys.argv[1], embedder=HashEmbedder())
        cache.insert(Completion((1, 2), "tok", "model", query="what"))
        os.kill(os.getpid(), signal.SIGKILL)
    """
    assert run(["-c", dedent(code), tmp_path]).returncode == -signal.SIGKILL
    file = tmp_path / "precedent.sqlite"
    before = contents(file)
    assert len(before["-wal"]) > 0
    with pytest.raises(CacheMismatchError, match="hash-32"):
        SpeculationCache.open(tmp_path, embedder=HashEmbedder(dimension=32))
    assert contents(file) == before
    file.rename(tmp_path / "moved.sqlite")
    with pytest.raises(CacheError, match="log of a cache file that is gone"):
        SQLiteStore.open(tmp_path)


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
    subprocess.run([sys.executable, "-c", dedent(code)], check=True)
    assert Path(f"{file}-wal").stat().st_size > 0, "the last one to close it would have folded the log in"
    store.close()


# --- files that may not be written -----------------------------------------------------------------------------------


def test_a_read_only_cache_is_used_warns_once_and_stores_nothing(tmp_path, caplog):
    file = filled(tmp_path)
    before = file.read_bytes()
    store = SQLiteStore.open(file, read_only=True)
    assert len(store.since("default", "tok", 0)) == COUNT
    assert [store.insert(completion(100 + n), unit_vector(n), EMBEDDER) for n in range(3)] == [0, 0, 0]
    store.credit({1: (1, 1)})
    assert caplog.text.count("read-only") == 1
    with pytest.raises(CacheError, match="read-only"):
        store.forget(Selection(ids=(1,)))
    assert store.list(Selection(ids=(1,)), None)[0].accepted == 0
    store.close()
    assert file.read_bytes() == before


def test_a_file_that_may_not_be_written_opens_read_only(tmp_path, monkeypatch):
    file = filled(tmp_path)
    monkeypatch.setattr("precedent.cache.sqlite_store.os.access", lambda path, mode: Path(path) != file)
    with closing(SQLiteStore.open(file)) as store:
        assert store.stats().read_only
        assert store.insert(completion(100), unit_vector(1), EMBEDDER) == 0


def test_many_threads_create_one_file(tmp_path):
    """All of them insert into the file that the first one made."""

    def insert(number: int) -> None:
        store = SQLiteStore.open(tmp_path)
        store.insert(completion(number), None, None)
        store.close()

    threads = [threading.Thread(target=insert, args=(number,)) for number in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    inode = (tmp_path / "precedent.sqlite").stat().st_ino
    create_file(tmp_path / "precedent.sqlite")
    assert (tmp_path / "precedent.sqlite").stat().st_ino == inode
    assert tokens_in(tmp_path / "precedent.sqlite") == list(range(8))
    assert [path.name for path in tmp_path.iterdir()] == ["precedent.sqlite"]


def test_what_a_killed_creation_left_is_swept_up(tmp_path):
    """Once it is old: another process may be making a young one. Other files stay."""
    old, young = tmp_path / ".precedent-12345678.new", tmp_path / ".precedent-abcdefgh.new"
    for left in (old, young, tmp_path / ".precedent-notes", tmp_path / ".12345678.new"):
        left.write_bytes(b"half")
        os.utime(left, (0, 0))
    os.utime(young)
    SQLiteStore.open(tmp_path).close()
    left = {path.name for path in tmp_path.iterdir()}
    assert left == {"precedent.sqlite", young.name, ".precedent-notes", ".12345678.new"}


@pytest.mark.parametrize("journal", ["delete", "wal"])
def test_another_programs_database_is_refused(tmp_path, journal):
    """Also while that program has it open."""
    file = tmp_path / "other.db"
    with closing(sqlite3.connect(file, isolation_level=None)) as connection:
        connection.execute(f"PRAGMA journal_mode={journal}")
        connection.execute("CREATE TABLE completion (id INTEGER PRIMARY KEY, tenant TEXT)")
        refused(file, "not a cache")
    refused(file, "not a cache")


@pytest.mark.parametrize("path", [None, "a.db"])
def test_no_connection_trusts_what_a_schema_calls(tmp_path, path):
    file = None if path is None else tmp_path / path
    if file is not None:
        file.touch()
    connection = connect(file)
    assert connection.execute("PRAGMA trusted_schema").fetchone() == (0,)
    assert connection.execute("PRAGMA cell_size_check").fetchone() == (1,)
    connection.close()


@pytest.mark.parametrize("journal", ["hot", "hot, and a log"])
def test_what_another_program_would_roll_back_is_refused(tmp_path, journal):
    """SQLite rolls a journal into the file it lies beside, whosever it is."""
    other = sqlite3.connect(tmp_path / "other.db", isolation_level=None)
    other.execute("CREATE TABLE t (x)")
    other.executemany("INSERT INTO t VALUES (?)", [("x" * 3000,) for _ in range(50)])
    other.execute("PRAGMA cache_size=2")
    other.execute("BEGIN")
    other.execute("UPDATE t SET x = upper(x)")
    planted = (tmp_path / "other.db-journal").read_bytes()
    other.execute("ROLLBACK")
    other.close()
    found = logged(tmp_path / "a")
    if journal == "hot":
        found = {"": found["folded"]}
    file = write(tmp_path / "b", {**found, "-journal": planted})
    refused(file, "another program left precedent.sqlite-journal", CacheError)


def test_a_file_that_another_program_switched_writes_a_log_again(tmp_path):
    file = filled(tmp_path)
    changed(file, "PRAGMA journal_mode=DELETE")
    store = SQLiteStore.open(file)
    fill(store, range(100, 101))
    assert Path(f"{file}-wal").stat().st_size > 0
    store.close()


@pytest.mark.skipif(not hasattr(os, "geteuid") or os.geteuid() == 0, reason="the superuser may write everywhere")
def test_a_folder_that_may_not_be_written_opens_read_only(tmp_path):
    filled(tmp_path / "fixed")
    (tmp_path / "fixed").chmod(0o555)
    store = SQLiteStore.open(tmp_path / "fixed")
    assert store.stats().read_only
    assert len(store.since("default", "tok", 0)) == COUNT
    store.close()
    (tmp_path / "fixed").chmod(0o755)


def test_a_copy_of_a_closed_cache_is_a_cache_whatever_lies_behind_its_end(tmp_path):
    """A page that a full disk cut short lies behind the end that the header gives, until something is written there."""
    file = shutil.copy(filled(tmp_path), tmp_path / "b.sqlite")
    file.write_bytes(file.read_bytes() + b"half a page" * 100)
    for number in (100, 101):
        assert verify_cache(file).findings == ()
        with closing(SQLiteStore.open(file)) as store:
            assert store.insert(completion(number), unit_vector(1), EMBEDDER) == number - 100 + COUNT + 1


def test_opening_a_file_that_has_just_been_set_aside_opens_the_new_one(tmp_path, monkeypatch):
    """Between finding the file and reading from it: what is written to the old one would go into the new one's log."""
    file, other = filled(tmp_path / "a"), filled(tmp_path / "b", range(5))
    connections = []

    def swapped(path, mode="mode=rw"):
        connections.append(connect(path, mode))
        if len(connections) == 1:
            path.rename(f"{path}.damaged")
            other.rename(path)
        return connections[-1]

    monkeypatch.setattr(database, "connect", swapped)
    store = SQLiteStore.open(file)
    assert len(store.list(Selection(), None)) == 5
    store.insert(completion(77), None, None)
    store.close()
    assert tokens_in(file) == [0, 1, 2, 3, 4, 77]
