"""Sequences that draw together from one watched draft model."""

from __future__ import annotations

import itertools
from collections.abc import Sequence

from torch import Tensor

from precedent.config import SamplingParams
from precedent.decoding.aids import Aids
from precedent.decoding.proposal import Proposal, draw, plan
from precedent.decoding.sequence import DecodingSequence
from precedent.drafters.base import Candidates, DrawSession
from precedent.drafters.model.drafter import DraftModelDrafter
from precedent.drafters.request import Request
from precedent.planning.costs import CostCurve
from precedent.planning.planner import Limits, Plan, Planner
from precedent.sampling.rng import entropy_rng
from precedent.target import Slot, TargetModel
from precedent.tree import CandidateTree
from precedent_testing.tiny_models import tiny_causal_lm

TINY = {"vocab_size": 24, "num_hidden_layers": 2, "hidden_size": 16}
PROMPTS = ([3, 1, 4], [5] * 60, [9, 2, 6, 5, 3, 5])
"""The second one is prefilled in a forward of its own, the others ride along with their first draw."""


class Watched(TargetModel):
    """Notes how many requests each forward had; fails where a prompt begins with `guilty`."""

    def __init__(self, seed: int) -> None:
        super().__init__(tiny_causal_lm("llama", seed=seed, **TINY))
        self.batches: list[int] = []
        self.guilty: int | None = None

    def score(self, batch: Sequence[tuple[Slot, CandidateTree]]) -> list[Tensor]:
        """Note the batch, or fail as a whole: a forward does not say whose fault it was."""
        self.batches.append(len(batch))
        scored = super().score(batch)
        if any(([*slot.token_ids, slot.pending])[0] == self.guilty for slot, _ in batch):
            raise MemoryError("no memory left")
        return scored


def small_target() -> TargetModel:
    return TargetModel(tiny_causal_lm("llama", seed=1, **TINY))


def sessions(drafter: DraftModelDrafter, mode: str) -> list[DrawSession]:
    sampling = SamplingParams() if mode == "greedy" else SamplingParams(temperature=0.9)
    return [drafter.begin(Request(str(i), tuple(p), sampling, mode=mode)) for i, p in enumerate(PROMPTS)]


class AlwaysDraws(Planner):
    """As many draws as it is told, in every step."""

    def __init__(self, numbers: Sequence[int]) -> None:
        super().__init__(CostCurve())
        self.observed: list[tuple[int, float]] = []
        self.together: set[int] = set()
        self._numbers = itertools.cycle(numbers)

    def plan(self, candidates: Sequence[Candidates], draw_sources: object, limits: Limits) -> Plan:
        """No fixed candidates."""
        return Plan(draws={"draft-model": min(next(self._numbers), limits.max_depth)})

    def observe_draws(self, source: str, num_draws: int, behind: int, milliseconds: float, together: int = 1) -> None:
        """Note what the draws of a sequence took, and beside how many."""
        self.observed.append((num_draws, milliseconds))
        self.together.add(together)


def sequences(target: TargetModel, drafter: DraftModelDrafter, sampling: SamplingParams) -> list[DecodingSequence]:
    found = []
    for number, prompt in enumerate(PROMPTS):
        slot = target.new_slot()
        target.prefill(slot, prompt)
        mode = "greedy" if sampling.greedy else "traversal"
        request = Request(str(number), tuple(prompt), sampling, mode=mode)
        drafting = {"draft-model": drafter.begin(request)}
        found.append(DecodingSequence(request, slot, 12, entropy_rng(number), sessions=drafting))
    return found


def drafted(running: Sequence[DecodingSequence], planner: Planner) -> list[Proposal]:
    """The proposals of a step, drawn."""
    proposals = plan(running, aids := Aids(planner))
    draw(proposals, aids)
    return proposals
