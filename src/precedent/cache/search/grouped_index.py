"""Nearest neighbours among many vectors: groups them by centres, and searches only the nearest groups.

Exact search reads every vector, 1.5 KB each; beyond some ten thousand vectors that takes longer than a decoding step.
Here a search reads `GROUPS_READ` groups. It may miss a neighbour at the edge of another group, which affects a weight
in drafting but never a token of the answer.
"""

from __future__ import annotations

import importlib
import importlib.util
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np

from precedent.cache.search.flat_index import one_thread
from precedent.cache.snapshot.vector_files import ENTRY, GroupedVectors
from precedent.cache.store.arrays import Ids
from precedent.cache.store.records import Vector

GROUPED_FROM = 8192
"""Number of vectors from which grouping pays off: below, exact search takes a millisecond or two."""

GROUPS_READ = 16

GROUP_SIZE = 64
"""Vectors per group to aim at; a sample of `SAMPLED` per group places the centres in `ROUNDS` rounds."""

MAX_GROUPS = 2048
SAMPLED = 48
ROUNDS = 6


class GroupedIndex:
    """FAISS `IndexIVFScalarQuantizer` over half-precision vectors; positions count from 0 in order of the ids.

    A search reads the nearest `groups_read` groups.
    """

    def __init__(self, grouped: GroupedVectors, *, groups_read: int = GROUPS_READ) -> None:
        self._faiss: Any = importlib.import_module("faiss")
        self._index = _ivf(self._faiss, grouped.centres, groups_read)
        self._gone = np.zeros(0, dtype=bool)
        self._num_gone = 0
        self.ids: Ids = np.sort(grouped.entries["id"])
        self._fill(grouped)

    def _fill(self, grouped: GroupedVectors) -> None:
        """Put the vectors into their known groups, without searching for these again."""
        order = np.argsort(grouped.entries["group"], kind="stable")
        positions = np.searchsorted(self.ids, grouped.entries["id"][order])
        codes, swig = np.ascontiguousarray(grouped.vectors[order]).view(np.uint8), self._faiss.swig_ptr
        ends = np.searchsorted(grouped.entries["group"][order], np.arange(len(grouped.centres) + 1))
        for group, (begin, end) in enumerate(zip(ends.tolist(), ends[1:].tolist(), strict=False)):
            if end > begin:
                lists = self._index.invlists
                lists.add_entries(group, end - begin, swig(positions[begin:end]), swig(codes[begin:end]))
        self._index.ntotal = positions.size
        self._gone = np.zeros(positions.size, dtype=bool)

    def add(self, vectors: Vector) -> None:
        """Append unit vectors, `[n, dimension]`, each to its group."""
        with one_thread(self._faiss):
            self._index.add(np.ascontiguousarray(vectors))
        self._gone = np.append(self._gone, np.zeros(len(vectors), dtype=bool))

    def search(self, vector: Vector, k: int) -> tuple[Ids, Vector]:
        """Positions and inner products of at most `k` of the nearest, best first."""
        with one_thread(self._faiss):
            scores, positions = self._index.search(vector[None, :], k + min(k, self._num_gone))
        stays = (positions[0] >= 0) & ~self._gone[positions[0]]
        return positions[0][stays][:k], scores[0][stays][:k]

    def erase(self, positions: Ids) -> None:
        """Never find these again."""
        self._gone[positions] = True
        self._num_gone = int(np.count_nonzero(self._gone))


def _ivf(faiss: Any, centres: Vector, groups_read: int) -> Any:
    dimension = centres.shape[1]
    quantizer = faiss.IndexFlatIP(dimension)
    quantizer.add(np.ascontiguousarray(centres))
    kind = faiss.ScalarQuantizer.QT_fp16
    index = faiss.IndexIVFScalarQuantizer(quantizer, dimension, len(centres), kind, faiss.METRIC_INNER_PRODUCT, False)
    index.is_trained, index.nprobe = True, min(groups_read, len(centres))
    return index


def can_group() -> bool:
    """Whether FAISS is installed."""
    return importlib.util.find_spec("faiss") is not None


def worth_grouping(num_vectors: int) -> bool:
    """Whether there are so many vectors that grouped search is faster than exact search."""
    return num_vectors >= GROUPED_FROM


def num_groups(num_vectors: int) -> int:
    """The number of groups: a power of two that gives groups at least `GROUP_SIZE` vectors."""
    return int(min(MAX_GROUPS, 2 ** int(np.log2(max(2, num_vectors / GROUP_SIZE)))))


Pages = Callable[[Ids], Iterator[tuple[Ids, Vector]]]
"""The vectors of some completions, a few thousand at a time; unreadable ones are left out."""


def group(ids: Ids, pages: Pages, stopped: Callable[[], bool]) -> GroupedVectors | None:
    """Group the vectors of these completions, without checksums; None if stopped or if nothing can be read.

    Takes seconds per 100,000 vectors on one thread, and releases the GIL.
    """
    faiss = importlib.import_module("faiss")
    count = num_groups(ids.size)
    sample = np.random.default_rng(ids.size).permutation(ids)[: count * SAMPLED]
    read = [vectors for _, vectors in pages(np.sort(sample))]
    if not read or stopped():
        return None
    centres = _centres(faiss, np.concatenate(read), count, stopped)
    return None if centres is None else assigned(centres, pages(ids), stopped)


def _centres(faiss: Any, sample: Vector, count: int, stopped: Callable[[], bool]) -> Vector | None:
    """Spherical k-means, one round at a time."""
    centres: Vector | None = None
    for _ in range(ROUNDS):
        if stopped():
            return None
        means = faiss.Kmeans(sample.shape[1], min(count, len(sample)), niter=1, spherical=True, seed=1)
        means.cp.min_points_per_centroid, means.cp.max_points_per_centroid = 1, SAMPLED
        with one_thread(faiss):
            means.train(sample, init_centroids=centres)
        centres = means.centroids
    return centres


def assigned(
    centres: Vector, pages: Iterator[tuple[Ids, Vector]], stopped: Callable[[], bool]
) -> GroupedVectors | None:
    """Each vector with its nearest centre, without checksums; None if stopped or if nothing can be read."""
    faiss = importlib.import_module("faiss")
    nearest = faiss.IndexFlatIP(centres.shape[1])
    nearest.add(centres)
    entries, halves = [], []
    for ids, vectors in pages:
        if stopped():
            return None
        if not ids.size:
            continue
        with one_thread(faiss):
            groups = nearest.search(vectors, 1)[1][:, 0]
        entry = np.zeros(ids.size, ENTRY)
        entry["id"], entry["group"] = ids, groups
        entries.append(entry)
        halves.append(vectors.astype(np.float16))
    if not entries:
        return None
    return GroupedVectors(np.concatenate(entries), np.concatenate(halves), centres)
