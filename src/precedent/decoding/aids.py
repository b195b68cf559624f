"""What only makes steps faster, behind fences: the drafters, the planner, and the work beside a forward.

Whatever an aid does, the step goes on: without a drafter, without a plan (plain decoding), without samples drawn ahead.
What has been sampled into a tree stays there, because a sample that was dropped for its value would bend the output
distribution.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field

from precedent.decoding.beside import NOTHING, Beside
from precedent.decoding.sequence import DecodingSequence
from precedent.drafters.together import end_all
from precedent.planning.costs import STEP_COSTS
from precedent.planning.planner import PLANNER, Planner
from precedent.runtime.fence import Fault, Fences, Result

BESIDE = "drawing ahead"
"""The name of `Aids.beside` among the aids of an engine."""


@dataclass(frozen=True, slots=True)
class Aids:
    """The drafters and the planner of an engine, as its loop calls them: no fault of theirs is raised."""

    planner: Planner
    beside: Beside = NOTHING
    fences: Fences = field(default_factory=Fences)

    def leave_switched_off(self, sequence: DecodingSequence) -> None:
        """Leave out the drafters that were switched off because of other requests."""
        for name in [name for name in sequence.sessions if not self.fences.of(name).is_on]:
            self.leave(sequence, name)

    def drop(self, sequence: DecodingSequence, name: str, error: Exception) -> None:
        """Go on without a drafter that failed."""
        self.fences.of(name).fault(error)
        self.leave(sequence, name)

    def leave(self, sequence: DecodingSequence, name: str) -> None:
        """Go on without a drafter."""
        if name in sequence.sessions:
            end_all({name: sequence.sessions.pop(name)}, self.fences)

    def drafting(self, sequence: DecodingSequence, name: str, act: Callable[[], Result], otherwise: Result) -> Result:
        """What a sequence's drafter answers; the drafter is dropped if it fails."""
        try:
            return act()
        except Exception as error:
            self.drop(sequence, name, error)
            return otherwise

    def planning(self, sequence: DecodingSequence, act: Callable[[], Result], otherwise: Result) -> Result:
        """What the planner answers for a sequence; after a fault, that sequence is decoded plainly."""
        if not sequence.plans or not (self.fences.of(PLANNER).is_on and self.fences.of(STEP_COSTS).is_on):
            return otherwise
        try:
            return act()
        except Exception as error:
            sequence.plans = False
            fence = self.fences.of(error.aid if isinstance(error, Fault) else PLANNER)
            fence.fault(error)
            if not fence.is_on:  # what it has learned may be damaged
                with suppress(Exception):
                    self.planner.forget()
            return otherwise

    def observe_forward(self, width: int, milliseconds: float, prefix: int, threads: int) -> None:
        """Let the planner learn the time of a forward."""
        planner = self.planner
        self.fences.of(STEP_COSTS).run(lambda: planner.observe_forward(width, milliseconds, prefix, threads), None)

    def plain_seconds(self, requests: int) -> float:
        """What a plain step of so many requests takes by the cost curve; 0 if that is not known."""
        return self.fences.of(STEP_COSTS).run(lambda: self.planner.checked.milliseconds(requests) / 1e3, 0.0)

    def settled(self, sequence: DecodingSequence, token_ids: Sequence[int], settle: Callable[[], None]) -> None:
        """Tell the drafters of a sequence, and then the work beside forwards, what a step committed."""
        for name, session in list(sequence.sessions.items()):
            self.drafting(sequence, name, lambda session=session: session.committed(token_ids), None)  # type: ignore[misc]
        self.fences.of(BESIDE).run(settle, None)
