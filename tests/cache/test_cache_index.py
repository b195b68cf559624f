"""The index finds what brute force finds, with FAISS and without, keeps partitions apart, and follows the store."""

from __future__ import annotations

import threading

import numpy as np
import pytest
from helpers.quick_store import quick_store

from precedent.cache import EmbedderIdentity, Selection, SQLiteStore
from precedent.cache.index import SimilarityIndex
from precedent.errors import CacheError
from precedent_testing.store_contract import EMBEDDER, completion, unit_vector


@pytest.fixture(autouse=True, params=[True, False], ids=["FAISS", "numpy"])
def library(request, monkeypatch):
    monkeypatch.setattr("precedent.cache.index.USES_FAISS", request.param)


def unit_rows(random: np.random.Generator, count: int, dimension: int) -> np.ndarray:
    rows = random.normal(size=(count, dimension)).astype(np.float32)
    return rows / np.linalg.norm(rows, axis=1, keepdims=True)


@pytest.fixture
def store():
    store = SQLiteStore.open()
    yield store
    store.close()


def insert(store, number: int, vector: np.ndarray, tenant: str = "default", tokenizer: str = "tok") -> int:
    new = completion(number, query=f"{tenant} {number}", tenant=tenant, tokenizer=tokenizer)
    return store.insert(new, vector, EmbedderIdentity("test", "f", len(vector)))


@pytest.mark.parametrize(("count", "dimension", "k"), [(1, 8, 1), (17, 3, 17), (500, 384, 64)])
def test_the_index_equals_brute_force(count, dimension, k):
    """Equal similarities come newest first."""
    random = np.random.default_rng(count)
    store, rows, query = quick_store(None), unit_rows(random, count, dimension), unit_rows(random, 1, dimension)[0]
    rows[count // 2] = rows[0]
    ids = [insert(store, number, row) for number, row in enumerate(rows)]
    hits = SimilarityIndex(store).search(query, "default", "tok", k)
    exact = rows.astype(np.float64) @ query.astype(np.float64)
    assert [hit.similarity for hit in hits] == pytest.approx(sorted(exact, reverse=True)[:k], abs=1e-6)
    assert all(hit.similarity == pytest.approx(exact[ids.index(hit.completion_id)], abs=1e-6) for hit in hits)
    nearest = SimilarityIndex(store).search(rows[0], "default", "tok", 2)
    assert [hit.completion_id for hit in nearest][: 1 + (count > 1)] == sorted({ids[count // 2], ids[0]}, reverse=True)


def test_the_index_follows_what_another_store_object_writes_and_forgets(tmp_path):
    reader, writer = SQLiteStore.open(tmp_path), SQLiteStore.open(tmp_path)
    index = SimilarityIndex(reader)

    def found() -> set[int]:
        return {hit.completion_id for hit in index.search(unit_vector(0), "default", "tok", 100)}

    assert found() == set()
    ids = [insert(writer, n, unit_vector(n)) for n in range(10)]
    assert found() == set(ids)
    for gone in ((ids[0],), ids[2:4], ids[4:9]):
        writer.forget(Selection(ids=tuple(gone)))
        index.erase_gone()
        assert found() == set(writer.ids("default", "tok").tolist())
    reader.close()
    writer.close()


@pytest.mark.parametrize("bad", [np.nan, 0.0, np.inf])
def test_a_stored_vector_without_unit_length_is_refused(store, bad):
    store.insert(completion(1), np.full(4, bad, dtype=np.float32), EMBEDDER)
    with pytest.raises(CacheError, match="unit length"):
        SimilarityIndex(store).search(unit_vector(0), "default", "tok", 1)


def test_searching_and_inserting_from_several_threads(store):
    """Every search finds at least what was inserted before it began, and nothing twice."""
    index, inserted, failures = SimilarityIndex(store), [0], []

    def search() -> None:
        while inserted[0] < 100:
            known = inserted[0]
            hits = index.search(unit_vector(0), "default", "tok", 1000)
            if not known <= len({hit.completion_id for hit in hits}) == len(hits):
                failures.append((known, len(hits)))

    threads = [threading.Thread(target=search) for _ in range(3)]
    for thread in threads:
        thread.start()
    for n in range(100):
        insert(store, n, unit_vector(n))
        inserted[0] += 1
    for thread in threads:
        thread.join()
    assert failures == []
