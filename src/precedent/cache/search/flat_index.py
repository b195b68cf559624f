"""Exact nearest neighbours by cosine, over every vector."""

from __future__ import annotations

import importlib
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, Protocol

import numpy as np

from precedent.cache.store.arrays import Ids
from precedent.cache.store.records import Vector


class VectorIndex(Protocol):
    """Vectors in order of arrival; `search` returns positions. The caller prevents concurrent use."""

    def add(self, vectors: Vector) -> None:
        """Append unit vectors, `[n, dimension]`."""

    def search(self, vector: Vector, k: int) -> tuple[Ids, Vector]:
        """Positions and inner products of the `k` best, both `[k]`; `k` is at most the number of remaining vectors."""

    def erase(self, positions: Ids) -> None:
        """Never find these again; other positions stay the same."""


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
        best = np.argpartition(-scores, k - 1)[:k]  # NaN sorts last
        return best.astype(np.int64), scores[best]

    def erase(self, positions: Ids) -> None:
        """Overwrite with NaN, which is nearest to nothing."""
        self._rows[positions] = np.nan


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
        with one_thread(self._faiss):
            scores, positions = self._index.search(vector[None, :], k)
        return positions[0], scores[0]

    def erase(self, positions: Ids) -> None:
        """Overwrite with NaN, which FAISS never returns as a neighbour."""
        size = self._index.ntotal * self._index.d
        rows = self._faiss.rev_swig_ptr(self._index.get_xb(), size).reshape(-1, self._index.d)
        rows[positions] = np.nan


@contextmanager
def one_thread(faiss: Any) -> Iterator[None]:
    """Run FAISS on one thread, and restore the number of threads afterwards."""
    # FAISS and PyTorch may share one OpenMP runtime: without restoring the number, a search would slow PyTorch on this
    # thread for good; without setting it, two runtimes in one process (macOS) can crash.
    before = faiss.omp_get_max_threads()
    faiss.omp_set_num_threads(1)
    try:
        yield
    finally:
        faiss.omp_set_num_threads(before)


def new_flat_index(dimension: int) -> VectorIndex:
    """FAISS if it is installed, else the exact NumPy index (same results, slower beyond some 10,000 vectors)."""
    try:
        return FaissFlatIndex(dimension)
    except ImportError:
        return NumpyFlatIndex(dimension)
