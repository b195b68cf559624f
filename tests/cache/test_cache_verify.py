"""`verify_cache` checks pages, schema, records and vectors, and changes nothing."""

from __future__ import annotations

import sqlite3
from pathlib import Path

import numpy as np
import pytest

from precedent.cache import Selection, SQLiteStore, verify_cache
from precedent.errors import CacheError
from precedent_testing.store_contract import EMBEDDER, completion, ids_of, unit_vector

COUNT = 40


def filled(folder: Path, count: int = COUNT) -> Path:
    """A closed cache; returns the database file."""
    store = SQLiteStore.open(folder)
    for n in range(count):
        store.insert(completion(n, n + 1, text="text " * 200), unit_vector(n), EMBEDDER)
    store.close()
    return folder / "precedent.sqlite"


def changed(file: Path, statement: str, *values: object) -> None:
    connection = sqlite3.connect(file, isolation_level=None)
    connection.execute(statement, values)
    connection.close()


def test_a_sound_cache_has_no_findings(tmp_path):
    report = verify_cache(filled(tmp_path).parent)
    assert (report.records, report.findings, report.sound) == (COUNT, (), True)


def test_damaged_records_and_vectors_are_found_and_can_be_forgotten(tmp_path):
    file = filled(tmp_path)
    changed(file, "UPDATE completion SET token_ids = zeroblob(8) WHERE id = 7")
    changed(file, "UPDATE completion SET text = 'other' WHERE id = 9")
    changed(file, "UPDATE completion SET vector = zeroblob(16) WHERE id = 11")
    changed(file, "UPDATE completion SET vector = NULL WHERE id = 12")
    report = verify_cache(file)
    assert [(finding.kind, *finding.ids) for finding in report.findings] == [
        ("record", 7),
        ("record", 9),
        ("vector", 11),
        ("vector", 12),
    ]
    assert (report.records, report.sound) == (COUNT - 2, False)
    store = SQLiteStore.open(file)
    assert ids_of(store.since("default", "tok", 0)) == [n for n in range(1, COUNT + 1) if n not in (7, 9)]
    ids, vectors = store.vectors_since("default", "tok", 0)
    assert ids.tolist() == [n for n in range(1, COUNT + 1) if n not in (11, 12)]
    assert all((vector == unit_vector(row_id - 1)).all() for row_id, vector in zip(ids, vectors, strict=True))
    assert store.forget(Selection(ids=(7, 9, 11, 12))) == 4
    store.close()
    assert verify_cache(file).findings == ()


def test_verifying_changes_nothing(tmp_path):
    file = filled(tmp_path)
    changed(file, "UPDATE completion SET text = 'other' WHERE id = 9")
    before = file.read_bytes()
    assert not verify_cache(file).sound
    assert file.read_bytes() == before


def test_an_index_that_disagrees_with_its_table_is_found(tmp_path):
    file = filled(tmp_path)
    connection = sqlite3.connect(file)
    (root,) = connection.execute("SELECT rootpage FROM sqlite_master WHERE name = 'completion_worth'").fetchone()
    connection.close()
    content = bytearray(file.read_bytes())
    content[(root - 1) * 4096 : root * 4096] = b"\xa5" * 4096
    file.write_bytes(content)
    assert [finding.kind for finding in verify_cache(file).findings] == ["structure"]


def test_what_is_no_cache_is_refused(tmp_path):
    with pytest.raises(CacheError, match="there is no cache"):
        verify_cache(tmp_path)
    (tmp_path / "a.db").write_text("mine")
    with pytest.raises(CacheError, match="is not a cache"):
        verify_cache(tmp_path / "a.db")
    assert (tmp_path / "a.db").read_text() == "mine"


def test_gone_lists_what_went_and_says_when_it_no_longer_knows(tmp_path, monkeypatch):
    monkeypatch.setattr("precedent.cache.eviction.REMEMBERED_EPOCHS", 3)
    store = SQLiteStore.open(filled(tmp_path))
    start = store.epoch()
    assert store.gone_since(start) == (start, pytest.approx(np.array([])))
    store.forget(Selection(ids=(4, 2)))
    epoch, ids = store.gone_since(start)
    assert (epoch, sorted(ids.tolist())) == (store.epoch(), [2, 4])
    store.forget(Selection(ids=(5, 6)))
    assert store.gone_since(start)[1] is None
    assert sorted(store.gone_since(epoch)[1].tolist()) == [5, 6]
    assert ids_of(store.list(Selection(ids=(4, 5, 7)))) == [7]
    store.close()
