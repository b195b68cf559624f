"""The nearest stored completions by cosine. An index can always be rebuilt from the store.

There is one index per (tenant, tokenizer), so a search cannot find another tenant's vectors. It is exact.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable, Hashable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, Protocol

import numpy as np

from precedent.cache.records import Hit, Ids, Selection, Vector
from precedent.cache.store import CompletionStore
from precedent.errors import CacheError
from precedent.runtime.process import Lock, computing


class Similarity(Protocol):
    """Nearest neighbours within one partition. The store decides: a completion that it no longer has is no hit."""

    def search(self, vector: Vector, tenant: str, tokenizer: str, k: int) -> list[Hit]:
        """At most `k` hits of this tenant and tokenizer, nearest first; `vector` is `[dimension]`, of length 1."""

    def forget(self, selection: Selection) -> None:
        """Erase what the store is about to forget from everything that outlives this process."""

    def clear(self) -> None:
        """Drop what is in memory; the next search reads it again."""

    def erase_gone(self) -> None:
        """Erase what any process has forgotten or evicted, without waiting for a search. Raises CacheError."""

    def close(self) -> None:
        """Release resources; the store is still open."""


SimilarityOf = Callable[[CompletionStore], Similarity]
"""Creates the search for a store, like the function that `precedent.langchain.in_vector_store` returns."""


class VectorSource(Protocol):
    """The part of a `CompletionStore` from which the index is built."""

    def stamp(self) -> Hashable:
        """Changes whenever any process may have added or removed records; takes microseconds."""

    def epoch(self) -> int:
        """Increases whenever records are removed."""

    def gone_since(self, epoch: int) -> tuple[int, Ids | None]:
        """The current epoch and the ids removed after `epoch`; None for ids if they are not known one by one."""

    def vectors_since(self, tenant: str, tokenizer: str, after_id: int) -> tuple[Ids, Vector]:
        """Ids in increasing order, `[n]`, and their vectors, `[n, dimension]`."""


class SimilarityIndex:
    """Nearest stored completions within one partition; follows the store, even when another process writes to it.

    It holds every vector of the partitions that were searched: 1.5 KB each for 384 dimensions.
    """

    def __init__(self, source: VectorSource) -> None:
        self._source = source
        self._partitions: dict[tuple[str, str], _Partition] = {}
        self._lock = Lock()  # FAISS allows no change during a search, and releases the GIL in both

    def search(self, vector: Vector, tenant: str, tokenizer: str, k: int) -> list[Hit]:
        """At most `k` hits, nearest first, newer first among equals. `vector` is `[dimension]`, of length 1."""
        with self._lock, computing():
            partition = self._caught_up(tenant, tokenizer)
            k = min(k, len(partition.ids) - partition.num_gone)
            if partition.index is None or k < 1:
                return []
            positions, scores = partition.index.search(vector, k)
            hits = [Hit(partition.ids[at], float(score)) for at, score in zip(positions, scores, strict=True)]
        return sorted(hits, key=lambda hit: (-hit.similarity, -hit.completion_id))

    def forget(self, selection: Selection) -> None:
        """Drop all vectors from memory; the index keeps nothing else."""
        self.clear()

    def clear(self) -> None:
        """Drop all vectors from memory; the next search reads them again."""
        with self._lock:
            self._partitions.clear()

    def erase_gone(self) -> None:
        """Erase vectors of completions that any process has forgotten or evicted. Raises CacheError."""
        with self._lock, computing():
            for key in [key for key, partition in self._partitions.items() if not self._without_gone(partition)]:
                del self._partitions[key]

    def close(self) -> None:
        """Drop everything."""
        self.clear()

    def _caught_up(self, tenant: str, tokenizer: str) -> _Partition:
        key, stamp = (tenant, tokenizer), self._source.stamp()
        partition = self._partitions.get(key)
        if partition is not None and stamp == partition.stamp:
            return partition
        if partition is None or not self._without_gone(partition):
            partition = self._partitions[key] = _Partition(self._source.epoch())
        partition.append(*self._source.vectors_since(tenant, tokenizer, partition.last_id))
        partition.stamp = stamp
        return partition

    def _without_gone(self, partition: _Partition) -> bool:
        """Remove what was forgotten or evicted; False if reading the partition again is better."""
        if partition.epoch == self._source.epoch():
            return True
        partition.epoch, gone = self._source.gone_since(partition.epoch)
        if gone is None:
            return False
        places = np.flatnonzero(np.isin(np.array(partition.ids, dtype=np.int64), gone))
        if partition.index is not None and places.size:
            partition.index.erase(places)
            partition.num_gone += places.size
        return 2 * partition.num_gone <= len(partition.ids)


@dataclass(slots=True)
class _Partition:
    epoch: int
    index: ExactIndex | None = None
    ids: list[int] = field(default_factory=list)
    stamp: Hashable = None
    num_gone: int = 0
    last_id: int = 0

    def append(self, ids: Ids, vectors: Vector) -> None:
        """Add vectors. Raises CacheError for a vector without unit length."""
        if not len(ids):
            return
        lengths = np.linalg.norm(vectors, axis=1)
        if not np.allclose(lengths, 1.0, atol=1e-3):  # also catches NaN, which FAISS would store and never find
            raise CacheError("a stored vector does not have unit length; run `precedent cache verify` on the cache")
        if self.index is None:
            self.index = ExactIndex(vectors.shape[1])
        self.index.add(vectors)
        self.ids.extend(ids.tolist())
        self.last_id = max(self.last_id, int(ids.max()))


class ExactIndex:
    """FAISS `IndexFlatIP` over vectors in order of arrival: some 7 ms for 100,000 vectors of 384 dimensions.

    `search` returns positions. The caller prevents concurrent use.
    """

    def __init__(self, dimension: int) -> None:
        self._faiss: Any = importlib.import_module("faiss")
        self._index = self._faiss.IndexFlatIP(dimension)

    def add(self, vectors: Vector) -> None:
        """Append unit vectors, `[n, dimension]`."""
        self._index.add(np.ascontiguousarray(vectors))

    def search(self, vector: Vector, k: int) -> tuple[Ids, Vector]:
        """Positions and inner products of the `k` best, both `[k]`; `k` is at most the number of remaining vectors."""
        with _one_thread(self._faiss):
            scores, positions = self._index.search(vector[None, :], k)
        return positions[0], scores[0]

    def erase(self, positions: Ids) -> None:
        """Overwrite with NaN, which FAISS never returns as a neighbour; other positions stay the same."""
        size = self._index.ntotal * self._index.d
        rows = self._faiss.rev_swig_ptr(self._index.get_xb(), size).reshape(-1, self._index.d)
        rows[positions] = np.nan


@contextmanager
def _one_thread(faiss: Any) -> Iterator[None]:
    """Run FAISS on one thread, and restore the number of threads afterwards."""
    # FAISS and PyTorch may share one OpenMP runtime: without restoring the number, a search would slow PyTorch on this
    # thread for good; without setting it, two runtimes in one process (macOS) can crash.
    before = faiss.omp_get_max_threads()
    faiss.omp_set_num_threads(1)
    try:
        yield
    finally:
        faiss.omp_set_num_threads(before)
