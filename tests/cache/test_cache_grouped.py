"""Many vectors: grouped search against brute force, sealed groups, growth, erasure, and what is done without FAISS."""

from __future__ import annotations

import sys

import numpy as np
import pytest

from precedent.cache import EmbedderIdentity, Selection, SQLiteStore
from precedent.cache.search import flat_index
from precedent.cache.search.grouped_index import GroupedIndex, assigned, group, num_groups
from precedent.cache.search.index import SimilarityIndex
from precedent.testing.store_contract import completion

pytest.importorskip("faiss")

DIMENSION = 24
IDENTITY = EmbedderIdentity("test", "f", DIMENSION)


def unit(rows: np.ndarray) -> np.ndarray:
    return (rows / np.linalg.norm(rows, axis=-1, keepdims=True)).astype(np.float32)


def topics(seed: int, count: int) -> np.ndarray:
    """Unit vectors around 40 topics, as requests to an agent lie."""
    random = np.random.default_rng(seed)
    centres = np.random.default_rng(99).normal(size=(40, DIMENSION))
    return unit(centres[random.integers(40, size=count)] + 0.4 * random.normal(size=(count, DIMENSION)))


@pytest.fixture
def small_groups(few_are_many, monkeypatch):
    """Grouping from 64 vectors on, in groups of eight."""
    monkeypatch.setattr("precedent.cache.search.grouped_index.GROUP_SIZE", 8)


def pages_of(vectors: np.ndarray):
    """The vectors of ids 1 to n, in pages of 100."""

    def pages(ids):
        for begin in range(0, ids.size, 100):
            yield ids[begin : begin + 100], vectors[ids[begin : begin + 100] - 1]

    return pages


def best(vectors: np.ndarray, query: np.ndarray, k: int) -> set[int]:
    return set((np.argsort(-(vectors @ query), kind="stable")[:k]).tolist())


def insert_all(store: SQLiteStore, vectors: np.ndarray, tenant: str = "default", start: int = 0) -> list[int]:
    return [
        store.insert(completion(n, tenant=tenant, query=f"{tenant} {n}"), vector, IDENTITY)
        for n, vector in enumerate(vectors, start)
    ]


def found(index: SimilarityIndex, query: np.ndarray, k: int = 10, tenant: str = "default") -> list[int]:
    return [hit.completion_id for hit in index.search(query, tenant, "tok", k)]


def test_all_groups_together_find_what_brute_force_finds():
    vectors = topics(1, 3000)
    index = GroupedIndex(group(np.arange(1, 3001), pages_of(vectors), lambda: False), groups_read=10**6)
    index.add(topics(2, 100))
    everything = np.concatenate([vectors, topics(2, 100)])
    for query in topics(3, 20):
        positions, scores = index.search(query, 20)
        exact = everything @ query
        np.testing.assert_allclose(scores, np.sort(exact)[::-1][:20], atol=2e-3)  # half precision
        np.testing.assert_allclose(scores, exact[positions], atol=2e-3)


def test_the_nearest_groups_find_nearly_all():
    vectors = topics(1, 20_000)
    index = GroupedIndex(group(np.arange(1, 20_001), pages_of(vectors), lambda: False))
    assert num_groups(20_000) == 256
    recall = [len(best(vectors, q, 10) & set(index.search(q, 10)[0].tolist())) / 10 for q in topics(3, 50)]
    assert np.mean(recall) > 0.95


def test_what_is_erased_is_not_found_and_what_is_left_fills_up():
    vectors = topics(1, 2000)
    index = GroupedIndex(group(np.arange(1, 2001), pages_of(vectors), lambda: False))
    query = vectors[5]
    before = index.search(query, 10)[0]
    index.erase(before[:4])
    after = index.search(query, 10)[0]
    assert len(after) == 10
    assert not set(before[:4].tolist()) & set(after.tolist())
    assert before[4:].tolist() == after[:6].tolist()


def test_grouping_gives_up_when_it_is_told_to():
    vectors = topics(1, 1000)
    calls = iter([False, False, True])
    assert group(np.arange(1, 1001), pages_of(vectors), lambda: next(calls)) is None
    assert assigned(vectors[:4], pages_of(vectors)(np.arange(1, 1001)), lambda: True) is None


@pytest.mark.parametrize("on_disk", [True, False])
def test_a_growing_partition_is_grouped_in_the_background_and_stays_right(tmp_path, small_groups, on_disk):
    """After each growth the exact nearest is found, alone of its tenant; gone ones never."""
    store = SQLiteStore.open(tmp_path if on_disk else None)
    index, vectors = SimilarityIndex(store, store.partition_vectors), topics(1, 400)
    others = insert_all(store, topics(5, 20), "other")
    ids: list[int] = []
    for begin in range(0, 400, 50):
        ids += insert_all(store, vectors[begin : begin + 50], start=begin)
        for place in range(0, begin + 50, 17):
            assert found(index, vectors[place], 1) == [ids[place]]
        index.wait()
    assert isinstance(index._partitions["default", "tok"].index, GroupedIndex)
    store.forget(Selection(ids=tuple(ids[::2])))
    assert not set(found(index, vectors[0], 100)) & set(ids[::2])
    assert found(index, vectors[1], 1) == [ids[1]]
    assert set(found(index, vectors[0], 100, "other")) == set(others)
    index.close()
    store.close()


def test_sealed_groups_are_found_again_with_what_came_later(tmp_path, small_groups):
    store, vectors = SQLiteStore.open(tmp_path), topics(1, 300)
    index = SimilarityIndex(store, store.partition_vectors)
    ids = insert_all(store, vectors[:200])
    found(index, vectors[0])
    index.wait()
    index.close()
    ids += insert_all(store, vectors[200:], start=200)
    store.forget(Selection(ids=(ids[3],)))
    store.close()
    store = SQLiteStore.open(tmp_path)
    index = SimilarityIndex(store, store.partition_vectors)
    assert store.partition_vectors("default", "tok").sealed(DIMENSION).entries.size == 199
    assert [found(index, vectors[n], 1) == [ids[n]] for n in range(0, 300, 7)] == [True] * 43
    assert ids[3] not in found(index, vectors[3], 50)
    index.close()
    store.close()


def test_two_stores_on_one_folder_share_groups(tmp_path, small_groups):
    one, two = SQLiteStore.open(tmp_path), SQLiteStore.open(tmp_path)
    vectors = topics(1, 150)
    ids = insert_all(one, vectors)
    first = SimilarityIndex(one, one.partition_vectors)
    found(first, vectors[0])
    first.wait()
    second = SimilarityIndex(two, two.partition_vectors)
    assert found(second, vectors[9], 1) == [ids[9]]
    assert isinstance(second._partitions["default", "tok"].index, GroupedIndex)
    for part in (first, second):
        part.close()
    one.close()
    two.close()


def raw(folder) -> bytes:
    return b"".join(
        file.read_bytes() for file in folder.rglob("*") if file.is_file() and not file.name.endswith("-shm")
    )


def test_a_forgotten_vector_is_in_no_file(tmp_path, small_groups):
    """In the table as float32 and in the groups as float16: both there before, neither after."""
    store, vectors = SQLiteStore.open(tmp_path), topics(1, 100)
    index = SimilarityIndex(store, store.partition_vectors)
    ids = insert_all(store, vectors)
    found(index, vectors[0])
    index.wait()
    traces = [vectors[7].tobytes(), vectors[7].astype(np.float16).tobytes()]
    kept = vectors[8].astype(np.float16).tobytes()
    assert all(trace in raw(tmp_path) for trace in [*traces, kept])
    store.forget(Selection(ids=(ids[7],)))
    assert [trace in raw(tmp_path) for trace in [*traces, kept]] == [False, False, True]
    index.close()
    store.close()


@pytest.mark.parametrize("part", ["entries", "vectors", "centres", "manifest"])
def test_damaged_groups_are_read_from_the_rows(tmp_path, small_groups, part):
    store, vectors = SQLiteStore.open(tmp_path), topics(1, 100)
    index = SimilarityIndex(store, store.partition_vectors)
    ids = insert_all(store, vectors)
    found(index, vectors[0])
    index.wait()
    index.close()
    (file,) = (path for path in (tmp_path / "precedent.sqlite-index").rglob(f"*{part}.*"))
    content = bytearray(file.read_bytes())
    content[len(content) // 2] ^= 4
    file.write_bytes(content)
    index = SimilarityIndex(store, store.partition_vectors)
    assert [found(index, vectors[n], 1) for n in range(0, 100, 9)] == [[ids[n]] for n in range(0, 100, 9)]
    index.close()
    store.close()


def test_without_faiss_nothing_is_grouped(tmp_path, small_groups, monkeypatch, caplog):
    monkeypatch.setitem(sys.modules, "faiss", None)  # as if it were not installed
    store, vectors = SQLiteStore.open(tmp_path), topics(1, 100)
    index = SimilarityIndex(store, store.partition_vectors)
    ids = insert_all(store, vectors)
    assert found(index, vectors[7], 1) == [ids[7]]
    index.wait()
    assert not isinstance(index._partitions["default", "tok"].index, GroupedIndex)
    assert caplog.messages == []  # nor was it tried
    index.close()
    store.close()


@pytest.mark.parametrize("make", [flat_index.FaissFlatIndex, flat_index.NumpyFlatIndex])
def test_a_flat_index_never_finds_what_was_erased(make):
    vectors, index = topics(1, 500), make(DIMENSION)
    index.add(vectors)
    index.erase(np.arange(0, 500, 2))
    left = np.arange(1, 500, 2)
    for query in [*topics(2, 5), *-vectors[:5]]:
        positions, scores = index.search(query, 200)
        exact = np.sort(vectors[left] @ query)[::-1][:200]
        assert set(positions.tolist()) <= set(left.tolist())
        np.testing.assert_allclose(np.sort(scores)[::-1], exact, atol=1e-6)
    assert len(set(index.search(vectors[0], 250)[0].tolist())) == 250
