"""Tensors of a GGUF file, read from the mapped file in bands: block formats of 3 to 8 bits, and plain numbers.

Blocks are unpacked as ggml defines them (https://github.com/ggml-org/ggml/blob/master/src/ggml-quants.c).
"""

from __future__ import annotations

import mmap
from collections.abc import Callable
from dataclasses import dataclass, replace
from math import prod
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from precedent.errors import ModelLoadError
from precedent.target.load.gguf_header import KINDS, TensorEntry
from precedent.target.quantised import (
    BAND,
    Band,
    Bits,
    Factors,
    Layout,
    PackedCodes,
    QuantisedWeight,
    Rows,
    dequantised_rows,
    fields_of,
)

Blocks = NDArray[np.uint8]
"""Bytes of blocks, `[rows, blocks, bytes of a block]`."""

CODEBOOK = (-127, -104, -83, -65, -49, -35, -22, -10, 1, 13, 25, 38, 53, 69, 89, 113)
"""Levels of IQ4_NL and IQ4_XS."""

E2M1 = (0, 1, 2, 3, 4, 6, 8, 12, 0, -1, -2, -3, -4, -6, -8, -12)
"""Levels of MXFP4, doubled so that they are integers."""

NOT_A_NUMBER = 255
"""The exponent that stands for NaN in MXFP4."""


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


@dataclass(frozen=True, slots=True)
class Scales:
    """What the codes of some blocks are multiplied by.

    `scales` and `minima` are `[rows, blocks, 1]`, or super-scales for the integer `steps [rows, blocks, groups]`.
    """

    scales: NDArray[Any]
    minima: NDArray[np.float16] | None = None
    steps: NDArray[Any] | None = None
    minimum_steps: NDArray[np.uint8] | None = None


def _numbers(blocks: Blocks, place: int) -> NDArray[np.float16]:
    """One float16 of each block, `[rows, blocks, 1]`."""
    return blocks[..., place : place + 2].copy().view("<f2")


def _scale(blocks: Blocks) -> Scales:
    return Scales(_numbers(blocks, 0))


def _scale_and_minimum(blocks: Blocks) -> Scales:
    return Scales(_numbers(blocks, 0), _numbers(blocks, 2))


def _power_of_two(blocks: Blocks) -> Scales:
    """Half of two to the power of a byte, minus its bias of 127."""
    exponents = blocks[..., :1].astype(np.int32)
    scales = np.ldexp(np.float32(1), exponents - 128)
    return Scales(np.where(exponents == NOT_A_NUMBER, np.float32("nan"), scales))


def _k_steps(blocks: Blocks) -> Scales:
    """Eight scales and eight minima of six bits in twelve bytes: four of each whole, four in pieces."""
    scales, minima, low = blocks[..., 4:8], blocks[..., 8:12], blocks[..., 12:16]
    return Scales(
        _numbers(blocks, 0), _numbers(blocks, 2),
        np.concatenate([scales & 63, low & 15 | scales >> 2 & 48], -1),
        np.concatenate([minima & 63, low >> 4 | minima >> 2 & 48], -1),
    )  # fmt: skip


def _q6_k_steps(blocks: Blocks) -> Scales:
    return Scales(_numbers(blocks, 208), steps=blocks[..., 192:208].view(np.int8))


def _q3_k_steps(blocks: Blocks) -> Scales:
    """Scales of six bits."""
    steps = fields_of(blocks[..., 96:104], 4, 8) | fields_of(blocks[..., 104:108], 2, 4) << np.uint8(4)
    return Scales(_numbers(blocks, 108), steps=(steps - np.uint8(32)).view(np.int8))


def _iq4_xs_steps(blocks: Blocks) -> Scales:
    high = fields_of(blocks[..., 2:4], 2, 1) << np.uint8(4)
    steps = (fields_of(blocks[..., 4:8], 4, 1) | high) - np.uint8(32)
    return Scales(_numbers(blocks, 0), steps=steps.view(np.int8))


class Format(NamedTuple):
    """A type of blocks: how numbers follow from codes, where scales and codes are, and what is added to codes."""

    layout: Layout
    scales: Callable[[Blocks], Scales]
    bits: tuple[Bits, ...]
    added: int = 0


FORMATS = {
    "Q4_0": Format(Layout(4, 32, offset=8), _scale, (Bits(2, 4, 16),)),
    "Q4_1": Format(Layout(4, 32, minima=True), _scale_and_minimum, (Bits(4, 4, 16),)),
    "Q5_0": Format(Layout(5, 32, offset=16), _scale, (Bits(6, 4, 16), Bits(2, 1, 1, 4))),
    "Q5_1": Format(Layout(5, 32, minima=True), _scale_and_minimum, (Bits(8, 4, 16), Bits(4, 1, 1, 4))),
    "Q8_0": Format(Layout(8, 32, offset=128), _scale, (Bits(2, 8, 32),), 128),  # signed bytes
    "IQ4_NL": Format(Layout(4, 32, table=CODEBOOK), _scale, (Bits(2, 4, 16),)),
    "MXFP4": Format(Layout(4, 32, table=E2M1, scale_dtype="bfloat16"), _power_of_two, (Bits(1, 4, 16),)),
    "Q4_K": Format(Layout(4, 32, minima=True, scale_dtype="float32", factors=True), _k_steps, (Bits(16, 4, 32),)),
    "Q5_K": Format(
        Layout(5, 32, minima=True, scale_dtype="float32", factors=True), _k_steps, (Bits(48, 4, 32), Bits(16, 1, 32, 4))
    ),
    "Q6_K": Format(
        Layout(6, 16, offset=32, scale_dtype="float32", factors=True),
        _q6_k_steps,
        (Bits(0, 4, 64), Bits(128, 2, 32, 4)),
    ),
    "Q3_K": Format(  # levels from -4 to 3, as codes of Q6_K's layout, which holds them exactly
        Layout(6, 16, offset=32, scale_dtype="float32", factors=True),
        _q3_k_steps,
        (Bits(32, 2, 32), Bits(0, 1, 32, 2)),
        28,
    ),
    "IQ4_XS": Format(
        Layout(4, 32, table=CODEBOOK, scale_dtype="float32", factors=True), _iq4_xs_steps, (Bits(8, 4, 16),)
    ),
}
"""Types of blocks that are run as they are."""


class GgufWeight(QuantisedWeight):
    """A matrix in blocks. `row_order` are the rows of the file that are the model's outputs, where their order differs.

    A copy is the weight itself: nothing changes it.
    """

    def __init__(self, file: MappedFile, entry: TensorEntry, row_order: NDArray[np.int64] | None = None) -> None:
        self.name, self.kind, self.row_order = entry.name, entry.kind, row_order
        self.out_features, self.in_features = entry.shape
        self.layout = FORMATS[entry.kind].layout
        self._file, self._entry = file, entry

    @property
    def nbytes(self) -> int:
        """Bytes in the file."""
        return self._entry.nbytes

    @property
    def stored(self) -> Blocks:
        """The blocks, `[outputs, bytes of a row]`, in the file's order."""
        start = self._entry.start
        return self._file.content[start : start + self.nbytes].reshape(self.out_features, -1)

    def release(self) -> None:
        """Drop the file's pages from memory."""
        self._file.release(self._entry.start, self._entry.start + self.nbytes)

    def rows(self, which: Rows) -> Band:
        """The codes of some outputs, with scales and minima."""
        blocks = self.stored[which if self.row_order is None else self.row_order[which]]
        count, (size, nbytes), kind = len(blocks), SIZES[self.kind], FORMATS[self.kind]
        blocks = blocks.reshape(count, -1, nbytes)
        found, codes = kind.scales(blocks), PackedCodes(blocks, size, kind.bits, kind.added)
        minima = found.minima
        if not (np.isfinite(found.scales).all() and (minima is None or np.isfinite(minima).all())):
            raise ModelLoadError(
                f"the tensor {self.name} in {self._file.path} has a scale that is not a finite number: the file is "
                "damaged, copy or download it again"
            )
        if found.steps is None:
            lows = None if minima is None else minima.reshape(count, -1).astype(np.float32)
            return Band(codes, found.scales.reshape(count, -1).astype(np.float32), lows)
        scales = (found.scales.astype(np.float32) * found.steps).reshape(count, -1)
        factors = Factors(found.scales.reshape(count, -1), found.steps.reshape(count, -1))
        if minima is None or found.minimum_steps is None:
            return Band(codes, scales, None, factors)
        lows = (-minima.astype(np.float32) * found.minimum_steps).reshape(count, -1)
        steps = found.minimum_steps.reshape(count, -1)
        return Band(codes, scales, lows, replace(factors, super_minima=minima.reshape(count, -1), minimum_steps=steps))


SIZES = {name: (weights, size) for name, weights, size in KINDS.values()}
"""Weights and bytes of a block."""


PLAIN = {"F32": "<f4", "F16": "<f2", "BF16": "<u2", "F64": "<f8"}
"""Types of numbers as they are; bfloat16 is the upper half of a float32."""


def numbers_in(file: MappedFile, entry: TensorEntry, which: Rows) -> NDArray[np.float32]:
    """Rows of a tensor of any type as float32, `[rows, width]`; a row is its last dimension.

    Raises ModelLoadError, naming the tensor, for types that nothing here reads.
    """
    matrix = replace(entry, shape=(prod(entry.shape[:-1]), entry.shape[-1]))
    if entry.kind in FORMATS:
        return dequantised_rows(GgufWeight(file, matrix), which)
    rows = file.content[entry.start : entry.start + entry.nbytes].reshape(matrix.shape[0], -1)[which]
    found = _plain_numbers(rows, entry.kind) if entry.kind in PLAIN else _by_ggml(file, entry, rows)
    if not np.isfinite(found).all():
        raise ModelLoadError(
            f"the tensor {entry.name} in {file.path} has numbers that are not finite: the file is damaged, copy or "
            "download it again"
        )
    return found


def _plain_numbers(rows: Blocks, kind: str) -> NDArray[np.float32]:
    found = np.ascontiguousarray(rows).view(PLAIN[kind])
    if kind == "BF16":
        found = (found.astype(np.uint32) << np.uint32(16)).view(np.float32)
    return found.astype(np.float32)


def _by_ggml(file: MappedFile, entry: TensorEntry, rows: Blocks) -> NDArray[np.float32]:
    import gguf

    try:
        with np.errstate(all="ignore"):
            found: NDArray[np.float32] = gguf.quants.dequantize(rows, gguf.GGMLQuantizationType[entry.kind])
    except NotImplementedError as error:
        raise ModelLoadError(
            f"the tensor {entry.name} in {file.path} has the type {entry.kind}, which cannot be read: get the model in "
            "another type, such as Q4_K_M or Q8_0"
        ) from error
    return found


def dense(
    file: MappedFile, entry: TensorEntry, dtype: torch.dtype, device: torch.device, order: NDArray[np.int64] | None
) -> Tensor:
    """A tensor of any type as ordinary numbers on a device, a band of rows at a time; `order` as in `GgufWeight`."""
    rows = prod(entry.shape[:-1])
    found = torch.empty((rows, entry.shape[-1]), dtype=dtype, device=device)
    for first in range(0, rows, BAND):
        which: Rows = slice(first, first + BAND)
        band = numbers_in(file, entry, which if order is None else order[which])
        found[which] = torch.from_numpy(band).to(device, dtype)
    file.release(entry.start, entry.start + entry.nbytes)
    return found.view(entry.shape)
