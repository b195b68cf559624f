"""What does a step of a given width cost? Measured at start-up, refined with every step."""

from __future__ import annotations

import bisect
from collections import deque
from collections.abc import Callable, Sequence
from statistics import median
from time import perf_counter

import numpy as np
from numpy.typing import NDArray

WIDTHS = (1, 2, 4, 8, 12, 16, 24, 32, 48, 64, 96, 128, 192, 257)
"""Bucket edges, in tokens per forward (pending token included)."""

START_UP_WIDTHS = (1, 8, 32)
"""Enough to draw the curve before the first request; the rest is interpolated until it is seen."""

START_UP_SECONDS = 1.5
"""What measuring may take; each width is run at least once, and again while a whole round fits."""

REMEMBERED = 9
"""Measurements per bucket; their median shrugs off a busy machine."""

MOVED = 0.02
"""By what share of itself a median must move for the curve to be drawn anew."""


class CostCurve:
    """Milliseconds of one forward against its width in tokens, never falling with width."""

    def __init__(self) -> None:
        self._seen: dict[int, deque[float]] = {}
        self._medians: dict[int, float] = {}
        self.table = np.ones(WIDTHS[-1])
        """Milliseconds of a forward over 1, 2, … tokens, `[WIDTHS[-1]]`."""

    def measure(self, run: Callable[[int], float], widths: Sequence[int] = START_UP_WIDTHS) -> None:
        """Fill the curve with `run(width) -> milliseconds`, the best of a few each, within about `START_UP_SECONDS`."""
        deadline = perf_counter() + START_UP_SECONDS
        best = {width: run(width) for width in widths}
        while perf_counter() < deadline - sum(best.values()) / 1e3:
            best = {width: min(before, run(width)) for width, before in best.items()}
        for width, milliseconds in best.items():
            self.observe(width, milliseconds)

    def observe(self, width: int, milliseconds: float) -> None:
        """Learn the time of one forward; a wider one than the table is left to its last slope."""
        if width > WIDTHS[-1]:
            return
        bucket = WIDTHS[min(bisect.bisect_left(WIDTHS, width), len(WIDTHS) - 1)]
        seen = self._seen.setdefault(bucket, deque(maxlen=REMEMBERED))
        settles = len(seen) == REMEMBERED - 1
        seen.append(milliseconds)
        level = median(seen)
        if settles or abs(level - self._medians.get(bucket, 0.0)) > MOVED * level:
            self._medians[bucket] = level
            edges = sorted(self._seen)
            self.table = self._interpolate(edges, self._levels(edges))

    def _levels(self, edges: Sequence[int]) -> NDArray[np.float64]:
        """Milliseconds of each bucket, never falling; one that was seen a few times costs no more than a wider one.

        Disturbances only add time, and believing them would keep the planner from that width, and so from ever
        measuring it again. The narrowest is measured all the time.
        """
        levels = [self._medians[edge] for edge in edges]
        for i in reversed(range(1, len(edges) - 1)):
            if len(self._seen[edges[i]]) < REMEMBERED:
                levels[i] = min(levels[i], levels[i + 1])
        return np.maximum.accumulate(levels)

    @staticmethod
    def _interpolate(edges: Sequence[int], levels: NDArray[np.float64]) -> NDArray[np.float64]:
        """Linear between what was seen, and beyond it with the last slope."""
        widths = np.arange(1, WIDTHS[-1] + 1)
        table = np.interp(widths, edges, levels)
        if len(edges) > 1:
            slope = (levels[-1] - levels[-2]) / (edges[-1] - edges[-2])
            table = np.where(widths > edges[-1], levels[-1] + slope * (widths - edges[-1]), table)
        return table

    def milliseconds(self, width: int) -> float:
        """Expected time of a forward over `width` tokens, all sequences of the step together."""
        if width <= WIDTHS[-1]:
            return float(self.table[width - 1])
        return float(self.table[-1] + self._last_slope * (width - WIDTHS[-1]))

    def beside(self, rows: int) -> NDArray[np.float64]:
        """Milliseconds of a forward over `rows` tokens of other sequences and 1, 2, … more, `[WIDTHS[-1]]`."""
        if rows == 0:
            return self.table
        widths = np.arange(max(rows, WIDTHS[-1]) + 1, rows + WIDTHS[-1] + 1)
        beyond = self.table[-1] + self._last_slope * (widths - WIDTHS[-1])
        return np.concatenate([self.table[rows:], beyond])

    @property
    def _last_slope(self) -> float:
        return float(self.table[-1] - self.table[-2])

    def as_dict(self) -> dict[int, float]:
        """Median milliseconds of each width bucket that was seen."""
        return {width: median(times) for width, times in sorted(self._seen.items())}
