"""The nearest stored completions by cosine. An index can always be rebuilt from the store.

There is one index per (tenant, tokenizer), so a search cannot find another tenant's vectors. It is exact.
"""

from __future__ import annotations

import importlib
import sys
from collections.abc import Callable, Hashable, Iterator
from contextlib import contextmanager
from typing import Any, Protocol

import numpy as np

from precedent.cache.records import Hit, Ids, Selection, Vector
from precedent.cache.store import CompletionStore
from precedent.errors import CacheError
from precedent.runtime.process import Lock, computing


class Similarity(Protocol):
    """Nearest neighbours within one partition. The store decides: a completion that it no longer has is no hit.

    What keeps nothing outside of this process need only `search`, `clear` and `erase_gone`.
    """

    def search(self, vector: Vector, tenant: str, tokenizer: str, k: int) -> list[Hit]:
        """At most `k` hits of this tenant and tokenizer, nearest first; `vector` is `[dimension]`, of length 1."""

    def forget(self, selection: Selection) -> None:
        """Erase what the store is about to forget from everything that outlives this process."""
        self.clear()

    def clear(self) -> None:
        """Drop what is in memory; the next search reads it again."""

    def erase_gone(self) -> None:
        """Erase what any process has forgotten or evicted, without waiting for a search. Raises CacheError."""

    def close(self) -> None:
        """Release resources; the store is still open."""
        self.clear()


SimilarityOf = Callable[[CompletionStore], Similarity]
"""Creates the search for a store, like the function that `precedent.langchain.in_vector_store` returns."""


class SimilarityIndex(Similarity):
    """Nearest stored completions within one partition; follows the store, even when another process writes to it.

    It holds every vector of the partitions that were searched: 1.5 KB each for 384 dimensions.
    """

    def __init__(self, store: CompletionStore) -> None:
        self._store = store
        self._partitions: dict[tuple[str, str], _Partition] = {}
        self._lock = Lock()  # FAISS allows no change during a search, and releases the GIL in both

    def search(self, vector: Vector, tenant: str, tokenizer: str, k: int) -> list[Hit]:
        """At most `k` hits, nearest first, newer first among equals. `vector` is `[dimension]`, of length 1."""
        with self._lock, computing():
            hits = self._caught_up(tenant, tokenizer).search(vector, k)
        return sorted(hits, key=lambda hit: (-hit.similarity, -hit.completion_id))

    def clear(self) -> None:
        """Drop all vectors from memory; the next search reads them again."""
        with self._lock:
            self._partitions.clear()

    def erase_gone(self) -> None:
        """Erase vectors of completions that any process has forgotten or evicted. Raises CacheError."""
        with self._lock, computing():
            for key, partition in list(self._partitions.items()):
                self._erase_gone(partition, *key)

    def _caught_up(self, tenant: str, tokenizer: str) -> _Partition:
        key, stamp = (tenant, tokenizer), self._store.stamp()
        partition = self._partitions.get(key) or _Partition(self._store.epoch())
        if partition.stamp != stamp:
            self._erase_gone(partition, tenant, tokenizer)
            if 2 * partition.num_gone > len(partition.ids):  # reading the rest again frees the memory
                partition = _Partition(self._store.epoch())
            partition.append(*self._store.vectors_since(tenant, tokenizer, partition.last_id))
            self._partitions[key], partition.stamp = partition, stamp
        return partition

    def _erase_gone(self, partition: _Partition, tenant: str, tokenizer: str) -> None:
        epoch = self._store.epoch()
        if partition.epoch != epoch:
            partition.erase_except(self._store.ids(tenant, tokenizer))
            partition.epoch = epoch


class _Partition:
    """Vectors in order of their ids: some 7 ms for a search among 100,000 of 384 dimensions."""

    def __init__(self, epoch: int) -> None:
        self.epoch = epoch
        self.stamp: Hashable = None
        self.ids = np.empty(0, dtype=np.int64)
        self.num_gone = 0
        self._vectors: _Vectors | None = None

    @property
    def last_id(self) -> int:
        """The highest id, 0 without vectors."""
        return int(self.ids[-1]) if self.ids.size else 0

    def append(self, ids: Ids, vectors: Vector) -> None:
        """Add vectors `[n, dimension]`. Raises CacheError for a vector without unit length."""
        if not len(ids):
            return
        lengths = np.linalg.norm(vectors, axis=1)
        if not np.allclose(lengths, 1.0, atol=1e-3):  # also catches NaN, which no search would find
            raise CacheError("a stored vector does not have unit length; run `precedent cache verify` on the cache")
        if self._vectors is None:
            self._vectors = _no_vectors(vectors.shape[1])
        self._vectors.add(np.ascontiguousarray(vectors))
        self.ids = np.concatenate([self.ids, ids])

    def search(self, vector: Vector, k: int) -> list[Hit]:
        """At most `k` hits, best first."""
        k = min(k, len(self.ids) - self.num_gone)
        if k < 1 or self._vectors is None:
            return []
        scores, places = self._vectors.search(vector, k)
        return [Hit(int(self.ids[place]), float(score)) for place, score in zip(places, scores, strict=True)]

    def erase_except(self, alive: Ids) -> None:
        """Overwrite all other vectors with NaN, which is never a neighbour."""
        gone = ~np.isin(self.ids, alive)
        self.num_gone = int(gone.sum())
        if self.num_gone and self._vectors is not None:
            self._vectors.stored()[gone] = np.nan


class _Vectors(Protocol):
    """Vectors of one dimension in the order in which they were added."""

    def add(self, vectors: Vector) -> None:
        """Add vectors `[n, dimension]`."""

    def stored(self) -> Vector:
        """All vectors `[count, dimension]`, as they lie in memory; a search passes over those of NaN."""

    def search(self, vector: Vector, k: int) -> tuple[Vector, Ids]:
        """The `k` largest inner products with `vector`, and the places of these vectors."""


USES_FAISS = sys.platform == "linux"
"""Elsewhere FAISS and torch bring an OpenMP library each, and the second may crash the process."""


def _no_vectors(dimension: int) -> _Vectors:
    return _InFaiss(importlib.import_module("faiss"), dimension) if USES_FAISS else _InNumpy(dimension)


class _InFaiss:
    """A FAISS `IndexFlatIP`."""

    def __init__(self, faiss: Any, dimension: int) -> None:
        self._faiss, self._index = faiss, faiss.IndexFlatIP(dimension)

    def add(self, vectors: Vector) -> None:
        self._index.add(vectors)

    def stored(self) -> Vector:
        shape = self._index.ntotal, self._index.d
        found: Vector = self._faiss.rev_swig_ptr(self._index.get_xb(), shape[0] * shape[1]).reshape(shape)
        return found

    def search(self, vector: Vector, k: int) -> tuple[Vector, Ids]:
        with _one_thread(self._faiss):
            scores, places = self._index.search(vector[None, :], k)
        return scores[0], places[0]


class _InNumpy:
    """The same without FAISS, more slowly."""

    def __init__(self, dimension: int) -> None:
        self._memory, self._count = np.empty((16, dimension), np.float32), 0

    def add(self, vectors: Vector) -> None:
        before, self._count = self._count, self._count + len(vectors)
        if self._count > len(self._memory):
            grown = np.empty((2 * self._count, vectors.shape[1]), np.float32)
            grown[:before] = self._memory[:before]
            self._memory = grown
        self._memory[before : self._count] = vectors

    def stored(self) -> Vector:
        return self._memory[: self._count]

    def search(self, vector: Vector, k: int) -> tuple[Vector, Ids]:
        scores = np.nan_to_num(self.stored() @ vector, nan=-np.inf)
        nearest = np.argpartition(-scores, k - 1)[:k]
        places = nearest[np.argsort(-scores[nearest])]
        return scores[places], places


@contextmanager
def _one_thread(faiss: Any) -> Iterator[None]:
    # FAISS and PyTorch may share one OpenMP runtime: without restoring the number, a search would slow PyTorch on this
    # thread for good.
    before = faiss.omp_get_max_threads()
    faiss.omp_set_num_threads(1)
    try:
        yield
    finally:
        faiss.omp_set_num_threads(before)
