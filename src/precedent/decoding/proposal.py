"""The first half of a step: match, plan and draw for each sequence, given what the others are going to verify."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from functools import partial
from math import isfinite
from time import perf_counter

from torch import Tensor

from precedent.decoding.aids import Aids
from precedent.decoding.forwards import Matched, match
from precedent.decoding.sequence import DecodingSequence
from precedent.drafters.base import Draw, DrawSession
from precedent.planning.plan import DrawSource, Limits, Plan
from precedent.planning.planner import PLANNER
from precedent.runtime.fence import Fault
from precedent.runtime.plain_values import is_whole
from precedent.tree import EMPTY_TREE, NULL, ROOT, Candidate, CandidateTree, Sampled

MASS_ERROR = 1e-2
"""By how much a draft model's probabilities may miss a sum of 1."""


@dataclass(slots=True, eq=False)
class Proposal:
    """One sequence's proposal for a step: its plan, and its tree once the samples are drawn.

    The tree may have up to `most_nodes`: the fixed candidates, and the samples that are planned.
    """

    sequence: DecodingSequence
    plan: Plan = field(default_factory=Plan)
    tree: CandidateTree = EMPTY_TREE
    most_nodes: int = field(init=False)

    def __post_init__(self) -> None:
        self.most_nodes = len(self.plan.builder) + self.num_samples

    @property
    def num_samples(self) -> int:
        """Samples that are planned."""
        return sum(self.plan.draws.values()) + sum(self.plan.runners_up.values())


def plan(sequences: Sequence[DecodingSequence], aids: Aids) -> list[Proposal]:
    """Match and plan for each sequence, given the rows and expected tokens of the others planned so far."""
    rows, tokens, proposals = len(sequences), float(len(sequences)), list[Proposal]()
    for matched in match(sequences, aids):
        limits = matched.sequence.limits(len(sequences), rows - 1, tokens - 1.0)
        proposal = Proposal(matched.sequence, _planned(matched, limits, aids))
        proposals.append(proposal)
        rows += proposal.most_nodes
        tokens += proposal.plan.expected_tokens - 1.0
    return proposals


def _planned(matched: Matched, limits: Limits, aids: Aids) -> Plan:
    sequence = matched.sequence
    if limits.max_depth < 1 or limits.max_nodes + limits.max_draws == 0:
        return Plan()
    started, sources = perf_counter(), {}
    for name, session in list(sequence.drawing.items()):
        source = aids.drafting(sequence, name, partial(_source, session, aids), None)
        if source is not None and name in sequence.exhausted and not source.at_hand:
            aids.leave(sequence, name)
        elif source is not None:
            sources[name] = source

    def planned() -> Plan:
        return _checked_plan(aids.planner.plan(matched.candidates, sources, limits), limits)

    plan = aids.planning(sequence, planned, Plan())
    for name, without in matched.ran.items():
        aids.planning(sequence, partial(aids.planner.observe_gain, name, without, plan), None)
    sequence.last_num_fixed = len(plan.builder)
    sequence.stats.draft_seconds += perf_counter() - started
    return plan


def _source(session: DrawSession, aids: Aids) -> DrawSource:
    """What a session can draw. Raises TypeError for what is no number."""
    at_hand, behind = aids.beside.at_hand(session), session.behind
    if not is_whole(behind) or not (at_hand is None or is_whole(at_hand)):
        raise TypeError(f"expected whole numbers, got behind={behind!r} and at_hand={at_hand!r}")
    return DrawSource(behind, session.names_runners_up and at_hand is None, at_hand, session.at_once)


def _checked_plan(plan: Plan, limits: Limits) -> Plan:
    """The plan. Raises Fault if it is none, or larger than allowed."""
    if not isinstance(plan, Plan) or not isfinite(plan.expected_tokens):
        raise Fault(PLANNER, f"expected a plan with a finite number of tokens, got {type(plan).__name__}")
    if len(plan.builder) > limits.max_nodes:
        raise Fault(PLANNER, f"planned {len(plan.builder)} nodes, of at most {limits.max_nodes}")
    if not all(is_whole(number) and number >= 0 for number in (*plan.draws.values(), *plan.runners_up.values())):
        raise Fault(PLANNER, "planned draws are not whole numbers")
    return plan


@dataclass(slots=True, eq=False)
class _Planned:
    """A planned draw and its proposal; `behind` and `at_hand` are the session's values before the draw."""

    proposal: Proposal
    source: str
    draw: Draw
    group: object
    behind: int
    at_hand: int


def draw(proposals: Sequence[Proposal], aids: Aids) -> None:
    """Draw as planned, together for sessions of the same group, and build the trees."""
    groups: dict[object, list[_Planned]] = {}
    for proposal in proposals:
        for source, number in proposal.plan.draws.items():
            sequence = proposal.sequence
            begin = partial(_planned_draw, proposal, source, number, aids)
            if number and (planned := aids.drafting(sequence, source, begin, None)) is not None:
                groups.setdefault(planned.group, []).append(planned)
    for group in groups.values():
        _draw_together(group, aids)
    for proposal in proposals:
        proposal.tree = _sound_tree(proposal, proposal.plan.builder.build(), aids)


def _planned_draw(proposal: Proposal, source: str, number: int, aids: Aids) -> _Planned:
    session = proposal.sequence.drawing[source]
    draw = Draw(session, proposal.plan.builder, number, proposal.sequence.rng())
    return _Planned(proposal, source, draw, session.group, session.behind, aids.beside.at_hand(session) or 0)


def _draw_together(group: Sequence[_Planned], aids: Aids) -> None:
    """Draw for the sessions of one group and tell the planner the cost; each session fails alone."""
    started, draws = perf_counter(), [each.draw for each in group]
    try:
        draws[0].session.draw_together(draws)
    except Exception as error:  # raised by the drafter itself, so it cannot be assigned to one session
        for asked in draws:
            asked.error = error
    taken = perf_counter() - started
    for each in group:
        each.proposal.sequence.stats.draft_model_seconds += taken
        aids.drafting(each.proposal.sequence, each.source, partial(_drawn, each, len(group), aids), None)


def _drawn(planned: _Planned, together: int, aids: Aids) -> None:
    """Learn what a draw cost, and draw its runners-up. Raises its error; what was sampled stays in the tree."""
    draw, sequence = planned.draw, planned.proposal.sequence
    if draw.error is not None:
        raise draw.error
    if not planned.at_hand:  # otherwise the samples were drawn ahead and cost nothing now
        observe = partial(aids.planner.observe_draws, planned.source, draw.number, planned.behind)
        aids.planning(sequence, partial(observe, draw.seconds * 1e3, together), None)
    number = planned.proposal.plan.runners_up.get(planned.source, 0)
    if number:
        started = perf_counter()
        draw.session.draw_runners_up(draw.builder, number, draw.rng)
        sequence.stats.draft_model_seconds += perf_counter() - started


def _sound_tree(proposal: Proposal, tree: CandidateTree, aids: Aids) -> CandidateTree:
    """The tree without candidates that the target's rows cannot verify; the drafters that made them are dropped.

    Whether a sample is left out depends on its distribution and its place, never on its token: that keeps the output
    distribution.
    """
    num_tokens = proposal.sequence.request.num_tokens
    if not proposal.num_samples and (num_tokens is None or max(tree.token_ids, default=0) < num_tokens):
        return tree
    faults = faults_of(tree.candidates, tree, proposal.most_nodes, num_tokens)
    if not faults:
        return tree
    for candidate, error in faults.items():
        names = proposal.plan.draws if candidate.child == NULL else tree.sources[candidate.child]
        for name in [name for name in names if name in proposal.sequence.sessions]:
            aids.drop(proposal.sequence, name, error)
    proposal.plan = Plan()  # its numbers of nodes are wrong now: nothing is learned from this step
    return tree.without(faults.__contains__)


def faults_of(
    candidates: Iterable[Candidate], tree: CandidateTree, most_nodes: int, num_tokens: int | None
) -> dict[Candidate, Exception]:
    """Those of a tree's candidates that cannot be verified, and why: it may have `most_nodes` nodes."""
    found = {}
    for each in candidates:
        error: Exception | None = None
        if each.child >= most_nodes:
            error = ValueError(f"a drafter drew more than planned: the tree may have {most_nodes} nodes")
        elif not ROOT <= each.parent < each.child and each.child != NULL:
            error = ValueError(f"node {each.child} hangs below {each.parent}, which does not come before it")
        elif isinstance(each.distribution, Sampled):
            error = _fault_of_row(each.distribution.row, num_tokens)
        if error is None and each.child != NULL:
            error = _fault_of_token(tree.token_ids[each.child], num_tokens)
        if error is not None:
            found[each] = error
    return found


def _fault_of_row(row: Tensor, num_tokens: int | None) -> Exception | None:
    """Why a row is no distribution over the target's tokens; None if it is one.

    On a GPU only its width is checked: reading its numbers would wait once more, and the draft model has checked them.
    """
    if num_tokens is not None and row.shape != (num_tokens,):
        return ValueError(
            f"a drafter sampled from a distribution of shape {tuple(row.shape)}, and the target chooses among "
            f"{num_tokens} tokens: cut the draft's rows there (Request.num_tokens)"
        )
    if row.is_cpu and not (abs(float(row.sum()) - 1.0) < MASS_ERROR and float(row.min()) >= 0.0):
        return ValueError("a drafter sampled from a row that is no distribution: its numbers do not sum to 1")
    return None


def _fault_of_token(token: int, num_tokens: int | None) -> Exception | None:
    if token < 0 or (num_tokens is not None and token >= num_tokens):
        return ValueError(f"a drafter proposed token {token}, and the target chooses among {num_tokens}")
    return None
