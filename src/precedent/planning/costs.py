"""What a step costs by its width: a curve that is given. `step_costs` has the one that is learned."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Self

import numpy as np

from precedent.runtime.compiled import Floats

WIDTHS = (1, 2, 4, 8, 12, 16, 24, 32, 48, 64, 96, 128, 192, 257)
"""Widths that are told apart, in tokens per forward (pending token included)."""

WIDEST = WIDTHS[-1]
"""Widths of a curve; beyond, its last slope goes on."""


class CostCurve:
    """Milliseconds of one forward by its width in tokens; never decreases with width. A new one is flat.

    `table` holds the milliseconds of a forward over 1, 2, ... tokens, `[WIDEST]`. `load` is how many times as long
    everything takes at present as on a quiet machine; `learns` says whether `observe` changes anything.
    """

    load = 1.0
    learns = False

    def __init__(self) -> None:
        self.table: Floats = np.ones(WIDEST)

    @classmethod
    def through(cls, milliseconds: Mapping[int, float]) -> Self:
        """The curve through given widths: straight lines between them, the last slope beyond."""
        curve, widths = cls(), sorted(milliseconds)
        levels = np.maximum.accumulate([milliseconds[width] for width in widths])
        every = np.arange(1, WIDEST + 1)
        curve.table = np.interp(every, widths, levels)
        if len(widths) > 1:
            slope = (levels[-1] - levels[-2]) / (widths[-1] - widths[-2])
            curve.table += slope * np.maximum(0, every - widths[-1])
        return curve

    def milliseconds(self, width: int, prefix: int = 0) -> float:
        """Time of a forward over `width` tokens, all sequences together, that see `prefix` tokens before them."""
        table = self.behind(prefix)
        if width <= WIDEST:
            return float(table[width - 1])
        return float(table[-1] + (table[-1] - table[-2]) * (width - WIDEST))

    def beside(self, rows: int, prefix: int = 0, most: int = WIDEST) -> Floats:
        """Milliseconds of a forward over `rows` tokens of other sequences plus 1, 2, ... `most` or more."""
        table = self.behind(prefix)
        if rows + most <= WIDEST:
            return table[rows:]
        widths = np.arange(max(rows, WIDEST) + 1, rows + most + 1)
        beyond = table[-1] + (table[-1] - table[-2]) * (widths - WIDEST)
        return np.concatenate([table[rows:], beyond])

    def behind(self, prefix: int) -> Floats:
        """The table for tokens that see `prefix` tokens before them."""
        return self.table

    def as_dict(self) -> dict[int, float]:
        """Milliseconds of a step at some widths."""
        return {width: self.milliseconds(width) for width in WIDTHS}

    def observe(self, width: int, milliseconds: float, prefix: int = 0, threads: int = 1) -> None:
        """Take note of a forward's time. A given curve does not change."""
