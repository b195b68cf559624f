"""Weights of 4 to 8 bits as a file stores them: codes in groups, with the scales and minima that make them numbers.

A weight stays where it is stored (a mapped file) and is read in bands of outputs. `QuantisedLinear` and
`QuantisedEmbedding` compute with it as it is, by dequantising one band at a time; packages of the group
`precedent.models` replace them by kernels that lay the codes out for their processor (`ModelSupport.prepare`).
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray


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


@dataclass(frozen=True, slots=True)
class Band:
    """Some outputs of a weight: `codes` uint8 `[outputs, inputs]`, `scales`, `minima` `[outputs, inputs / group]`."""

    codes: NDArray[np.uint8]
    scales: NDArray[np.float32]
    minima: NDArray[np.float32] | None = None
    factors: Factors | None = None


class QuantisedWeight(ABC):
    """A weight `[out_features, in_features]` of a linear layer or an embedding, where it is stored.

    `name` is the tensor's name in its file and `kind` its type there (`Q4_K`, `AWQ`), for messages. `order` permutes
    the inputs, where codes are stored sorted by group: code `i` of a row belongs to input `order[i]`. `packed` is free
    for the package that computes with the weight: one weight may serve an embedding and the head.
    """

    name: str
    kind: str
    out_features: int
    in_features: int
    layout: Layout
    order: NDArray[np.int64] | None = None
    packed: object | None = None

    @abstractmethod
    def band(self, first: int, last: int) -> Band:
        """Outputs `first` to `last`. Raises ModelLoadError, naming the tensor, for scales that are not finite."""

    @property
    @abstractmethod
    def nbytes(self) -> int:
        """Bytes where it is stored."""

    def release(self) -> None:  # noqa: B027
        """Tell the system that the stored pages are not needed for now: a copy laid out for kernels replaces them."""


def dequantised(weight: QuantisedWeight, first: int, last: int) -> NDArray[np.float32]:
    """Outputs `first` to `last` as numbers, `[last - first, in_features]`, inputs in their natural order."""
    band, layout = weight.band(first, last), weight.layout
    if layout.table is None:
        levels = band.codes.astype(np.float32) - np.float32(layout.offset)
    else:
        levels = np.array(layout.table, np.float32)[band.codes]
    numbers = levels * np.repeat(band.scales, layout.group, axis=1)
    if band.minima is not None:
        numbers += np.repeat(band.minima, layout.group, axis=1)
    if weight.order is not None:
        numbers[:, weight.order] = numbers.copy()
    return numbers
