"""The SQLite store passes the store contract, survives kill -9, sees other processes, and stays bounded."""

from __future__ import annotations

import sqlite3
from contextlib import closing
from pathlib import Path
from textwrap import dedent

import pytest
from helpers.forked import Program

from precedent.cache import Selection, SQLiteStore
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
    with Program(["-c", dedent(WRITER), tmp_path, "crash"]) as writer:
        seen = [writer.stdout.readline() for _ in range(20)]
        writer.kill()
        seen += writer.stdout.readlines()
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
    command = ["-c", dedent(WRITER), tmp_path]
    with Program([*command, "left", 15]) as left, Program([*command, "right", 15]) as right:
        mine = [store.insert(completion(n, query="mine"), unit_vector(n), EMBEDDER) for n in range(15)]
        printed = [int(line.split()[0]) for writer in (left, right) for line in writer.stdout]
        assert (left.wait(), right.wait()) == (0, 0)
    assert ids_of(store.since("default", "tok", 0)) == sorted(printed + mine)
    assert store.list(Selection(ids=(1,)), None)[0].accepted == 30
    store.close()


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


def test_one_completion_larger_than_the_bound_is_not_stored(caplog):
    store = SQLiteStore.open(max_bytes=1000)
    assert store.insert(completion(1, text="y" * 2000), None, None) == 0
    assert "at most 1000 bytes" in caplog.text
    assert store.stats().records == 0
    store.close()
    with pytest.raises(CacheError, match="max_bytes=0"):
        SQLiteStore.open(max_bytes=0)


def test_a_failed_write_leaves_nothing_behind(tmp_path):
    store = SQLiteStore.open(tmp_path)
    with pytest.raises(CacheError, match="syntax error"), store._database.write() as connection:
        connection.executemany("INSERT INTO usage VALUES (?, 1, 1)", [("half",)]).execute("not SQL")
    assert store.insert(completion(1), unit_vector(1), EMBEDDER) == 1
    assert [share.tenant for share in store.stats().tenants] == ["default"]
    with closing(sqlite3.connect(tmp_path / "precedent.sqlite")) as beside:
        assert beside.execute("SELECT tenant FROM usage").fetchall() == [("default",)]
    store.close()
