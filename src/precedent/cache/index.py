"""Exact nearest neighbours by cosine. An index holds nothing of its own: it is rebuilt from the store at any time.

One flat index per (tenant, tokenizer): a search cannot meet another tenant's vectors, because they are not in there.
"""

from __future__ import annotations

import importlib
import threading
from collections.abc import Hashable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from precedent.cache.records import Hit, Selection, Vector
from precedent.errors import CacheError

Ids = NDArray[np.int64]


class FlatIndex(Protocol):
    """Vectors in order of arrival; `search` gives positions. The caller excludes concurrent use."""

    def add(self, vectors: Vector) -> None:
        """Append unit vectors, `[n, dimension]`."""

    def search(self, vector: Vector, k: int) -> tuple[Ids, Vector]:
        """Positions and inner products of the `k` best, both `[k]`; `k` is at most the number of vectors."""


class NumpyFlatIndex:
    """The reference: one matrix product."""

    def __init__(self, dimension: int) -> None:
        self._rows = np.empty((16, dimension), dtype=np.float32)
        self._length = 0

    def add(self, vectors: Vector) -> None:
        """Append unit vectors, `[n, dimension]`."""
        needed = self._length + len(vectors)
        if needed > len(self._rows):
            grown = np.empty((max(needed, 2 * len(self._rows)), self._rows.shape[1]), dtype=np.float32)
            grown[: self._length] = self._rows[: self._length]
            self._rows = grown
        self._rows[self._length : needed] = vectors
        self._length = needed

    def search(self, vector: Vector, k: int) -> tuple[Ids, Vector]:
        """Positions and inner products of the `k` best."""
        scores = self._rows[: self._length] @ vector
        best = np.argpartition(-scores, k - 1)[:k]
        return best.astype(np.int64), scores[best]


class FaissFlatIndex:
    """FAISS `IndexFlatIP`: exact, and about 0.3 ms for 10,000 vectors of 384 dimensions."""

    def __init__(self, dimension: int) -> None:
        self._faiss: Any = importlib.import_module("faiss")
        self._index = self._faiss.IndexFlatIP(dimension)

    def add(self, vectors: Vector) -> None:
        """Append unit vectors, `[n, dimension]`."""
        self._index.add(np.ascontiguousarray(vectors))

    def search(self, vector: Vector, k: int) -> tuple[Ids, Vector]:
        """Positions and inner products of the `k` best."""
        with _one_thread(self._faiss):
            scores, positions = self._index.search(vector[None, :], k)
        return positions[0], scores[0]


@contextmanager
def _one_thread(faiss: Any) -> Iterator[None]:
    # FAISS and PyTorch may share one OpenMP runtime: without restoring the number, a search would slow this thread's
    # PyTorch for good; without setting it, two runtimes in one process (macOS) can crash.
    before = faiss.omp_get_max_threads()
    faiss.omp_set_num_threads(1)
    try:
        yield
    finally:
        faiss.omp_set_num_threads(before)


def new_flat_index(dimension: int) -> FlatIndex:
    """FAISS where it is installed, else the exact NumPy index (same results, slower beyond some 10,000 vectors)."""
    try:
        return FaissFlatIndex(dimension)
    except ImportError:
        return NumpyFlatIndex(dimension)


class VectorSource(Protocol):
    """What the index is built from; `precedent.cache.store` implements it."""

    def stamp(self) -> Hashable:
        """Changes whenever records may have come or gone, in whatever process; costs microseconds."""

    def epoch(self) -> int:
        """Grows whenever records have gone."""

    def vectors_since(self, tenant: str, tokenizer: str, after_id: int) -> tuple[Ids, Vector]:
        """Ids in rising order, `[n]`, and their vectors, `[n, dimension]`."""


@dataclass(slots=True)
class _Partition:
    index: FlatIndex | None = None
    ids: list[int] = field(default_factory=list)
    stamp: Hashable = None
    epoch: int = -1


class SimilarityIndex:
    """Nearest stored completions within one partition; follows the store, also when another process writes to it."""

    def __init__(self, source: VectorSource) -> None:
        self._source = source
        self._partitions: dict[tuple[str, str], _Partition] = {}
        self._lock = threading.Lock()  # FAISS allows no change during a search, and releases the GIL in both

    def search(self, vector: Vector, tenant: str, tokenizer: str, k: int) -> list[Hit]:
        """At most `k` hits, the nearest first and of equals the newer first. `vector` is `[dimension]`, of length 1."""
        with self._lock:
            partition = self._caught_up(tenant, tokenizer)
            if partition.index is None or k < 1:
                return []
            positions, scores = partition.index.search(vector, min(k, len(partition.ids)))
            hits = [Hit(partition.ids[at], float(score)) for at, score in zip(positions, scores, strict=True)]
        return sorted(hits, key=lambda hit: (-hit.similarity, -hit.completion_id))

    def forget(self, selection: Selection) -> None:
        """Drop all vectors from memory: nothing else is kept."""
        self.clear()

    def clear(self) -> None:
        """Drop all vectors from memory; the next search reads them again."""
        with self._lock:
            self._partitions.clear()

    def _caught_up(self, tenant: str, tokenizer: str) -> _Partition:
        key = (tenant, tokenizer)
        partition = self._partitions.setdefault(key, _Partition())
        stamp = self._source.stamp()
        if stamp != partition.stamp:
            epoch = self._source.epoch()
            if epoch != partition.epoch:  # something was forgotten or evicted: read the partition anew
                partition = self._partitions[key] = _Partition(epoch=epoch)
            self._append(partition, *self._source.vectors_since(tenant, tokenizer, (partition.ids or [0])[-1]))
            partition.stamp = stamp
        return partition

    @staticmethod
    def _append(partition: _Partition, ids: Ids, vectors: Vector) -> None:
        if not len(ids):
            return
        lengths = np.linalg.norm(vectors, axis=1)
        if not np.allclose(lengths, 1.0, atol=1e-3):  # NaN is not close either; FAISS would take it and never find it
            raise CacheError("a stored vector has no unit length; `precedent cache forget` the cache and warm it again")
        if partition.index is None:
            partition.index = new_flat_index(vectors.shape[1])
        partition.index.add(vectors)
        partition.ids.extend(ids.tolist())
