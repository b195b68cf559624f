"""Vectors on disk, grouped by their nearest centres, so that they need not be read and grouped again at every start."""

from __future__ import annotations

import logging
from typing import ClassVar, NamedTuple

import numpy as np
from numpy.typing import NDArray

from precedent.cache.snapshot.segment_files import ArrayFiles, Sealed
from precedent.cache.store.arrays import Mask
from precedent.cache.store.directory import Directory
from precedent.cache.store.records import Vector

logger = logging.getLogger("precedent.cache")

ENTRY = np.dtype([("id", "<i8"), ("checksum", "<u8"), ("group", "<i4")])
"""A vector: its completion's id, the vector's checksum in the row, and the number of its centre."""

HALF = np.dtype("<f2")


class GroupedVectors(NamedTuple):
    """Unit vectors `[n, dimension]` in half precision, grouped by `centres` `[c, dimension]`; `entries` `[n]`."""

    entries: NDArray[np.void]
    vectors: NDArray[np.float16]
    centres: Vector

    def kept(self, stays: Mask) -> GroupedVectors:
        """The vectors for which `stays` is true."""
        return GroupedVectors(self.entries[stays], self.vectors[stays], self.centres)


class VectorFiles(ArrayFiles):
    """The sealed vectors of one partition: one set of arrays."""

    parts: ClassVar = {"entries": ENTRY, "vectors": HALF, "centres": np.dtype("<f4")}

    def read(self, dimension: int) -> GroupedVectors | None:
        """The vectors in memory; None unless there are some of that dimension, exactly as they were sealed."""
        listed = self.listed()
        try:
            return None if not listed else self._read(listed[-1], dimension)
        except (OSError, ValueError) as error:
            logger.info("the vectors in %s are grouped again: %s", self.folder, error)
            return None

    def _read(self, sealed: Sealed, dimension: int) -> GroupedVectors:
        arrays = self.read_arrays(sealed)
        entries, vectors, centres = arrays["entries"], arrays["vectors"], arrays["centres"]
        if vectors.size != entries.size * dimension or centres.size % dimension or not centres.size:
            raise ValueError(f"they do not have {dimension} dimensions")
        groups = entries["group"]
        if groups.size and not 0 <= groups.min() <= groups.max() < centres.size // dimension:
            raise ValueError("they name centres that do not exist")
        return GroupedVectors(entries, vectors.reshape(-1, dimension), centres.reshape(-1, dimension))

    def replace(self, grouped: GroupedVectors) -> None:
        """Make exactly these vectors valid and erase the previous ones. Call it with the lock held."""
        self.publish([self._write(grouped)])
        self.erase_unlisted()

    def _write(self, grouped: GroupedVectors) -> Sealed:
        arrays = {name: array.reshape(-1) for name, array in grouped._asdict().items()}
        return self.write_arrays(arrays, grouped.entries.size, grouped.vectors.size)

    def held_by(self, alive: Directory, sealed: Sealed) -> Mask:
        """For each vector, whether its row still exists with the same vector."""
        return alive.holds_vectors(self.completions(sealed))

    def without_gone(self, sealed: Sealed, stays: Mask) -> Sealed | None:
        """Write the vectors that stay; None if the set cannot be read."""
        grouped = self.read_set(sealed)
        return None if grouped is None else self._write(grouped.kept(stays))

    def read_set(self, sealed: Sealed) -> GroupedVectors | None:
        """The vectors of a set, of any dimension; None unless they are exactly what was sealed."""
        try:
            return self._read(sealed, max(1, sealed.tokens // max(1, sealed.completions)))
        except (OSError, ValueError):
            return None
