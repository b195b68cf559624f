"""What a step of the other engine costs, from the time between two calls for drafts."""

from __future__ import annotations

from collections.abc import Callable
from time import perf_counter

from precedent.planning.planner import Planner

Clock = Callable[[], float]
"""Seconds since some moment."""


class StepClock:
    """Times the other engine's steps: from the end of one call for drafts to the beginning of the next.

    Only a step in which nothing else was done counts: the tokens of the last call were committed, and no request began.
    """

    def __init__(self, planner: Planner, now: Clock = perf_counter) -> None:
        self._planner, self._now = planner, now
        self._width, self._since = 0, 0.0

    def began(self) -> None:
        """A request began, so the present step also computes its prompt."""
        self._width = 0

    def called(self, stepped: bool) -> None:
        """The next call begins; `stepped` says whether tokens were committed since the last one."""
        if self._width and stepped:
            self._planner.observe_forward(self._width, (self._now() - self._since) * 1e3)

    def returned(self, width: int) -> None:
        """A call ends; the step that follows computes `width` tokens of all requests together."""
        self._width, self._since = width, self._now()
