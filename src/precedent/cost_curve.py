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


class CostCurve:
    """Milliseconds of one forward against its width in tokens, never falling with width."""

    def __init__(self) -> None:
        self._seen: dict[int, deque[float]] = {}
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
        """Learn the time of one forward."""
        bucket = WIDTHS[min(bisect.bisect_left(WIDTHS, width), len(WIDTHS) - 1)]
        self._seen.setdefault(bucket, deque(maxlen=REMEMBERED)).append(milliseconds)
        edges = sorted(self._seen)
        levels = np.maximum.accumulate([median(self._seen[edge]) for edge in edges])
        self.table = self._interpolate(edges, levels)

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
        """Expected time of a forward over `width` tokens."""
        return float(self.table[min(width, WIDTHS[-1]) - 1])

    def as_dict(self) -> dict[int, float]:
        """Median milliseconds of each width bucket that was seen."""
        return {width: median(times) for width, times in sorted(self._seen.items())}
