"""`verify_cache` finds every kind of damage, repairs it, and loses nothing but what was damaged; formats migrate."""

from __future__ import annotations

import json
import sqlite3
from pathlib import Path

import numpy as np
import pytest

from precedent.cache import Selection, SpeculationCache, SQLiteStore, verify_cache
from precedent.drafters.matching.token_index import sorted_segment
from precedent.errors import CacheError
from precedent.testing.embedders import HashEmbedder
from precedent.testing.store_contract import EMBEDDER, completion, ids_of, unit_vector

COUNT = 40


def filled(folder: Path, count: int = COUNT) -> Path:
    """A closed cache with a sealed segment; returns the database file."""
    store = SQLiteStore.open(folder)
    for n in range(count):
        store.insert(completion(n, n + 1, text="text " * 200), unit_vector(n), EMBEDDER)
    seal(store)
    store.close()
    return folder / "precedent.sqlite"


def seal(store: SQLiteStore, tenant: str = "default") -> None:
    held = {one.id: one.token_ids for one in store.since(tenant, "tok")}
    lengths = {key: len(tokens) for key, tokens in held.items()}
    partition = store.partition(tenant, "tok")
    assert partition.seal(lengths, lambda ids: sorted_segment({i: held[i] for i in ids.tolist()}))


def tokens_in(file: Path) -> dict[int, tuple[int, ...]]:
    store = SQLiteStore.open(file)
    found = {one.id: one.token_ids for one in store.since("default", "tok")}
    store.close()
    return found


def changed(file: Path, statement: str, *values: object) -> None:
    connection = sqlite3.connect(file, isolation_level=None)
    connection.execute(statement, values)
    connection.close()


def assert_repairs(file: Path, *kinds: str, lost: set[int] = frozenset()) -> None:
    """Found without repair, mended with it, and nothing found afterwards."""
    for repair in (False, True):
        report = verify_cache(file, repair=repair)
        assert [finding.kind for finding in report.findings] == list(kinds)
        assert report.sound is repair
    assert verify_cache(file).findings == ()
    assert tokens_in(file) == {n: (n - 1, n) for n in range(1, COUNT + 1) if n not in lost}


def test_a_sound_cache_has_no_findings(tmp_path):
    report = verify_cache(filled(tmp_path).parent, repair=True)
    assert (report.records, report.findings, report.sound) == (COUNT, (), True)


def test_damaged_records_go_and_damaged_vectors_go_alone(tmp_path):
    file = filled(tmp_path)
    changed(file, "UPDATE completion SET token_ids = zeroblob(8) WHERE id = 7")
    changed(file, "UPDATE completion SET text = 'other' WHERE id = 9")
    changed(file, "UPDATE completion SET vector = zeroblob(16) WHERE id = 11")
    changed(file, "UPDATE completion SET vector = NULL WHERE id = 12")
    report = verify_cache(file)
    assert [finding.ids for finding in report.findings] == [(7,), (9,), (11,), (12,)]
    assert report.records == COUNT - 2
    assert_repairs(file, "record", "record", "vector", "vector", lost={7, 9})
    store = SQLiteStore.open(file)
    ids, vectors = store.vectors_since("default", "tok", 0)
    assert ids.tolist() == [n for n in range(1, COUNT + 1) if n not in (7, 9, 11, 12)]
    assert all((vector == unit_vector(row_id - 1)).all() for row_id, vector in zip(ids, vectors, strict=True))
    store.close()


def test_sums_are_counted_again(tmp_path):
    file = filled(tmp_path)
    changed(file, "UPDATE usage SET bytes = 1, records = 2")
    assert_repairs(file, "sums")
    changed(file, "UPDATE completion SET size = 1 WHERE id = 5")
    assert_repairs(file, "sums")


def test_a_damaged_record_of_the_embedder_costs_the_vectors_only(tmp_path):
    file = filled(tmp_path)
    changed(file, "UPDATE meta SET value = '{}' WHERE key = 'embedder'")
    report = verify_cache(file, repair=True)
    assert {finding.kind for finding in report.findings} == {"embedder"}
    assert len(tokens_in(file)) == COUNT
    with SpeculationCache.open(file, embedder=HashEmbedder()) as cache:
        assert cache.insert(completion(99)) == COUNT + 1


def segment_file(folder: Path, part: str) -> Path:
    (found,) = (folder / "precedent.sqlite-index").rglob(f"*.{part}.npy")
    return found


@pytest.mark.parametrize("part", ["tokens", "order", "completions"])
def test_a_damaged_segment_goes_and_the_table_stays(tmp_path, part):
    file = filled(tmp_path)
    damaged = segment_file(tmp_path, part)
    content = bytearray(damaged.read_bytes())
    content[-3] ^= 1
    damaged.write_bytes(content)
    assert_repairs(file, "segment")
    assert not damaged.exists()


def test_a_segment_that_was_forged_with_its_checksum_is_found(tmp_path):
    """Only verify compares with the table: a segment that is whole in itself but holds other tokens."""
    file = filled(tmp_path)
    store = SQLiteStore.open(file)
    files = store._segments.all_files()[0]
    (sealed,) = files.listed()
    segment = files.read(sealed)
    segment.tokens[1] += 5
    files.publish([files.write(segment)])
    store.close()
    assert_repairs(file, "segment")


def test_a_damaged_manifest_is_found(tmp_path):
    file = filled(tmp_path)
    (manifest,) = (tmp_path / "precedent.sqlite-index").rglob("manifest.json")
    manifest.write_text(json.dumps({"format": 1, "segments": [{"name": "../../etc/passwd"}]}))
    assert_repairs(file, "segment")


def pages_of(file: Path, name: str) -> list[int]:
    connection = sqlite3.connect(file)
    (root,) = connection.execute("SELECT rootpage FROM sqlite_master WHERE name = ?", (name,)).fetchone()
    connection.close()
    return [root]


def destroyed(file: Path, page: int) -> None:
    content = bytearray(file.read_bytes())
    content[(page - 1) * 4096 : page * 4096] = b"\xa5" * 4096
    file.write_bytes(content)


def test_an_index_that_disagrees_with_its_table_is_made_anew(tmp_path):
    file = filled(tmp_path)
    destroyed(file, pages_of(file, "completion_worth")[0])
    with pytest.raises(CacheError, match="damaged"):
        SQLiteStore.open(file)
    assert_repairs(file, "structure")


def test_a_destroyed_page_costs_its_records_only(tmp_path):
    """Every page but the first in turn: what is left is what was written, and at most a page's records are lost."""
    content = filled(tmp_path / "whole").read_bytes()
    saved = lost = 0
    for page in range(2, len(content) // 4096 + 1, 3):
        file = tmp_path / f"{page}.sqlite"
        file.write_bytes(content)
        destroyed(file, page)
        try:
            report = verify_cache(file, repair=True)
        except CacheError:
            lost += 1
            continue
        found = tokens_in(file)
        assert report.sound
        assert all(tokens == (row_id - 1, row_id) for row_id, tokens in found.items())
        assert verify_cache(file).findings == ()
        saved += len(found) >= COUNT - 4
    assert saved > 5 > lost


def test_what_is_no_cache_is_refused(tmp_path):
    with pytest.raises(CacheError, match="there is no cache"):
        verify_cache(tmp_path)
    (tmp_path / "a.db").write_text("mine")
    with pytest.raises(CacheError, match="is not a cache"):
        verify_cache(tmp_path / "a.db", repair=True)
    assert (tmp_path / "a.db").read_text() == "mine"


def test_gone_lists_what_went_and_says_when_it_no_longer_knows(tmp_path, monkeypatch):
    monkeypatch.setattr("precedent.cache.store.eviction.REMEMBERED_EPOCHS", 3)
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
