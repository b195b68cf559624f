"""The nearest stored completions by cosine. An index can always be rebuilt from the store.

There is one index per (tenant, tokenizer), so a search cannot find another tenant's vectors. It is exact for few
vectors; many vectors are grouped in the background (`precedent.cache.search.grouped_index`).
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Hashable
from concurrent.futures import Future
from dataclasses import dataclass, field
from typing import Protocol

import numpy as np

from precedent.cache.search.flat_index import VectorIndex, new_flat_index
from precedent.cache.search.grouped_index import GroupedIndex, can_group, worth_grouping
from precedent.cache.search.partition_vectors import PartitionVectors
from precedent.cache.store.arrays import Ids
from precedent.cache.store.records import Hit, Selection, Vector
from precedent.errors import CacheError
from precedent.runtime.background import Background, ending, long_work
from precedent.runtime.process import Lock, computing

logger = logging.getLogger("precedent.cache")


class VectorSource(Protocol):
    """What the index is built from; every `CompletionStore` provides it."""

    def stamp(self) -> Hashable:
        """Changes whenever any process may have added or removed records; takes microseconds."""

    def epoch(self) -> int:
        """Increases whenever records are removed."""

    def gone_since(self, epoch: int) -> tuple[int, Ids | None]:
        """The current epoch and the ids removed after `epoch`; None for ids if they are not known one by one."""

    def vectors_since(self, tenant: str, tokenizer: str, after_id: int) -> tuple[Ids, Vector]:
        """Ids in increasing order, `[n]`, and their vectors, `[n, dimension]`."""


Shelves = Callable[[str, str], PartitionVectors]
"""Returns the vectors of a partition that can be grouped and sealed."""


@dataclass(slots=True)
class _Partition:
    epoch: int
    index: VectorIndex | None = None
    ids: list[int] = field(default_factory=list)
    stamp: Hashable = None
    num_gone: int = 0
    last_id: int = 0
    looked_at: int = 0
    """Number of vectors when grouping was last considered."""

    def append(self, ids: Ids, vectors: Vector) -> None:
        """Add vectors. Raises CacheError for a vector without unit length."""
        if not len(ids):
            return
        lengths = np.linalg.norm(vectors, axis=1)
        if not np.allclose(lengths, 1.0, atol=1e-3):  # also catches NaN, which FAISS would store and never find
            raise CacheError("a stored vector does not have unit length; run `precedent cache verify` on the cache")
        if self.index is None:
            self.index = new_flat_index(vectors.shape[1])
        self.index.add(vectors)
        self.ids.extend(ids.tolist())
        self.last_id = max(self.last_id, int(ids.max()))

    @classmethod
    def grouped(cls, epoch: int, index: GroupedIndex) -> _Partition:
        """A partition of the vectors in a newly built index."""
        ids = index.ids.tolist()
        return cls(epoch, index, ids, last_id=ids[-1] if ids else 0, looked_at=len(ids))


class SimilarityIndex:
    """Nearest stored completions within one partition; follows the store, even when another process writes to it.

    `shelves` returns a partition's vectors for grouping and sealing; without it, vectors are not grouped.
    """

    def __init__(self, source: VectorSource, shelves: Shelves | None = None) -> None:
        self._source, self._shelves = source, shelves
        self._partitions: dict[tuple[str, str], _Partition] = {}
        self._lock = Lock()  # FAISS allows no change during a search, and releases the GIL in both
        self._beside = Background(1, "precedent-grouping")
        self._grouping: Future[None] | None = None
        self._closed, self._cleared = False, 0

    def search(self, vector: Vector, tenant: str, tokenizer: str, k: int) -> list[Hit]:
        """At most `k` hits, nearest first, newer first among equals. `vector` is `[dimension]`, of length 1."""
        with self._lock, computing():
            partition = self._caught_up(tenant, tokenizer, vector.size)
            left = len(partition.ids) - partition.num_gone
            if partition.index is None or min(k, left) < 1:
                return []
            positions, scores = partition.index.search(vector, min(k, left))
            hits = [Hit(partition.ids[at], float(score)) for at, score in zip(positions, scores, strict=True)]
            self._group_if_many((tenant, tokenizer), partition, vector.size)
        return sorted(hits, key=lambda hit: (-hit.similarity, -hit.completion_id))

    def forget(self, selection: Selection) -> None:
        """Drop all vectors from memory; the index keeps nothing else."""
        self.clear()

    def clear(self) -> None:
        """Drop all vectors from memory; the next search reads them again."""
        with self._lock:
            self._partitions.clear()
            self._cleared += 1

    def erase_gone(self) -> None:
        """Erase vectors of completions that any process has forgotten or evicted. Raises CacheError."""
        with self._lock, computing():
            for key in [key for key, partition in self._partitions.items() if not self._without_gone(partition)]:
                del self._partitions[key]

    def close(self) -> None:
        """Drop everything, and wait for background work, which stops early."""
        self._closed = True
        self.clear()
        self._beside.shutdown()

    def wait(self) -> None:
        """Wait until nothing runs in the background."""
        if self._grouping is not None:
            self._grouping.exception()

    def _caught_up(self, tenant: str, tokenizer: str, dimension: int) -> _Partition:
        key = (tenant, tokenizer)
        stamp = self._source.stamp()
        partition = self._partitions.get(key)
        if partition is not None and stamp == partition.stamp:
            return partition
        if partition is None or not self._without_gone(partition):
            partition = self._partitions[key] = self._opened(tenant, tokenizer, dimension)
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

    def _opened(self, tenant: str, tokenizer: str, dimension: int) -> _Partition:
        """A partition with its sealed vectors; the others are read from rows."""
        epoch = self._source.epoch()
        if self._shelves is None or not can_group():
            return _Partition(epoch)
        shelf = self._shelves(tenant, tokenizer)
        sealed = shelf.sealed(dimension)
        if sealed is None or not sealed.entries.size:
            return _Partition(epoch)
        partition = _Partition.grouped(epoch, GroupedIndex(sealed))
        for ids, vectors in shelf.pages(np.setdiff1d(shelf.ids(), sealed.entries["id"])):
            partition.append(ids, vectors)
        return partition

    def _group_if_many(self, key: tuple[str, str], partition: _Partition, dimension: int) -> None:
        """Start grouping in the background each time a partition has grown by an eighth."""
        count = len(partition.ids)
        due = worth_grouping(count) and count > partition.looked_at + partition.looked_at // 8
        running = self._grouping is not None and not self._grouping.done()
        if not due or running or self._closed or self._shelves is None or not can_group():
            return
        partition.looked_at = count
        self._grouping = self._beside.submit(self._group, self._shelves(*key), key, dimension)
        self._grouping.add_done_callback(_report)

    @long_work()
    @computing()
    def _group(self, shelf: PartitionVectors, key: tuple[str, str], dimension: int) -> None:
        cleared = self._cleared
        try:
            epoch = self._source.epoch()  # removals from now on may be in the groups; the next search takes them out
            grouped = shelf.regrouped(dimension, self._stopped)
            if grouped is None or not grouped.entries.size or self._stopped():
                return
            fresh = _Partition.grouped(epoch, GroupedIndex(grouped))
        except (CacheError, OSError) as error:
            logger.info("vectors are searched one by one, because grouping them failed: %s", error)
            return
        with self._lock:
            if key in self._partitions and self._cleared == cleared:
                self._partitions[key] = fresh

    def _stopped(self) -> bool:
        return self._closed or ending()


def _report(grouping: Future[None]) -> None:
    error = grouping.exception()
    if error is not None and not ending():
        logger.warning("vectors are searched one by one, because grouping them failed: %r", error)
