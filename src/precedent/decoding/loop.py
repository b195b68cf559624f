"""THE LOOP. One step for all running sequences at once: plan, draw, score, verify, commit, accept."""

from __future__ import annotations

from collections.abc import Sequence

from precedent.decoding.accept import accept, commit
from precedent.decoding.aids import Aids
from precedent.decoding.beside import NOTHING, Beside
from precedent.decoding.proposal import draw, plan
from precedent.decoding.sequence import DecodingSequence, StepResult
from precedent.decoding.verification import score, verify
from precedent.planning.planner import Planner
from precedent.runtime.fence import Fences
from precedent.target import Target


def step(
    sequences: Sequence[DecodingSequence],
    target: Target,
    planner: Planner,
    beside: Beside = NOTHING,
    fences: Fences | None = None,
) -> list[StepResult]:
    """Advance every sequence by one forward of the target model; returns one result per sequence.

    A sequence that fails carries its error, and the others continue. `beside` runs while the target model scores. What
    only makes steps faster stands behind the engine's `fences`: a fault there fails no sequence.
    """
    aids = Aids(planner, beside, fences or Fences())
    try:
        proposals = plan(sequences, aids)
        draw(proposals, aids)
        with aids.beside.forward(proposals, aids):
            forward = score(proposals, target, beside)
        verified = verify(forward, aids)
        committed = commit(verified, target)
        accepted = {each.sequence: accept(each, aids) for each in committed}
        return [accepted.get(sequence, StepResult()) for sequence in sequences]
    finally:
        for sequence in sequences:
            target.discard(sequence.slot)
