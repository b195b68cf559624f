"""Large arrays in an unnamed file of this process, so that the system can page them out and in.

The file has no name: no other process can truncate it while it is mapped, and it disappears with the process.
"""

from __future__ import annotations

import mmap
import os
import tempfile
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

MAPPED_FROM = 128 * 2**20
"""Arrays from this size on are mapped; paging smaller ones never pays off."""


class Scratch:
    """Allocates arrays; in memory without a `folder` or without room on its disk.

    Arrays of `mapped_from` bytes or more are mapped.
    """

    def __init__(self, folder: Path | None = None, *, mapped_from: int = MAPPED_FROM) -> None:
        self._folder, self._mapped_from = folder, mapped_from

    def empty(self, size: int, dtype: type[np.generic]) -> NDArray[Any]:
        """An uninitialised array of `size` elements."""
        num_bytes = size * np.dtype(dtype).itemsize
        if self._folder is None or num_bytes < self._mapped_from:
            return np.empty(size, dtype)
        try:
            return np.frombuffer(_mapped(self._folder, num_bytes), dtype)
        except (OSError, AttributeError):  # no such folder, a full disk, a system without posix_fallocate
            return np.empty(size, dtype)

    def placed(self, array: NDArray[Any]) -> NDArray[Any]:
        """The array itself, or a mapped copy of it if it is large."""
        if self._folder is None or array.nbytes < self._mapped_from:
            return array
        copy = self.empty(array.size, array.dtype.type)
        copy[:] = array
        return copy

    def resized(self, array: NDArray[Any], size: int, filler: int) -> NDArray[Any]:
        """The array with room for `size` elements, the new ones filled with `filler`."""
        grown = self.empty(size, array.dtype.type)
        grown[: array.size] = array
        grown[array.size :] = filler
        return grown


def _mapped(folder: Path, num_bytes: int) -> mmap.mmap:
    with tempfile.TemporaryFile(prefix=".scratch-", dir=folder) as file:
        os.posix_fallocate(file.fileno(), 0, num_bytes)  # later, a page without room would kill the process
        return mmap.mmap(file.fileno(), num_bytes)
