"""The SQLite store passes the store contract, survives kill -9, sees other processes, and stays bounded."""

from __future__ import annotations

import logging
import os
import sqlite3
import subprocess
import sys
import textwrap
import time
from contextlib import closing
from pathlib import Path

import pytest

from precedent.cache import Selection, SQLiteStore
from precedent.cache.database import create_file
from precedent.cache.eviction import common_level
from precedent.cache.files import database_path
from precedent.errors import CacheError
from precedent_testing.store_contract import EMBEDDER, StoreContract, completion, ids_of, unit_vector


class TestSQLiteFile(StoreContract):
    @pytest.fixture
    def open_store(self, tmp_path):
        return lambda: SQLiteStore.open(tmp_path / "folder" / "cache")


class TestSQLiteInMemory(StoreContract):
    persistent = False

    @pytest.fixture
    def open_store(self):
        return SQLiteStore.open


def process(code: str, *arguments: object, **options) -> subprocess.Popen:
    """Another Python that has this library."""
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(path for path in sys.path if path)}
    command = [sys.executable, "-c", textwrap.dedent(code), *map(str, arguments)]
    return subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, text=True, **options)


WRITER = """
    import itertools, sys
    from precedent.cache import SQLiteStore
    from precedent_testing.store_contract import EMBEDDER, completion, unit_vector
    store = SQLiteStore.open(sys.argv[1])
    count = int(sys.argv[3]) if len(sys.argv) > 3 else None
    for n in itertools.count() if count is None else range(count):
        row_id = store.insert(completion(n, query=f"{sys.argv[2]} {n}", text="x" * 2000), unit_vector(n), EMBEDDER)
        store.credit({1: (1, 0)})
        print(row_id, n, flush=True)
"""


def test_kill_9_loses_no_acknowledged_record(tmp_path):
    writer = process(WRITER, tmp_path, "crash")
    seen = [writer.stdout.readline() for _ in range(20)]
    writer.kill()
    seen += writer.communicate()[0].splitlines(keepends=True)
    acknowledged = {int(line.split()[0]): int(line.split()[1]) for line in seen if line.endswith("\n")}
    assert Path(tmp_path, "precedent.sqlite-wal").stat().st_size > 0, "the crash left a log to replay"
    store = SQLiteStore.open(tmp_path)
    found = {one.id: one for one in store.since("default", "tok", 0)}
    assert {row_id: found[row_id].token_ids for row_id in acknowledged} == {i: (n,) for i, n in acknowledged.items()}
    assert found[1].accepted >= len(acknowledged)
    assert len(store.vectors_since("default", "tok", 0)[0]) == len(found)
    store.close()


def test_two_processes_write_at_once_and_see_each_other(tmp_path):
    store = SQLiteStore.open(tmp_path)
    assert store.since("default", "tok", 0) == []
    writers = [process(WRITER, tmp_path, name, 15) for name in ("left", "right")]
    mine = [store.insert(completion(n, query="mine"), unit_vector(n), EMBEDDER) for n in range(15)]
    printed = [int(line.split()[0]) for writer in writers for line in writer.communicate()[0].splitlines()]
    assert [writer.returncode for writer in writers] == [0, 0]
    assert ids_of(store.since("default", "tok", 0)) == sorted(printed + mine)
    assert store.list(Selection(ids=(1,)), None)[0].accepted == 30
    store.close()


def test_a_record_of_another_store_is_seen_although_nothing_was_new_before(tmp_path):
    reader, writer = SQLiteStore.open(tmp_path), SQLiteStore.open(tmp_path)
    assert reader.since("default", "tok", 0) == []
    row_id = writer.insert(completion(1), unit_vector(1), EMBEDDER)
    assert ids_of(reader.since("default", "tok", 0)) == [row_id]
    writer.forget(Selection(ids=(row_id,)))
    assert reader.epoch() == writer.epoch() > 0
    reader.close()
    writer.close()


def test_since_costs_microseconds_when_nothing_is_new(tmp_path):
    store = SQLiteStore.open(tmp_path)
    last = [store.insert(completion(n), unit_vector(n), EMBEDDER) for n in range(50)][-1]
    store.since("default", "tok", last)

    def best(after_id: int) -> float:
        times = []
        for _ in range(200):
            started = time.perf_counter()
            store.since("default", "tok", after_id)
            times.append(time.perf_counter() - started)
        return min(times)

    assert best(last) < 100e-6
    assert best(last) < best(0) / 5
    store.close()


def test_a_folder_gets_a_file_and_a_file_name_is_taken_as_it_is(tmp_path):
    assert database_path(tmp_path / "new") == tmp_path / "new" / "precedent.sqlite"
    assert database_path(tmp_path / "a.db") == tmp_path / "a.db"
    assert database_path(f"{tmp_path}/a.sqlite") == tmp_path / "a.sqlite"
    (tmp_path / "folder.db").mkdir()
    assert database_path(tmp_path / "folder.db") == tmp_path / "folder.db" / "precedent.sqlite"


def test_a_cache_is_readable_by_its_owner_only(tmp_path):
    SQLiteStore.open(tmp_path).close()
    assert (tmp_path / "precedent.sqlite").stat().st_mode & 0o077 == 0
    assert [file.name for file in tmp_path.iterdir()] == ["precedent.sqlite"]


def test_creating_twice_keeps_the_first_file(tmp_path):
    """Two processes may create the same cache at the same moment."""
    file = tmp_path / "a.sqlite"
    create_file(file)
    before = file.stat().st_ino
    create_file(file)
    assert file.stat().st_ino == before


def test_eviction_keeps_the_bound_and_what_is_useful():
    store = SQLiteStore.open(max_bytes=20_000)
    useful = store.insert(completion(1, text="y" * 500), unit_vector(0), EMBEDDER)
    store.credit({useful: (500, 0)})
    for n in range(2, 200):
        newest = store.insert(completion(n, text="y" * 500), unit_vector(n), EMBEDDER)
        assert store.stats().bytes <= 20_000
    kept = ids_of(store.list(Selection(), None))
    assert useful in kept
    assert kept[0] == newest
    assert 20 < len(kept) < 40
    assert store.epoch() > 0
    store.close()


def test_a_large_tenant_does_not_evict_a_small_one():
    store = SQLiteStore.open(max_bytes=20_000)
    small = [store.insert(completion(n, tenant="small", text="y" * 300), None, None) for n in range(5)]
    for n in range(200):
        store.insert(completion(n, tenant="large", text="y" * 500), None, None)
    assert ids_of(store.since("small", "tok", 0)) == small
    store.close()


def test_tenants_come_down_to_a_common_level():
    assert common_level([100, 40, 10], 30) == 70
    assert common_level([100, 40, 10], 90) == 25
    assert common_level([100, 40, 10], 135) == 5
    assert common_level([100, 40, 10], 1000) == 0
    assert common_level([50, 50], 20) == 40


def test_one_large_newcomer_pushes_out_the_others():
    """It is its tenant's only completion and the largest: the others have to give way for the bound to hold."""
    store = SQLiteStore.open(max_bytes=10_000)
    for n in range(9):
        store.insert(completion(n, text="y" * 900), None, None)
    newcomer = store.insert(completion(99, tenant="new", text="y" * 9_800), None, None)
    assert ids_of(store.list(Selection(), None)) == [newcomer]
    store.close()


def test_one_completion_larger_than_the_bound_is_not_stored(caplog):
    store = SQLiteStore.open(max_bytes=1000)
    assert store.insert(completion(1, text="y" * 2000), None, None) == 0
    assert "at most 1000 bytes" in caplog.text
    assert store.stats().records == 0
    store.close()
    with pytest.raises(CacheError, match="max_bytes=0"):
        SQLiteStore.open(max_bytes=0)


def test_when_all_vectors_are_forgotten_another_embedder_may_fill_the_cache(tmp_path):
    store = SQLiteStore.open(tmp_path)
    store.insert(completion(1), unit_vector(1), EMBEDDER)
    store.forget(Selection(tenant="default"))
    assert store.embedder() is None
    store.close()


def test_a_full_disk_makes_the_cache_read_only_with_one_warning(caplog):
    store = SQLiteStore.open()
    row_id = store.insert(completion(1), unit_vector(1), EMBEDDER)
    with store._database.write() as connection:
        connection.execute("PRAGMA max_page_count = 12")
    results = [store.insert(completion(n, text="y" * 5000), unit_vector(n), EMBEDDER) for n in range(2, 20)]
    assert results[-1] == 0
    store.credit({row_id: (1, 1)})
    assert [record.levelno for record in caplog.records] == [logging.WARNING]
    assert ids_of(store.since("default", "tok", 0))[0] == row_id
    assert store.stats().read_only
    store.close()


def test_a_failed_write_leaves_nothing_behind(tmp_path):
    store = SQLiteStore.open(tmp_path)
    with pytest.raises(CacheError, match="syntax error"), store._database.write() as connection:
        connection.executemany("INSERT INTO usage VALUES (?, 1, 1)", [("half",)]).execute("not SQL")
    assert store.insert(completion(1), unit_vector(1), EMBEDDER) == 1
    assert [share.tenant for share in store.stats().tenants] == ["default"]
    with closing(sqlite3.connect(tmp_path / "precedent.sqlite")) as beside:
        assert beside.execute("SELECT tenant FROM usage").fetchall() == [("default",)]
    store.close()


@pytest.mark.skipif(not hasattr(os, "fork"), reason="no fork on this system")
def test_a_store_is_refused_in_a_forked_process(tmp_path):
    store = SQLiteStore.open(tmp_path)
    store._database._made_in -= 1  # what a child process would see
    with pytest.raises(CacheError, match="forked"):
        store.stats()
    store._database._made_in += 1
    store.close()


@pytest.mark.parametrize("name", ["ünï çödé", "with?question#and%20percent", "a'b;--"])
def test_any_path_may_hold_a_cache(tmp_path, name):
    store = SQLiteStore.open(tmp_path / name)
    store.insert(completion(1), unit_vector(1), EMBEDDER)
    store.close()
    assert (tmp_path / name / "precedent.sqlite").exists()
    again = SQLiteStore.open(tmp_path / name)
    assert again.stats().records == 1
    again.close()
