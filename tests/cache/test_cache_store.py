"""The SQLite store passes the store contract, survives kill -9, sees other processes, and stays bounded."""

from __future__ import annotations

import sqlite3
from contextlib import closing

import pytest

from precedent.cache import SQLiteStore
from precedent.errors import CacheError
from precedent_testing.store_contract import EMBEDDER, StoreContract, completion, unit_vector


class TestSQLiteFile(StoreContract):
    @pytest.fixture
    def open_store(self, tmp_path):
        return lambda: SQLiteStore.open(tmp_path / "folder" / "cache")


class TestSQLiteInMemory(StoreContract):
    persistent = False

    @pytest.fixture
    def open_store(self):
        return SQLiteStore.open


def test_a_failed_write_leaves_nothing_behind(tmp_path):
    store = SQLiteStore.open(tmp_path)
    with pytest.raises(CacheError, match="syntax error"), store._database.write() as connection:
        connection.executemany("INSERT INTO usage VALUES (?, 1, 1)", [("half",)]).execute("not SQL")
    assert store.insert(completion(1), unit_vector(1), EMBEDDER) == 1
    assert [share.tenant for share in store.stats().tenants] == ["default"]
    with closing(sqlite3.connect(tmp_path / "precedent.sqlite")) as beside:
        assert beside.execute("SELECT tenant FROM usage").fetchall() == [("default",)]
    store.close()
