"""Sequences whose draft model draws while the target scores, without a clock in any decision."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

from helpers.tabled_model import TabledModel
from precedent.config import SamplingParams
from precedent.decoding.beside import NOTHING, Beside
from precedent.decoding.loop import step
from precedent.decoding.pearl import Pearl
from precedent.decoding.sequence import DecodingSequence
from precedent.drafters.base import Drafter
from precedent.drafters.request import Request
from precedent.planning.costs import CostCurve
from precedent.planning.pearl import PearlPlanner
from precedent.planning.plan import DrawSource, Limits, Plan
from precedent.runtime.inline_executor import AtOnce
from precedent.sampling.rng import Rng, entropy_rng
from precedent.target import TargetModel

PROMPT = (11, 7, 200, 31, 5, 7)
END = 0
ENTROPY = entropy_rng(1)
CHOSEN_TEXTS = {
    "greedy": SamplingParams(max_tokens=30),
    "coupled": SamplingParams(temperature=0.9, seed=4, max_tokens=30),
}
"""Settings under which the text is a function of the target alone."""


class PlannerOfAllCandidates(PearlPlanner):
    """Verifies every candidate and everything at hand, without a clock in its decisions."""

    def __init__(self, most_ahead: int = 3) -> None:
        super().__init__(CostCurve())
        self._most_ahead = most_ahead

    def plan(self, candidates: Sequence, draw_sources: Mapping[str, DrawSource], limits: Limits) -> Plan:
        """All candidates within the limits, and as many samples as are at hand."""
        plan = super().plan(candidates, {}, limits)
        for name, source in draw_sources.items():
            if source.at_hand is not None:
                plan.draws[name] = min(source.at_hand, limits.max_depth)
        return plan

    def num_draws_ahead(self, name: str, behind: int, limits: Limits) -> int:
        """Always the same number."""
        return self._most_ahead


def start(
    target: TargetModel | TabledModel,
    drafters: Sequence[Drafter],
    sampling: SamplingParams,
    *,
    rng_of: Callable[[int], Rng] = ENTROPY,
    prompt: Sequence[int] = PROMPT,
    mode: str = "",
    ends: frozenset[int] = frozenset({END}),
) -> DecodingSequence:
    """A prefilled sequence with these drafters."""
    slot = target.new_slot()
    target.prefill(slot, prompt)  # type: ignore[arg-type]  # a table's slots are shaped like a model's
    mode = mode or ("greedy" if sampling.greedy else "coupled" if sampling.seed is not None else "traversal")
    request = Request("test", tuple(prompt), sampling, mode=mode, end_token_ids=ends)
    sessions = {drafter.name: drafter.begin(request) for drafter in drafters}
    return DecodingSequence(request, slot, sampling.max_tokens, rng_of, sessions=sessions)  # type: ignore[arg-type]


def run(
    target: TargetModel | TabledModel,
    sequence: DecodingSequence,
    beside: Beside = NOTHING,
    planner: PearlPlanner | None = None,
) -> tuple[int, ...]:
    """Step to the end and return the output."""
    planner = planner or PlannerOfAllCandidates()
    while not sequence.finished:
        step([sequence], target, planner, beside)  # type: ignore[arg-type]
    if sequence.error is not None:
        raise sequence.error
    return tuple(sequence.output_ids)


def in_place() -> Pearl:
    """Draws before the forward, on the same thread: nothing depends on time."""
    return Pearl(AtOnce())
