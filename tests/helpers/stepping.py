"""Sequences that are stepped by hand, without a clock in any decision."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

from helpers.tabled_model import TabledModel
from precedent.config import SamplingParams
from precedent.decoding.loop import DecodeLoop
from precedent.decoding.sequence import DecodingSequence
from precedent.drafters.base import Drafter, DrawSource
from precedent.drafters.request import Request
from precedent.planning.costs import CostCurve
from precedent.planning.planner import Limits, Plan, Planner
from precedent.sampling.rng import Rng, entropy_rng
from precedent.sampling.row_shaper import RowShaper
from precedent.target import TargetModel

PROMPT = (11, 7, 200, 31, 5, 7)
END = 0
ENTROPY = entropy_rng(1)
CHOSEN_TEXTS = {
    "greedy": SamplingParams(max_tokens=30),
    "coupled": SamplingParams(temperature=0.9, seed=4, max_tokens=30),
}
"""Settings under which the text is a function of the target alone."""


class AllCandidates(Planner):
    """Verifies every candidate, and draws so many tokens from every model, whatever pays."""

    def __init__(self, draws: int = 0) -> None:
        super().__init__(CostCurve())
        self._draws = draws

    def plan(self, candidates: Sequence, draw_sources: Mapping[str, DrawSource], limits: Limits) -> Plan:
        """All candidates within the limits."""
        self.cost.table[:] = 1.0  # whatever was measured: width is free
        plan = super().plan(candidates, {}, limits)
        if self._draws:
            plan.draws = {source: min(self._draws, limits.max_depth) for source in draw_sources}
        return plan


def start(
    target: TargetModel | TabledModel,
    drafters: Sequence[Drafter],
    sampling: SamplingParams,
    *,
    rng_of: Callable[[int], Rng] = ENTROPY,
    prompt: Sequence[int] = PROMPT,
    mode: str = "",
    ends: frozenset[int] = frozenset({END}),
    shape: RowShaper | None = None,
    num_tokens: int | None = None,
) -> DecodingSequence:
    """A prefilled sequence with these drafters."""
    slot = target.new_slot()
    target.prefill(slot, prompt)  # type: ignore[arg-type]  # a table's slots are shaped like a model's
    mode = mode or ("greedy" if sampling.greedy else "coupled" if sampling.seed is not None else "traversal")
    request = Request(
        "test", tuple(prompt), sampling, mode=mode, shape=shape, num_tokens=num_tokens, end_token_ids=ends
    )
    sessions = {drafter.name: drafter.begin(request) for drafter in drafters}
    return DecodingSequence(request, slot, sampling.max_tokens, rng_of, sessions=sessions)  # type: ignore[arg-type]


def run(
    target: TargetModel | TabledModel, sequence: DecodingSequence, loop: DecodeLoop | None = None
) -> tuple[int, ...]:
    """Step to the end, without drawing ahead unless the loop does, and return the output."""
    loop = loop or DecodeLoop(target, AllCandidates())  # type: ignore[arg-type]
    while not sequence.finished:
        loop.step([sequence])
    if sequence.error is not None:
        raise sequence.error
    return tuple(sequence.output_ids)
