"""One tenant's completions under one tokenizer: as rows, and as segments that are faster to read."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence

import numpy as np

from precedent.cache.snapshot.scratch import Scratch
from precedent.cache.snapshot.sealing import IndexFolder, without_gone
from precedent.cache.snapshot.segment import TOKEN, Segment, kept
from precedent.cache.snapshot.segment_files import Sealed, SegmentFiles
from precedent.cache.store.arrays import Ids
from precedent.cache.store.database import Database
from precedent.cache.store.directory import Directory, directory_of, lengths_of, payload_bytes, read_completions
from precedent.cache.store.records import StoredCompletion

logger = logging.getLogger("precedent.cache")

GROWTH = 2
"""A new segment absorbs segments that are at most this many times larger, so that a few segments hold everything."""

MAX_SEGMENTS = 12
"""Above this number, segments are merged whatever their sizes; parts not in memory are then read from rows again."""

READ_AGAIN = 3
"""How often to read segments again while another process replaces them; after that, their rows are read."""


class Partition:
    """What drafting reads at start, and writes once it has grown."""

    def __init__(self, database: Database, folder: IndexFolder, tenant: str, tokenizer: str) -> None:
        self._database, self._folder = database, folder
        self._tenant, self._tokenizer = tenant, tokenizer
        self._damaged: set[str] = set()

    @property
    def scratch(self) -> Scratch:
        """The place for the large arrays of this partition's index."""
        return Scratch(self._folder.path)

    def directory(self) -> Directory:
        """An overview of the partition's rows. Raises CacheError if the file cannot be read."""
        return directory_of(self._database, self._tenant, self._tokenizer)

    def lengths(self) -> tuple[Ids, Ids]:
        """The ids of all rows and the number of tokens of each. Raises CacheError."""
        return lengths_of(self._database, self._tenant, self._tokenizer)

    def most_tokens(self) -> int:
        """An upper bound for the partition's tokens; takes microseconds. Raises CacheError."""
        return payload_bytes(self._database, self._tenant) // TOKEN.itemsize

    def completions(self, ids: Ids) -> list[StoredCompletion]:
        """These completions as they are in the table. Raises CacheError if the file cannot be read."""
        return read_completions(self._database, self._tenant, self._tokenizer, ids)

    def segments(self, alive: Directory) -> list[Segment]:
        """The segments reduced to rows that still exist, each completion once, oldest segment first."""
        found: list[Segment] = []
        seen = np.empty(0, dtype=np.int64)
        for segment in self._whole_segments(self._files()):
            stays = alive.holds(segment.completions) & ~np.isin(segment.ids, seen)
            found.append(segment if stays.all() else kept(segment, stays))
            seen = np.concatenate([seen, found[-1].ids])
        return [segment for segment in found if segment.completions.size]

    def _whole_segments(self, files: SegmentFiles) -> list[Segment]:
        """All readable segments; reads again if another process has just replaced some of them."""
        listed = files.listed()
        for _ in range(READ_AGAIN):
            read = {sealed.name: files.read(sealed) for sealed in listed}
            before, listed = listed, files.listed()
            if listed == before:
                break
        self._damaged |= {name for name, segment in read.items() if segment is None}
        return [segment for segment in read.values() if segment is not None]

    def seal(self, in_memory: Mapping[int, int], extract: Callable[[Ids], Segment], least: int = 1) -> bool:
        """Write what no segment holds yet, if it is at least `least` tokens; returns whether anything was written.

        `in_memory` maps each completion in memory to its number of tokens; `extract` returns the segment of some ids,
        without checksums. Small segments are merged into the new one. Does nothing while another thread or process is
        writing. Raises CacheError or OSError.
        """
        if self._database.read_only:
            return False
        with self._folder.alone() as alone:
            return alone and self._seal(self._files(), in_memory, extract, least)

    def _seal(
        self, files: SegmentFiles, in_memory: Mapping[int, int], extract: Callable[[Ids], Segment], least: int
    ) -> bool:
        alive = self.directory()
        sealed = without_gone(files, alive, self._damaged)
        held = [files.completions(one)["id"] for one in sealed]
        wanted = np.intersect1d(np.fromiter(in_memory, dtype=np.int64), alive.ids, assume_unique=True)
        new = np.setdiff1d(wanted, np.concatenate([*held, np.empty(0, dtype=np.int64)]))
        size = sum(in_memory[key] for key in new.tolist())
        if not new.size or size < least:
            return False
        merged = _to_merge(sealed, held, wanted, size)
        ids = np.concatenate([new, *(np.intersect1d(held[place], wanted) for place in merged)])
        segment = extract(np.unique(ids))
        segment.completions["checksum"] = alive.checksums_of(segment.ids)
        stay = [one for place, one in enumerate(sealed) if place not in merged]
        files.publish([*stay, files.write(segment)])
        files.erase_unlisted()
        return True

    def _files(self) -> SegmentFiles:
        return self._folder.files(self._tenant, self._tokenizer)


def _to_merge(sealed: Sequence[Sealed], held: Sequence[Ids], in_memory: Ids, size: int) -> set[int]:
    """Which segments to merge with `size` new tokens: from the smallest on, while they are not much larger.

    A segment with completions that are not in this process's memory stays, unless there are too many segments.
    """
    merged: set[int] = set()
    for place in sorted(range(len(sealed)), key=lambda place: sealed[place].tokens):
        crowded = len(sealed) - len(merged) >= MAX_SEGMENTS
        if sealed[place].tokens > GROWTH * size and not crowded:
            break
        if crowded or np.isin(held[place], in_memory).all():
            merged.add(place)
            size += sealed[place].tokens
    return merged
