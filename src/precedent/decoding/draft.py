"""The first half of a step: match, plan and draw for each sequence, beside what the others are going to verify."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace
from time import perf_counter
from typing import cast

from precedent.decoding.sequence import DecodingSequence, StepResult
from precedent.drafters.base import Drafting, DrawsRunnersUp, DrawsTogether
from precedent.errors import GenerationError
from precedent.planning.plan import Limits, Plan
from precedent.planning.planner import Planner
from precedent.runtime.failures import as_ours
from precedent.sampling.probabilities import Coins
from precedent.tree import EMPTY_TREE, CandidateTree, Drawn, TreeBuilder

TOGETHER = "draw_together"
"""Looked for in each step: to ask whether an object is of a protocol takes far longer."""


@dataclass(slots=True, eq=False)
class Draft:
    """One sequence's part in a step: what was planned for it, and the finished tree."""

    sequence: DecodingSequence
    plan: Plan = field(default_factory=Plan)
    tree: CandidateTree = EMPTY_TREE
    result: StepResult = field(default_factory=StepResult)

    def fail(self, error: Exception) -> None:
        """The sequence has failed, and proposes nothing."""
        self.sequence.error, self.plan = as_ours(error, "drafting"), Plan()


@dataclass(slots=True, eq=False)
class _Draws:
    """What one drafter is to draw for one sequence; `at_hand` are those that were made before, and only shown now."""

    draft: Draft
    source: str
    number: int
    behind: int
    at_hand: int

    @property
    def drafting(self) -> Drafting:
        return self.draft.sequence.draftings[self.source]

    @property
    def given(self) -> tuple[TreeBuilder, int, Coins]:
        """What `Drafting.draw` is given."""
        return self.draft.plan.builder, self.number, self.draft.sequence.coins()


def draft_all(sequences: Sequence[DecodingSequence], planner: Planner) -> list[Draft]:
    """Plan for each beside the rows and expected tokens of all others as they are by then, and draw for all in step."""
    rows, tokens, drafts, draws = len(sequences), float(len(sequences)), list[Draft](), list[_Draws]()
    for sequence in sequences:
        limits = replace(sequence.limits, rows_beside=rows - 1, tokens_beside=tokens - 1.0, requests=len(sequences))
        draft = Draft(sequence)
        try:
            draws += _planned(draft, planner, limits)
        except Exception as error:
            draft.fail(error)
        drafts.append(draft)
        rows += len(draft.plan.builder) + sum(draft.plan.draws.values()) + sum(draft.plan.runners_up.values())
        tokens += draft.plan.expected_tokens - 1.0
    for together in _in_step(draws):
        _draw([each for each in together if each.draft.sequence.error is None], planner)
    for draft in drafts:
        draft.tree = draft.plan.builder.build()
        if draft.plan.draws:
            _check_drawn(draft)
    return drafts


def _check_drawn(draft: Draft) -> None:
    """Fail a sequence for which a drafter drew what the target's rows do not have, before they are compared."""
    num_tokens, tree = draft.sequence.num_tokens, draft.tree
    if num_tokens is None or not tree:
        return
    widths = {draw.law.row.shape[-1] for draw in tree.draws if isinstance(draw.law, Drawn)} - {num_tokens}
    if widths or max(tree.token_ids) >= num_tokens:
        drawn = f"from a law of {max(widths)} tokens" if widths else f"token {max(tree.token_ids)}"
        told = f"the target chooses among {num_tokens}: its rows must be cut there (DraftRequest.num_tokens)"
        draft.fail(GenerationError(f"a drafter drew {drawn}, and {told}"))
        draft.tree = EMPTY_TREE


def _planned(draft: Draft, planner: Planner, limits: Limits) -> list[_Draws]:
    """Match and plan the points; returns the draws that are still to be made."""
    started, sequence = perf_counter(), draft.sequence
    if limits.max_depth < 1 or limits.max_nodes + limits.max_draws == 0:
        return []
    candidates = sequence.match()
    behind = {name: sequence.draftings[name].behind for name in sequence.draw_sources}
    draft.plan = planner.plan(candidates, behind, limits)
    sequence.last_num_points = len(draft.plan.builder)
    sequence.stats.draft_seconds += perf_counter() - started
    draws = [(source, number) for source, number in draft.plan.draws.items() if number]
    return [_Draws(draft, source, number, behind[source], limits.at_hand.get(source, 0)) for source, number in draws]


def _in_step(draws: Sequence[_Draws]) -> Iterable[list[_Draws]]:
    """Those whose drafters draw with one model go together, others by themselves."""
    groups: dict[object, list[_Draws]] = {}
    for each in draws:
        groups.setdefault(getattr(each.drafting, TOGETHER, each), []).append(each)
    return groups.values()


def _draw(draws: Sequence[_Draws], planner: Planner) -> None:
    """Draw for several sequences in step, or for one; the planner learns what it took, and each fails alone."""
    started = perf_counter()
    for each, (seconds, error) in zip(draws, _outcomes(draws), strict=True):
        if error is not None:
            each.draft.fail(error)
        elif not each.at_hand:  # else they were made before, and only shown now
            planner.observe_draws(each.source, each.number, each.behind, seconds * 1e3, len(draws))
    taken = perf_counter() - started
    for each in draws:
        each.draft.sequence.stats.draft_model_seconds += taken
        if number := each.draft.plan.runners_up.get(each.source):  # planned only for a drafting that has them
            _draw_runners_up(each, number)


def _outcomes(draws: Sequence[_Draws]) -> list[tuple[float, Exception | None]]:
    """Seconds that each took, its share of what was done for several, and what it failed of."""
    together = getattr(draws[0].drafting, TOGETHER, None) if draws else None
    if together is None:
        return [_alone(each) for each in draws]
    try:
        drawings = [cast(DrawsTogether, each.drafting).drawing(*each.given) for each in draws]
        return [(drawer.seconds, drawer.error) for drawer, _ in zip(together(drawings), draws, strict=True)]
    except Exception as error:  # raised by the drafter itself, not by one of the drawings: nobody knows whose it is
        return [(0.0, error) for _ in draws]


def _alone(draws: _Draws) -> tuple[float, Exception | None]:
    started, failure = perf_counter(), None
    try:
        draws.drafting.draw(*draws.given)
    except Exception as error:
        failure = error
    return perf_counter() - started, failure


def _draw_runners_up(draws: _Draws, number: int) -> None:
    started = perf_counter()
    try:
        cast(DrawsRunnersUp, draws.drafting).draw_runners_up(
            draws.draft.plan.builder, number, draws.draft.sequence.coins()
        )
    except Exception as error:
        draws.draft.fail(error)
    draws.draft.sequence.stats.draft_model_seconds += perf_counter() - started
