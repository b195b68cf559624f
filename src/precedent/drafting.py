"""The first half of a step: match, plan and draw for each sequence, beside what the others are going to verify."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from time import perf_counter
from typing import cast

from precedent.drafters.base import DrawsRunnersUp
from precedent.failures import as_ours
from precedent.plan import Limits, Plan
from precedent.planner import Planner
from precedent.sequence import DecodingSequence, StepResult
from precedent.tree import EMPTY_TREE, CandidateTree


@dataclass(slots=True, eq=False)
class Draft:
    """One sequence's part in a step: what was planned for it, and the finished tree."""

    sequence: DecodingSequence
    plan: Plan
    tree: CandidateTree
    result: StepResult = field(default_factory=StepResult)


def draft_all(sequences: Sequence[DecodingSequence], planner: Planner) -> list[Draft]:
    """Draft for one after the other, each beside the rows and the expected tokens of all others as they are by then."""
    rows, tokens, drafts = len(sequences), float(len(sequences)), []
    for sequence in sequences:
        limits = replace(sequence.limits, rows_beside=rows - 1, tokens_beside=tokens - 1.0)
        try:
            plan, tree = _draft(sequence, planner, limits)
        except Exception as error:
            sequence.error, plan, tree = as_ours(error, "drafting"), Plan(), EMPTY_TREE
        drafts.append(Draft(sequence, plan, tree))
        rows, tokens = rows + len(tree), tokens + plan.expected_tokens - 1.0
    return drafts


def _draft(sequence: DecodingSequence, planner: Planner, limits: Limits) -> tuple[Plan, CandidateTree]:
    """Match and plan the points, then draw; returns the finished tree."""
    started = perf_counter()
    if limits.max_depth < 1 or limits.max_nodes + limits.max_draws == 0:
        return Plan(), EMPTY_TREE
    candidates = sequence.match()
    behind = {name: sequence.draftings[name].behind for name in sequence.draw_sources}
    plan = planner.plan(candidates, behind, limits)
    sequence.last_num_points = len(plan.builder)
    sequence.stats.draft_seconds += perf_counter() - started
    for source, number in plan.draws.items():
        if not number:
            continue
        started = perf_counter()
        drafting = sequence.draftings[source]
        drafting.draw(plan.builder, number, sequence.coins())
        seconds = perf_counter() - started
        if runners_up := plan.runners_up.get(source):  # planned only for a drafting that has them
            cast(DrawsRunnersUp, drafting).draw_runners_up(plan.builder, runners_up, sequence.coins())
        sequence.stats.draft_model_seconds += perf_counter() - started
        if not limits.at_hand.get(source):  # else they were made before, and only shown now
            planner.observe_draws(source, number, behind[source], seconds * 1e3)
    return plan, plan.builder.build()
