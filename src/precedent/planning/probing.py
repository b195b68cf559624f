"""Tries other widths now and then: a width that is believed to be dear would otherwise never be measured again.

The longer no step had a width, the cheaper it might have become. Every so often the plan is made once more as if it
had; if that changes the plan, the changed one runs. What probes are expected to lose stays below a hundredth of the
time of all steps.
"""

from __future__ import annotations

import bisect

from precedent.planning.costs import WIDTHS
from precedent.runtime.compiled import Floats

EVERY = 48
"""Steps between two probes."""

SOON = 8
"""Steps between a probe that surprised and the next one."""

STALE = 192
"""Steps after which a width's cost is doubted: after n times as many steps it is hoped to cost an n-th."""

FIRST_AGE = 256
"""Steps for which no width is taken to have been measured when an engine starts."""

LEAST_HOPE = 0.1
"""Least share of its believed cost that a width is hoped to cost."""

SURPRISE = 0.75
"""Share of the believed time below which a probe was a surprise."""

SHARE = 0.01
"""What probes may lose, as a share of the time of all steps."""


class Probes:
    """Decides when to probe, and what may be hoped for; all times in milliseconds."""

    def __init__(self) -> None:
        self._steps = self._next_probe = 0
        self._elapsed = self._lost = 0.0
        self._believed: float | None = None
        self._seen = dict.fromkeys(WIDTHS, -FIRST_AGE)

    @property
    def due(self) -> bool:
        """Whether enough steps went by since the last probe."""
        return self._steps >= self._next_probe

    def hopeful(self, costs: Floats, rows_beside: int) -> Floats:
        """The costs of `rows_beside` rows and 1, 2, ... more, lower where they were not measured for a while."""
        hoped = costs.copy()
        for first, last in zip((0, *WIDTHS), WIDTHS, strict=False):
            age = self._steps - self._seen[last]
            if age > STALE:
                hope = max(LEAST_HOPE, STALE / age)
                hoped[max(0, first - rows_beside) : max(0, last - rows_beside)] *= hope
        return hoped

    def affords(self, loss: float, believed: float) -> bool:
        """Whether a plan that is believed to take so long, and to lose `loss` of it, may run as a probe."""
        self._next_probe = self._steps + EVERY
        if self._lost + loss > SHARE * self._elapsed:
            return False
        self._lost, self._believed = self._lost + max(0.0, loss), believed
        return True

    def observe(self, width: int, milliseconds: float) -> None:
        """Take note of a step; a probe that took less than believed costs less, and another one follows soon."""
        self._steps += 1
        self._elapsed += milliseconds
        self._seen[WIDTHS[min(bisect.bisect_left(WIDTHS, width), len(WIDTHS) - 1)]] = self._steps
        if self._believed is not None and milliseconds < SURPRISE * self._believed:
            self._lost = max(0.0, self._lost - (self._believed - milliseconds))
            self._next_probe = self._steps + SOON
        self._believed = None
