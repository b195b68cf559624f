"""Weights of 4 to 8 bits as kernels lay them out: codes in groups, with the scales and minima that make them numbers.

Blocks of GGUF files are unpacked as ggml defines them (https://github.com/ggml-org/ggml/blob/master/src/ggml-quants.c).
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from precedent.errors import ModelLoadError
from precedent.target.load.gguf_header import KINDS
from precedent.target.load.gguf_weights import GgufWeight
from precedent.target.quantised import QuantisedWeight, Rows


@dataclass(frozen=True, slots=True)
class Layout:
    """How the numbers of a weight follow from its codes: `level * scale + minimum`, one scale for `group` inputs.

    The level is `code - offset`, or `table[code]` where there is a `table`. `scale_dtype` is the smallest of float16,
    bfloat16 and float32 that holds every scale and minimum exactly; with `factors`, scales and minima are products of
    one float16 for 256 inputs and a small integer for each group, which float32 holds exactly and float16 does not.
    """

    bits: int
    group: int
    offset: int = 0
    minima: bool = False
    table: tuple[int, ...] | None = None
    scale_dtype: str = "float16"
    factors: bool = False


@dataclass(frozen=True, slots=True)
class Factors:
    """Scales and minima as a file stores them: `scales[i] = super_scales[i // n] * steps[i]`, the same for minima.

    `super_scales` and `super_minima` are float16 `[outputs, inputs / 256]`, `steps` int8 or uint8
    `[outputs, inputs / group]`. A minimum is `-super_minima * minimum_steps`.
    """

    super_scales: NDArray[np.float16]
    steps: NDArray[np.int8] | NDArray[np.uint8]
    super_minima: NDArray[np.float16] | None = None
    minimum_steps: NDArray[np.uint8] | None = None


class Bits(NamedTuple):
    """Where some bits of a block's codes are stored, and from which bit of a code they begin (`shift`).

    The codes take the lowest `bits` of `width` bytes from `place` on, then the next higher ones of the same bytes, and
    so on; then those of the next `width` bytes.
    """

    place: int
    bits: int
    width: int
    shift: int = 0


def fields_of(packed: NDArray[np.uint8], bits: int, width: int) -> NDArray[np.uint8]:
    """Fields of `bits` bits in `[rows, blocks, bytes]`, in the order of `Bits`: `[rows, blocks, fields]`."""
    rows, blocks, _ = packed.shape
    shifts = np.arange(0, 8, bits, dtype=np.uint8)[:, None]
    fields = packed.reshape(rows, blocks, -1, 1, width) >> shifts
    fields &= np.uint8((1 << bits) - 1)
    return fields.reshape(rows, blocks, -1)


class PackedCodes(NamedTuple):
    """Codes as they are stored: `blocks` `[outputs, blocks, bytes]` of `size` codes each, in which their `bits` are.

    `added` is added to every code, modulo 256.
    """

    blocks: NDArray[np.uint8]
    size: int
    bits: tuple[Bits, ...]
    added: int = 0

    def unpacked(self) -> NDArray[np.uint8]:
        """The codes, `[outputs, inputs]`."""
        rows, count, _ = self.blocks.shape
        codes = np.full((rows, count, self.size), self.added, np.uint8)
        for place, bits, width, shift in self.bits:
            stored = self.blocks[..., place : place + self.size * bits // 8]
            codes += fields_of(stored, bits, width) << np.uint8(shift)
        return codes.reshape(rows, -1)


@dataclass(frozen=True, slots=True)
class Band:
    """Some outputs of a weight: codes as they are stored, `scales` and `minima` `[outputs, inputs / group]`."""

    stored: PackedCodes | NDArray[np.uint8]
    scales: NDArray[np.float32]
    minima: NDArray[np.float32] | None = None
    factors: Factors | None = None

    @property
    def codes(self) -> NDArray[np.uint8]:
        """The codes, a byte each: `[outputs, inputs]`."""
        return self.stored.unpacked() if isinstance(self.stored, PackedCodes) else self.stored

    def numbers(self, layout: Layout) -> NDArray[np.float32]:
        """The numbers, `[outputs, inputs]`, in the order of the codes."""
        codes = self.codes
        if layout.table is None:
            numbers = codes.astype(np.float32)
            if layout.offset:
                numbers -= np.float32(layout.offset)
        else:
            numbers = np.array(layout.table, np.float32)[codes]
        groups = numbers.reshape(len(numbers), -1, layout.group)
        groups *= self.scales[..., None]
        if self.minima is not None:
            groups += self.minima[..., None]
        return numbers


class CodedWeight(QuantisedWeight):
    """A weight whose codes, scales and minima are read from its parts.

    `order` permutes the inputs, where codes are stored sorted by group: code `i` of a row belongs to input `order[i]`.
    """

    layout: Layout
    order: NDArray[np.int64] | None = None

    @abstractmethod
    def rows(self, which: Rows) -> Band:
        """Some outputs. Raises ModelLoadError, naming the tensor, for scales that are not finite."""

    def dequantised(self, which: Rows) -> NDArray[np.float32]:
        """Some outputs as numbers, inputs in their natural order."""
        numbers = self.rows(which).numbers(self.layout)
        if self.order is not None:
            numbers[:, self.order] = numbers.copy()
        return numbers


Blocks = NDArray[np.uint8]
"""Bytes of blocks, `[rows, blocks, bytes of a block]`."""

CODEBOOK = (-127, -104, -83, -65, -49, -35, -22, -10, 1, 13, 25, 38, 53, 69, 89, 113)
"""Levels of IQ4_NL and IQ4_XS."""

E2M1 = (0, 1, 2, 3, 4, 6, 8, 12, 0, -1, -2, -3, -4, -6, -8, -12)
"""Levels of MXFP4, doubled so that they are integers."""

NOT_A_NUMBER = 255
"""The exponent that stands for NaN in MXFP4."""


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


SIZES = {name: (weights, size) for name, weights, size in KINDS.values()}
"""Weights and bytes of a block."""


def layout_of(weight: QuantisedWeight) -> Layout | None:
    """How a weight's numbers follow from codes; None for one that has none that are read here."""
    if isinstance(weight, GgufWeight):
        return FORMATS[weight.kind].layout if weight.kind in FORMATS else None
    return weight.layout if isinstance(weight, CodedWeight) else None


def codes_of(weight: QuantisedWeight, which: Rows) -> Band:
    """Some outputs of a weight that has a layout. Raises ModelLoadError, naming the tensor, for a scale that is NaN."""
    if isinstance(weight, CodedWeight):
        return weight.rows(which)
    assert isinstance(weight, GgufWeight)
    blocks, (size, nbytes), kind = weight.bytes_of(which), SIZES[weight.kind], FORMATS[weight.kind]
    count = len(blocks)
    blocks = blocks.reshape(count, -1, nbytes)
    found, codes = kind.scales(blocks), PackedCodes(blocks, size, kind.bits, kind.added)
    minima = found.minima
    if not (np.isfinite(found.scales).all() and (minima is None or np.isfinite(minima).all())):
        raise ModelLoadError(
            f"the tensor {weight.name} in {weight.file.path} has a scale that is not a finite number: the file is "
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
