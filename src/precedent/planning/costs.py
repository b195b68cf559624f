"""What a step costs by its width: a curve that is given. `step_costs` has the one that is learned."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Mapping
from typing import Self, TypeVar

import numpy as np

from precedent.runtime.compiled import Floats, Int64s
from precedent.runtime.fence import Fault
from precedent.runtime.plain_values import is_number

WIDTHS = (1, 2, 4, 8, 12, 16, 24, 32, 48, 64, 96, 128, 192, 257)
"""Widths that are told apart, in tokens per forward (pending token included)."""

WIDEST = WIDTHS[-1]
"""Widths of a given curve; beyond, its last slope goes on."""

SHORTEST, LONGEST = 1e-3, 1e7
"""Bounds of a step's milliseconds: a clock that shows less stands still, one that shows more jumped."""


def is_time(milliseconds: float) -> bool:
    """Whether a step can have taken so long; False for 0, negative times, infinity and NaN."""
    return SHORTEST <= milliseconds <= LONGEST


def nearest_width(width: int) -> int:
    """The one of `WIDTHS` whose ratio to a width is nearest to 1."""
    above = bisect_left(WIDTHS, width)
    if above == len(WIDTHS):
        return WIDEST
    below = max(0, above - 1)
    return WIDTHS[above if width * width > WIDTHS[below] * WIDTHS[above] else below]


def along(rows: Floats, widths: Int64s, times: Floats) -> Floats:
    """Times of ascending numbers of rows, in straight lines through points; beyond, the last slope unless it falls."""
    curve = np.interp(rows, widths, times)
    if widths.size > 1 and rows[-1] > widths[-1]:
        slope = max(0.0, (times[-1] - times[-2]) / (widths[-1] - widths[-2]))
        curve += slope * np.maximum(0.0, rows - widths[-1])
    return curve


STEP_COSTS = "step costs"
"""The cost curve's name among the aids of an engine."""

Read = TypeVar("Read")


class CostCurve:
    """Milliseconds of one forward by its width in tokens. A new one is flat.

    `table` holds the milliseconds of a forward over 1, 2, ... tokens, `[WIDEST]`. `load` is how many times as long
    everything takes at present as on a quiet machine; `learns` says whether `observe` changes anything.
    """

    load = 1.0
    learns = False

    def __init__(self) -> None:
        self.table: Floats = np.ones(WIDEST)

    @classmethod
    def through(cls, milliseconds: Mapping[int, float]) -> Self:
        """The curve through given widths: straight lines between them; beyond, the last slope unless it falls."""
        curve, widths = cls(), sorted(milliseconds)
        times = np.array([milliseconds[width] for width in widths], dtype=float)
        curve.table = along(np.arange(1.0, WIDEST + 1.0), np.array(widths), times)
        return curve

    def milliseconds(self, width: int, prefix: int = 0) -> float:
        """Time of a forward over `width` tokens, all sequences together, that see `prefix` tokens before them."""
        table = self.table
        if width <= WIDEST:
            return float(table[width - 1])
        return float(table[-1] + (table[-1] - table[-2]) * (width - WIDEST))

    def beside(self, rows: int, prefix: int = 0, most: int = WIDEST) -> Floats:
        """Milliseconds of a forward over `rows` tokens of other sequences plus 1, 2, ... `most` or more."""
        table = self.table
        if rows + most <= WIDEST:
            return table[rows:]
        widths = np.arange(max(rows, WIDEST) + 1, rows + most + 1)
        beyond = table[-1] + (table[-1] - table[-2]) * (widths - WIDEST)
        return np.concatenate([table[rows:], beyond])

    def as_dict(self) -> dict[int, float]:
        """Milliseconds of a step at some widths."""
        return {width: self.milliseconds(width) for width in WIDTHS}

    def observe(self, width: int, milliseconds: float, prefix: int = 0, threads: int = 1) -> None:
        """Take note of a forward's time. A given curve does not change."""


class CheckedCosts:
    """Reads a curve for the planner. Raises Fault for a curve that fails, or whose numbers are not finite and positive.

    `curve` returns the curve to read.
    """

    def __init__(self, curve: Callable[[], CostCurve]) -> None:
        self._curve = curve

    @property
    def load(self) -> float:
        """The curve's load."""
        return self._number(lambda curve: curve.load)

    def milliseconds(self, width: int, prefix: int = 0) -> float:
        """The curve's time of a forward."""
        return self._number(lambda curve: curve.milliseconds(width, prefix))

    def beside(self, rows: int, prefix: int, most: int) -> Floats:
        """The curve's times of forwards over `rows` tokens of other sequences plus 1, 2, ... `most` or more."""
        costs = self._read(lambda curve: curve.beside(rows, prefix, most))
        if not isinstance(costs, np.ndarray) or costs.ndim != 1 or not 0 < costs.size <= rows + most + WIDEST:
            raise Fault(STEP_COSTS, f"expected the times of up to {most} rows, got {type(costs).__name__}")
        if costs.dtype != np.float64 or not (costs.min() > 0.0 and costs.max() < np.inf):
            raise Fault(STEP_COSTS, "the times of a step are not all finite and positive")
        return costs

    def _number(self, read: Callable[[CostCurve], float]) -> float:
        number = self._read(read)
        if not is_number(number) or not number > 0.0:
            raise Fault(STEP_COSTS, f"expected a finite positive number, got {number!r}")
        return number

    def _read(self, read: Callable[[CostCurve], Read]) -> Read:
        try:
            return read(self._curve())
        except Exception as error:
            raise Fault(STEP_COSTS, f"{type(error).__name__}: {error}") from error
