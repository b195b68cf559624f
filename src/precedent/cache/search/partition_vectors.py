"""One tenant's vectors under one tokenizer: as rows, and as sealed groups that are faster to read."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import numpy as np

from precedent.cache.search.grouped_index import assigned, group, num_groups, worth_grouping
from precedent.cache.snapshot.sealing import IndexFolder
from precedent.cache.snapshot.vector_files import GroupedVectors
from precedent.cache.store import rows
from precedent.cache.store.arrays import Ids
from precedent.cache.store.database import Database
from precedent.cache.store.directory import Directory, read_by_ids, vector_directory_of
from precedent.cache.store.records import Vector

UNSEALED_SHARE = 16
"""Ungrouped vectors are sealed once there is one for this many grouped ones."""

OUTGROWN = 4
"""Centres are placed again once this many times as many are needed."""

PAGE = 2000


class PartitionVectors:
    """What similarity search reads at start, and groups in the background when there are many vectors.

    `folder` is None for a database in memory, where the searching index alone holds the groups.
    """

    def __init__(self, database: Database, folder: IndexFolder | None, tenant: str, tokenizer: str) -> None:
        self._database, self._folder = database, folder
        self._tenant, self._tokenizer = tenant, tokenizer
        self._seen: tuple[tuple[int, int], Directory] | None = None

    def ids(self) -> Ids:
        """All completions with a vector, in increasing order. Raises CacheError if the file cannot be read."""
        directory = self._directory()
        return np.asarray(directory.ids[directory.vector_checksums != 0])

    def pages(self, ids: Ids) -> Iterator[tuple[Ids, Vector]]:
        """The vectors of these completions, a few thousand at a time, without damaged or removed ones."""
        for begin in range(0, ids.size, PAGE):
            yield self._page(ids[begin : begin + PAGE])

    def _page(self, ids: Ids) -> tuple[Ids, Vector]:
        keys = (self._tenant, self._tokenizer)
        found = read_by_ids(self._database, "id, vector, vector_checksum", ids, "tenant = ? AND tokenizer = ?", keys)
        with self._database.read() as connection:
            dimension = rows.dimension_of(connection)
        read = ((row_id, rows.vector_of(vector, checksum, dimension)) for row_id, vector, checksum in found)
        whole = [(row_id, vector) for row_id, vector in read if vector is not None]
        numbers = np.array([row_id for row_id, _ in whole], dtype=np.int64)
        return numbers, np.array([vector for _, vector in whole], dtype=np.float32)

    def sealed(self, dimension: int) -> GroupedVectors | None:
        """The sealed vectors whose rows still exist; None if nothing is sealed."""
        if self._folder is None:
            return None
        grouped = self._folder.vector_files(self._tenant, self._tokenizer).read(dimension)
        return None if grouped is None else self._alive(grouped)

    def _alive(self, grouped: GroupedVectors) -> GroupedVectors:
        return grouped.kept(self._directory().holds_vectors(grouped.entries))

    def _directory(self) -> Directory:
        """The partition's rows, read again only after a write."""
        stamp = self._database.stamp()
        if self._seen is None or self._seen[0] != stamp:
            self._seen = stamp, vector_directory_of(self._database, self._tenant, self._tokenizer)
        return self._seen[1]

    def regrouped(self, dimension: int, stopped: Callable[[], bool]) -> GroupedVectors | None:
        """Group all vectors, or only the new ones, and seal them; None if there was nothing to do."""
        ids, sealed = self.ids(), self.sealed(dimension)
        if not worth_grouping(ids.size):
            return None
        if sealed is None or num_groups(ids.size) >= OUTGROWN * len(sealed.centres):
            grouped = group(ids, self.pages, stopped)
        else:
            grouped = self._joined(sealed, np.setdiff1d(ids, sealed.entries["id"]), stopped)
        return None if grouped is None else self._seal(grouped)

    def _joined(self, sealed: GroupedVectors, new: Ids, stopped: Callable[[], bool]) -> GroupedVectors | None:
        if new.size * UNSEALED_SHARE < sealed.entries.size:
            return None
        more = assigned(sealed.centres, self.pages(new), stopped)
        if more is None:
            return None
        entries = np.concatenate([sealed.entries, more.entries])
        return GroupedVectors(entries, np.concatenate([sealed.vectors, more.vectors]), sealed.centres)

    def _seal(self, grouped: GroupedVectors) -> GroupedVectors:
        """Write the vectors still in the table, if there are files and no other process is writing."""
        if self._folder is None or self._database.read_only:
            return self._marked(grouped)
        with self._folder.alone() as alone:
            marked = self._marked(grouped)  # reads with the lock held, so no `forget` comes before the write
            if alone:
                self._folder.vector_files(self._tenant, self._tokenizer).replace(marked)
            return marked

    def _marked(self, grouped: GroupedVectors) -> GroupedVectors:
        """Add the checksums of the rows, and drop the vectors whose rows are gone."""
        alive = vector_directory_of(self._database, self._tenant, self._tokenizer)
        grouped.entries["checksum"] = alive.vector_checksums_of(grouped.entries["id"])
        return grouped.kept(grouped.entries["checksum"] != 0)
