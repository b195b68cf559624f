"""The first half of a step: match, plan and draw for each sequence, given what the others are going to verify."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from time import perf_counter

from precedent.decoding.beside import Beside
from precedent.decoding.forwards import Matched, match
from precedent.decoding.sequence import DecodingSequence
from precedent.drafters.base import Draw
from precedent.errors import GenerationError
from precedent.planning.plan import DrawSource, Limits, Plan
from precedent.planning.planner import Planner
from precedent.tree import EMPTY_TREE, CandidateTree, Sampled


@dataclass(slots=True, eq=False)
class Proposal:
    """One sequence's proposal for a step: its plan, and its tree once the samples are drawn."""

    sequence: DecodingSequence
    plan: Plan = field(default_factory=Plan)
    tree: CandidateTree = EMPTY_TREE


def plan(sequences: Sequence[DecodingSequence], planner: Planner, beside: Beside) -> list[Proposal]:
    """Match and plan for each sequence, given the rows and expected tokens of the others planned so far."""
    rows, tokens, proposals = len(sequences), float(len(sequences)), list[Proposal]()
    for matched in match(sequences, planner):
        sequence = matched.sequence
        limits = sequence.limits(len(sequences), rows - 1, tokens - 1.0)
        try:
            proposal = Proposal(sequence, _planned(matched, limits, planner, beside))
        except Exception as error:
            sequence.fail(error, "drafting")
            continue
        proposals.append(proposal)
        planned = proposal.plan
        rows += len(planned.builder) + sum(planned.draws.values()) + sum(planned.runners_up.values())
        tokens += planned.expected_tokens - 1.0
    return proposals


def _planned(matched: Matched, limits: Limits, planner: Planner, beside: Beside) -> Plan:
    sequence = matched.sequence
    if limits.max_depth < 1 or limits.max_nodes + limits.max_draws == 0:
        return Plan()
    started, sources = perf_counter(), {}
    for name, session in sequence.drawing.items():
        at_hand = beside.at_hand(session)
        sources[name] = DrawSource(
            session.behind, session.names_runners_up and at_hand is None, at_hand, session.at_once
        )  # fmt: skip
    planned = planner.plan(matched.candidates, sources, limits)
    for name, without in matched.ran.items():
        planner.observe_gain(name, without, planned)
    sequence.last_num_fixed = len(planned.builder)
    sequence.stats.draft_seconds += perf_counter() - started
    return planned


@dataclass(slots=True, eq=False)
class _Planned:
    """A planned draw and its proposal; `behind` and `at_hand` are the session's values before the draw."""

    proposal: Proposal
    source: str
    draw: Draw
    behind: int
    at_hand: int


def draw(proposals: Sequence[Proposal], planner: Planner, beside: Beside) -> None:
    """Draw as planned, together for sessions of the same group, and build the trees."""
    groups: dict[object, list[_Planned]] = {}
    for proposal in proposals:
        for source, number in proposal.plan.draws.items():
            if number:
                session = proposal.sequence.drawing[source]
                asked = Draw(session, proposal.plan.builder, number, proposal.sequence.rng())
                planned = _Planned(proposal, source, asked, session.behind, beside.at_hand(session) or 0)
                groups.setdefault(session.group, []).append(planned)
    for group in groups.values():
        _draw_together([each for each in group if each.proposal.sequence.error is None], planner)
    for proposal in proposals:
        if proposal.sequence.error is None:
            proposal.tree = _checked(proposal, proposal.plan.builder.build())


def _draw_together(group: Sequence[_Planned], planner: Planner) -> None:
    """Draw for the sessions of one group and tell the planner the cost; each session fails alone."""
    if not group:
        return
    started, draws = perf_counter(), [each.draw for each in group]
    try:
        draws[0].session.draw_together(draws)
    except Exception as error:  # raised by the drafter itself, so it cannot be assigned to one session
        for asked in draws:
            asked.error = error
    taken = perf_counter() - started
    for each in group:
        each.proposal.sequence.stats.draft_model_seconds += taken
        if each.draw.error is not None:
            each.proposal.sequence.fail(each.draw.error, "drafting")
            continue
        if not each.at_hand:  # otherwise the samples were drawn ahead and cost nothing now
            milliseconds = each.draw.seconds * 1e3
            planner.observe_draws(each.source, each.draw.number, each.behind, milliseconds, len(group))
        _draw_runners_up(each)


def _draw_runners_up(planned: _Planned) -> None:
    number, sequence = planned.proposal.plan.runners_up.get(planned.source, 0), planned.proposal.sequence
    if not number:
        return
    started = perf_counter()
    try:
        planned.draw.session.draw_runners_up(planned.draw.builder, number, planned.draw.rng)
    except Exception as error:
        sequence.fail(error, "drafting")
    sequence.stats.draft_model_seconds += perf_counter() - started


def _checked(proposal: Proposal, tree: CandidateTree) -> CandidateTree:
    """Return the tree, or fail the sequence if a drafter sampled a token that the target's rows do not have."""
    num_tokens = proposal.sequence.request.num_tokens
    if num_tokens is None or not tree or not proposal.plan.draws:
        return tree
    rows = [each.distribution.row for each in tree.candidates if isinstance(each.distribution, Sampled)]
    widths = {row.shape[-1] for row in rows} - {num_tokens}
    if not widths and max(tree.token_ids) < num_tokens:
        return tree
    sampled = f"from a distribution of {max(widths)} tokens" if widths else f"token {max(tree.token_ids)}"
    advice = f"the target chooses among {num_tokens}: cut the draft's rows there (Request.num_tokens)"
    proposal.sequence.fail(GenerationError(f"a drafter sampled {sampled}, and {advice}"), "drafting")
    return EMPTY_TREE
