"""FAISS finds what brute force finds, partitions never mix, and the index follows the store."""

from __future__ import annotations

import os
import subprocess
import sys
import textwrap
import threading

import numpy as np
import pytest

from precedent.cache import EmbedderIdentity, Selection, SQLiteStore
from precedent.cache.index import ExactIndex, SimilarityIndex
from precedent.errors import CacheError
from precedent_testing.store_contract import EMBEDDER, completion, unit_vector


def unit_rows(random: np.random.Generator, count: int, dimension: int) -> np.ndarray:
    rows = random.normal(size=(count, dimension)).astype(np.float32)
    return rows / np.linalg.norm(rows, axis=1, keepdims=True)


@pytest.mark.parametrize(("count", "dimension", "k"), [(1, 8, 1), (17, 3, 17), (500, 32, 10), (2000, 384, 64)])
def test_the_index_equals_brute_force(count, dimension, k):
    random = np.random.default_rng(count)
    rows, query = unit_rows(random, count, dimension), unit_rows(random, 1, dimension)[0]
    index = ExactIndex(dimension)
    index.add(rows[: count // 2])
    index.add(rows[count // 2 :])
    positions, scores = index.search(query, k)
    exact = rows.astype(np.float64) @ query.astype(np.float64)
    assert len(set(positions.tolist())) == k
    np.testing.assert_allclose(np.sort(scores), np.sort(exact)[-k:], atol=1e-6)
    np.testing.assert_allclose(scores, exact[positions], atol=1e-6)


@pytest.fixture
def store():
    store = SQLiteStore.open()
    yield store
    store.close()


def insert(store, number: int, vector: np.ndarray, tenant: str = "default", tokenizer: str = "tok") -> int:
    new = completion(number, query=f"{tenant} {number}", tenant=tenant, tokenizer=tokenizer)
    return store.insert(new, vector, EmbedderIdentity("test", "f", len(vector)))


def test_hits_are_the_nearest_with_equals_newest_first(store):
    """Ties: the same three directions many times over."""
    directions = unit_rows(np.random.default_rng(0), 3, 16)
    ids = [insert(store, n, directions[n % 3]) for n in range(30)]
    hits = SimilarityIndex(store).search(directions[1], "default", "tok", 10)
    assert [hit.completion_id for hit in hits] == ids[1::3][::-1]
    assert all(hit.similarity == pytest.approx(1.0, abs=1e-6) for hit in hits)


def test_partitions_are_found_alone_and_completely(store):
    """What must be found is found; what must not is never: random inserts into six partitions, all asked after each."""
    random = np.random.default_rng(1)
    keys = [(tenant, tokenizer) for tenant in ("a", "b", "c") for tokenizer in ("t1", "t2")]
    expected: dict[tuple[str, str], dict[int, np.ndarray]] = {key: {} for key in keys}
    index = SimilarityIndex(store)
    for n in range(60):
        key = keys[random.integers(len(keys))]
        vector = unit_rows(random, 1, 8)[0]
        expected[key][insert(store, n, vector, *key)] = vector
        for asked in keys:
            hits = index.search(vector, *asked, 1000)
            assert {hit.completion_id for hit in hits} == set(expected[asked])
            for hit in hits:
                assert hit.similarity == pytest.approx(float(expected[asked][hit.completion_id] @ vector), abs=1e-6)


def test_k_limits_and_an_unknown_partition_is_empty(store):
    index = SimilarityIndex(store)
    assert index.search(unit_vector(0), "default", "tok", 5) == []
    for n in range(5):
        insert(store, n, unit_vector(n))
    assert [len(index.search(unit_vector(0), "default", "tok", k)) for k in (0, 1, 3, 5, 9)] == [0, 1, 3, 5, 5]
    assert index.search(unit_vector(0), "nobody", "tok", 5) == []


def test_what_is_forgotten_is_not_found_and_the_rest_is(store):
    index = SimilarityIndex(store)
    ids = [insert(store, n, unit_vector(n)) for n in range(10)]
    assert len(index.search(unit_vector(0), "default", "tok", 10)) == 10
    store.forget(Selection(ids=tuple(ids[::2])))
    assert {hit.completion_id for hit in index.search(unit_vector(0), "default", "tok", 10)} == set(ids[1::2])


def test_the_index_sees_what_another_store_object_writes(tmp_path):
    reader, writer = SQLiteStore.open(tmp_path), SQLiteStore.open(tmp_path)
    index = SimilarityIndex(reader)
    assert index.search(unit_vector(1), "default", "tok", 1) == []
    first = insert(writer, 1, unit_vector(1))
    assert [hit.completion_id for hit in index.search(unit_vector(1), "default", "tok", 1)] == [first]
    writer.forget(Selection(ids=(first,)))
    assert index.search(unit_vector(1), "default", "tok", 1) == []
    reader.close()
    writer.close()


@pytest.mark.parametrize("bad", [np.nan, 0.0, np.inf])
def test_a_stored_vector_without_unit_length_is_refused(store, bad):
    store.insert(completion(1), np.full(4, bad, dtype=np.float32), EMBEDDER)
    with pytest.raises(CacheError, match="unit length"):
        SimilarityIndex(store).search(unit_vector(0), "default", "tok", 1)


def test_searching_leaves_the_number_of_threads_as_it_was():
    """FAISS may share PyTorch's OpenMP runtime if that was loaded first: a search must not slow the model down."""
    code = """
        import torch
        torch.set_num_threads(3)
        torch.get_num_threads()  # PyTorch sets the number up in each thread when it is first needed, and then no more
        import numpy as np
        from precedent.cache.index import ExactIndex
        index = ExactIndex(4)
        index.add(np.eye(4, dtype=np.float32))
        index.search(np.eye(4, dtype=np.float32)[0], 2)
        print(torch.get_num_threads())
    """
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(path for path in sys.path if path)}
    command = [sys.executable, "-c", textwrap.dedent(code)]
    assert subprocess.run(command, env=environment, capture_output=True, text=True, check=True).stdout == "3\n"


def test_searching_and_inserting_from_several_threads(store):
    """Every search finds at least what was inserted before it began, and nothing twice."""
    index, inserted, failures = SimilarityIndex(store), [0], []

    def search() -> None:
        while inserted[0] < 150:
            known = inserted[0]
            hits = index.search(unit_vector(0), "default", "tok", 1000)
            if not known <= len({hit.completion_id for hit in hits}) == len(hits):
                failures.append((known, len(hits)))

    threads = [threading.Thread(target=search) for _ in range(3)]
    for thread in threads:
        thread.start()
    for n in range(150):
        insert(store, n, unit_vector(n))
        inserted[0] += 1
    for thread in threads:
        thread.join()
    assert failures == []
