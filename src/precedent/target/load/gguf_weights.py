"""Tensors of a GGUF file, dequantised from the mapped file in bands of rows by the package gguf."""

from __future__ import annotations

import mmap
from dataclasses import replace
from math import prod
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from precedent.errors import ModelLoadError
from precedent.target.load.gguf_header import TensorEntry
from precedent.target.quantised import BAND, QuantisedWeight, Rows

PLAIN = {"F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16, "F64": torch.float64}
"""Types of numbers as they are."""


class MappedFile:
    """A file's bytes, mapped read-only: `content` is read from the disk when it is used."""

    def __init__(self, path: Path) -> None:
        self.path = path
        try:
            with path.open("rb") as opened:
                self._map = mmap.mmap(opened.fileno(), 0, access=mmap.ACCESS_READ)
        except OSError as error:
            raise ModelLoadError(f"cannot map {path}: {error.strerror or error}") from error
        self.content = np.frombuffer(self._map, np.uint8)

    def release(self, start: int, end: int) -> None:
        """Drop the pages that lie between two bytes from memory; they are read again when they are used."""
        first, last = -(-start // mmap.PAGESIZE) * mmap.PAGESIZE, end // mmap.PAGESIZE * mmap.PAGESIZE
        if last > first and hasattr(mmap, "MADV_DONTNEED"):
            self._map.madvise(mmap.MADV_DONTNEED, first, last - first)


class GgufWeight(QuantisedWeight):
    """A tensor of any type as a matrix `[outputs, inputs]`, whose inputs are its last dimension.

    `row_order` are the rows of the file that are the model's outputs, where their order differs.
    """

    def __init__(self, file: MappedFile, entry: TensorEntry, row_order: NDArray[np.int64] | None = None) -> None:
        self.name, self.kind, self.file, self.entry, self.row_order = entry.name, entry.kind, file, entry, row_order
        self.out_features, self.in_features = prod(entry.shape[:-1]), entry.shape[-1]

    @property
    def nbytes(self) -> int:
        """Bytes in the file."""
        return self.entry.nbytes

    @property
    def stored(self) -> NDArray[np.uint8]:
        """The bytes of all rows, `[outputs, bytes of a row]`, in the file's order."""
        start = self.entry.start
        return self.file.content[start : start + self.nbytes].reshape(self.out_features, -1)

    def bytes_of(self, which: Rows) -> NDArray[np.uint8]:
        """The bytes of some outputs."""
        return self.stored[which if self.row_order is None else self.row_order[which]]

    def release(self) -> None:
        """Drop the file's pages from memory."""
        self.file.release(self.entry.start, self.entry.start + self.nbytes)

    def experts(self) -> list[GgufWeight]:
        """The matrices of a tensor of three dimensions."""
        count, *shape = self.entry.shape
        size = self.nbytes // count
        places = range(self.entry.start, self.entry.start + self.nbytes, size)
        return [
            GgufWeight(self.file, replace(self.entry, shape=tuple(shape), start=start, nbytes=size)) for start in places
        ]

    def dequantised(self, which: Rows) -> NDArray[np.float32]:
        """Some rows as numbers. Raises ModelLoadError, naming the tensor, for types that nothing reads, and for NaN."""
        import gguf

        where, rows = f"the tensor {self.name} in {self.file.path}", self.bytes_of(which)
        try:
            with np.errstate(all="ignore"):
                numbers: NDArray[Any] = (
                    rows.view("<f8")
                    if self.kind == "F64"
                    else gguf.quants.dequantize(rows, gguf.GGMLQuantizationType[self.kind])
                )
                found = np.require(numbers, np.float32, "W")  # of F32 it is the mapped file itself
        except NotImplementedError as error:
            raise ModelLoadError(
                f"{where} has the type {self.kind}, which cannot be read: get the model in another type, such as "
                "Q4_K_M or Q8_0"
            ) from error
        if not np.isfinite(found).all():
            raise ModelLoadError(
                f"{where} has numbers that are not finite: the file is damaged, copy or download it again"
            )
        return found

    def dense(self, dtype: torch.dtype, device: torch.device) -> Tensor:
        """The tensor as ordinary numbers on a device, a band of rows at a time."""
        found = torch.empty(self.shape, dtype=dtype, device=device)
        for first in range(0, self.out_features, BAND):
            which = slice(first, first + BAND)
            found[which] = torch.from_numpy(self.dequantised(which)).to(device, dtype)
        self.release()
        return found.view(self.entry.shape)
