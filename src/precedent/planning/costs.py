"""The cost of a step by its width: measured at start-up, refined with every step."""

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
"""Widths measured before the first request; others are interpolated until they occur."""

START_UP_SECONDS = 1.5
"""Time limit for measuring; each width runs at least once, and again as long as a whole round fits."""

REMEMBERED = 9
"""Measurements kept per bucket; their median ignores disturbances from a busy machine."""

MOVED = 0.02
"""Relative change of a median that triggers recomputing the curve."""


class CostCurve:
    """Milliseconds of one forward by its width in tokens; never decreases with width."""

    def __init__(self) -> None:
        self._seen: dict[int, deque[float]] = {}
        self._medians: dict[int, float] = {}
        self.table = np.ones(WIDTHS[-1])
        """Milliseconds of a forward over 1, 2, ... tokens, `[WIDTHS[-1]]`."""

    def measure(self, run: Callable[[int], float], widths: Sequence[int] = START_UP_WIDTHS) -> None:
        """Fill the curve with `run(width) -> milliseconds`, the best of a few each, within about `START_UP_SECONDS`."""
        deadline = perf_counter() + START_UP_SECONDS
        best = {width: run(width) for width in widths}
        while perf_counter() < deadline - sum(best.values()) / 1e3:
            best = {width: min(before, run(width)) for width, before in best.items()}
        for width, milliseconds in best.items():
            self.observe(width, milliseconds)

    def observe(self, width: int, milliseconds: float) -> None:
        """Learn the time of one forward; forwards wider than the table are ignored and extrapolated."""
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
        """Milliseconds of each bucket, non-decreasing; a rarely seen bucket costs no more than the next wider one.

        Disturbances only add time. Trusting a disturbed time would keep the planner away from that width, and so from
        ever measuring it again. The narrowest bucket is measured all the time.
        """
        levels = [self._medians[edge] for edge in edges]
        for i in reversed(range(1, len(edges) - 1)):
            if len(self._seen[edges[i]]) < REMEMBERED:
                levels[i] = min(levels[i], levels[i + 1])
        return np.maximum.accumulate(levels)

    @staticmethod
    def _interpolate(edges: Sequence[int], levels: NDArray[np.float64]) -> NDArray[np.float64]:
        """Interpolate linearly between seen buckets; extrapolate with the last slope."""
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
        """Milliseconds of a forward over `rows` tokens of other sequences plus 1, 2, ... more, `[WIDTHS[-1]]`."""
        if rows == 0:
            return self.table
        widths = np.arange(max(rows, WIDTHS[-1]) + 1, rows + WIDTHS[-1] + 1)
        beyond = self.table[-1] + self._last_slope * (widths - WIDTHS[-1])
        return np.concatenate([self.table[rows:], beyond])

    @property
    def _last_slope(self) -> float:
        return float(self.table[-1] - self.table[-2])

    def as_dict(self) -> dict[int, float]:
        """Median milliseconds of each width bucket seen so far."""
        return {width: median(times) for width, times in sorted(self._seen.items())}
