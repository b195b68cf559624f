"""THE LOOP. One step for all running sequences at once: plan, draw, score, verify, commit, accept."""

from __future__ import annotations

from collections.abc import Sequence

from precedent.decoding.accept import accept, commit
from precedent.decoding.beside import NOTHING, Beside
from precedent.decoding.proposal import draw, plan
from precedent.decoding.sequence import DecodingSequence, StepResult
from precedent.decoding.verification import score, verify
from precedent.planning.planner import Planner
from precedent.target import TargetModel


def step(
    sequences: Sequence[DecodingSequence], target: TargetModel, planner: Planner, beside: Beside = NOTHING
) -> list[StepResult]:
    """Advance every sequence by one forward of the target model; returns one result per sequence.

    A sequence that fails carries its error, and the others continue. `beside` runs while the target model scores.
    """
    try:
        proposals = plan(sequences, planner, beside)
        draw(proposals, planner, beside)
        with beside.forward(proposals, planner):
            forward = score(proposals, target, beside)
        verified = verify(forward, planner, beside)
        committed = commit(verified, target)
        accepted = {each.sequence: accept(each, planner, beside) for each in committed}
        return [accepted.get(sequence, StepResult()) for sequence in sequences]
    finally:
        for sequence in sequences:
            target.discard(sequence.slot)
