"""What a step of the other engine costs, from the time between two calls for drafts."""

from __future__ import annotations

from collections.abc import Callable
from time import perf_counter

from precedent.planning.costs import StepCosts
from precedent.planning.planner import Planner

Clock = Callable[[], float]
"""Seconds since some moment."""

SHARES = (1.0, 0.0, 0.25) * 4
"""Shares of the longest draft in the first steps, while no cost is known: a width must be used to be measured."""


class StepClock:
    """Times the other engine's steps: from the end of one call for drafts to the beginning of the next.

    Only a step in which nothing else was done counts: the tokens of the last call were committed, and no request began.
    """

    def __init__(self, planner: Planner, now: Clock = perf_counter) -> None:
        self._planner, self._now = planner, now
        self._width, self._since = 0, 0.0
        cost = planner.cost
        self._unknown = cost if isinstance(cost, StepCosts) and not cost.known else None
        self._best: dict[int, float] = {}
        self._tried = 0

    def most(self, wanted: int) -> int:
        """The longest draft in the coming step, if `wanted` are."""
        return wanted if self._unknown is None else int(wanted * SHARES[self._tried])

    def began(self) -> None:
        """A request began, so the present step also computes its prompt."""
        self._width = 0

    def called(self, stepped: bool) -> None:
        """The next call begins; `stepped` says whether tokens were committed since the last one."""
        if not self._width or not stepped:
            return
        width, milliseconds = self._width, (self._now() - self._since) * 1e3
        if self._unknown is None:
            self._planner.observe_forward(width, milliseconds)
            return
        self._tried += 1
        self._best[width] = min(milliseconds, self._best.get(width, milliseconds))
        if self._tried == len(SHARES):
            self._unknown.begin(self._best)
            self._unknown = None

    def returned(self, width: int) -> None:
        """A call ends; the step that follows computes `width` tokens of all requests together."""
        self._width, self._since = width, self._now()
