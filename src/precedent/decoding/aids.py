"""The drafters and the planner of a decode loop, behind fences: they only make steps faster.

Whatever fails here, the step goes on without a drafter or without a plan (plain decoding). What has been sampled into a
tree stays there, because dropping a sample for its value would bias the output distribution.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field

from precedent.decoding.sequence import DecodingSequence
from precedent.drafters.sessions import end_all
from precedent.planning.costs import STEP_COSTS
from precedent.planning.planner import PLANNER, Planner
from precedent.runtime.fence import Fault, Fences, Result


@dataclass(frozen=True, slots=True)
class Aids:
    """The drafters and the planner as the loop calls them: none of their faults is raised."""

    planner: Planner
    fences: Fences = field(default_factory=Fences)

    def leave_switched_off(self, sequence: DecodingSequence) -> None:
        """Leave out the drafters that were switched off because of other requests."""
        for name in [name for name in sequence.sessions if not self.fences.of(name).is_on]:
            self.leave(sequence, name)

    def drop(self, sequence: DecodingSequence, name: str, error: Exception) -> None:
        """Continue without a drafter that failed."""
        self.fences.of(name).fault(error)
        self.leave(sequence, name)

    def leave(self, sequence: DecodingSequence, name: str) -> None:
        """Continue without a drafter."""
        if name in sequence.sessions:
            end_all({name: sequence.sessions.pop(name)}, self.fences)

    def drafting(self, sequence: DecodingSequence, name: str, act: Callable[[], Result], default: Result) -> Result:
        """Return the answer of a sequence's drafter, or the default if it fails; it is then dropped."""
        try:
            return act()
        except Exception as error:
            self.drop(sequence, name, error)
            return default

    def planning(self, sequence: DecodingSequence, act: Callable[[], Result], default: Result) -> Result:
        """Return the planner's answer for a sequence; after a fault, that sequence is decoded plainly."""
        if not sequence.plans or not (self.fences.of(PLANNER).is_on and self.fences.of(STEP_COSTS).is_on):
            return default
        try:
            return act()
        except Exception as error:
            sequence.plans = False
            fence = self.fences.of(error.aid if isinstance(error, Fault) else PLANNER)
            fence.fault(error)
            if not fence.is_on:  # what it has learned may be damaged
                with suppress(Exception):
                    self.planner.forget()
            return default

    def observe_forward(self, width: int, milliseconds: float, prefix: int, threads: int) -> None:
        """Let the planner learn the time of a forward pass."""
        planner = self.planner
        self.fences.of(STEP_COSTS).run(lambda: planner.observe_forward(width, milliseconds, prefix, threads), None)

    def plain_seconds(self, requests: int) -> float:
        """Return the seconds of a plain step of this many requests by the cost curve; 0 if unknown."""
        return self.fences.of(STEP_COSTS).run(lambda: self.planner.checked.milliseconds(requests) / 1e3, 0.0)

    def committed(self, sequence: DecodingSequence, token_ids: Sequence[int]) -> None:
        """Tell the drafters of a sequence what a step committed."""
        for name, session in list(sequence.sessions.items()):
            self.drafting(sequence, name, lambda session=session: session.committed(token_ids), None)  # type: ignore[misc]
