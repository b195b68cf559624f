"""Proposes a candidate tree for each sequence: match, run the forwards that pay, plan, draw.

Each plan knows what the sequences before it are going to verify in the same step.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from functools import partial
from math import isfinite
from time import perf_counter

from torch import Tensor

from precedent.decoding.aids import Aids
from precedent.decoding.sequence import DecodingSequence
from precedent.drafters.base import Asked, Candidates, DraftSession, Draw, DrawSession, DrawSource, ForwardSession
from precedent.drafters.together import checked, match_budget
from precedent.planning.gate import Without
from precedent.planning.plan import Limits, Plan
from precedent.planning.planner import PLANNER
from precedent.runtime.fence import Fault
from precedent.runtime.plain_values import is_whole
from precedent.tree import EMPTY_TREE, NULL, ROOT, Candidate, CandidateTree, Sampled

MASS_ERROR = 1e-2
"""By how much a draft model's probabilities may miss a sum of 1."""


@dataclass(slots=True, eq=False)
class Proposal:
    """One sequence's proposal for a step: its candidates, the plan for them, and the tree once samples are drawn.

    `without` describes the plans that it would have had without the forwards that drafters ran for it. The tree may
    have up to `most_nodes`: the fixed candidates, and the samples that are planned.
    """

    sequence: DecodingSequence
    plan: Plan = field(default_factory=Plan)
    tree: CandidateTree = EMPTY_TREE
    candidates: list[Candidates] = field(default_factory=list)
    without: dict[str, Without] = field(default_factory=dict)
    most_nodes: int = field(init=False)

    def __post_init__(self) -> None:
        self.take(self.plan)

    def take(self, plan: Plan) -> None:
        """Set the plan."""
        self.plan, self.most_nodes = plan, len(plan.builder) + num_samples(plan)


def num_samples(plan: Plan) -> int:
    """Return the number of samples that are planned."""
    return sum(plan.draws.values()) + sum(plan.runners_up.values())


def propose(sequences: Sequence[DecodingSequence], aids: Aids) -> list[Proposal]:
    """Match, plan and draw for each sequence. Nothing that fails here fails a sequence."""
    proposals = plan(sequences, aids)
    draw(proposals, aids)
    return proposals


def plan(sequences: Sequence[DecodingSequence], aids: Aids) -> list[Proposal]:
    """Match and plan for each sequence, given the rows and expected tokens of the others planned so far."""
    proposals = [Proposal(sequence) for sequence in sequences]
    for proposal in proposals:
        _match(proposal, aids)
    _run_forwards(proposals, aids)
    rows, tokens = len(sequences), float(len(sequences))
    for proposal in proposals:
        _plan(proposal, proposal.sequence.limits(len(sequences), rows - 1, tokens - 1.0), aids)
        rows += proposal.most_nodes
        tokens += proposal.plan.expected_tokens - 1.0
    return proposals


# Candidates


def _match(proposal: Proposal, aids: Aids) -> None:
    """Ask the drafters that need no forward for candidates."""
    sequence, limits = proposal.sequence, proposal.sequence.limits()
    aids.leave_switched_off(sequence)
    if limits.max_depth < 1 or limits.max_nodes + limits.max_draws == 0:
        return
    started, budget = perf_counter(), match_budget(limits.max_nodes, sequence.last_num_fixed)
    for name, session in list(sequence.sessions.items()):
        if not isinstance(session, ForwardSession):
            match = partial(_checked_match, session, budget, sequence.request.num_tokens)
            proposal.candidates.append(aids.drafting(sequence, name, match, Candidates(name)))
    sequence.stats.draft_seconds += perf_counter() - started


def _checked_match(session: DraftSession | DrawSession, budget: int, num_tokens: int | None) -> Candidates:
    return checked(session.match(budget), budget, num_tokens)


@dataclass(slots=True, eq=False)
class _WantedForward:
    """A drafter's forward that pays for one sequence: what is asked, and what the drafter must compute first."""

    proposal: Proposal
    name: str
    asked: Asked
    behind: int
    without: Without


def _run_forwards(proposals: Sequence[Proposal], aids: Aids) -> None:
    """Run the drafters' forwards that pay, one for all sequences whose sessions share a group."""
    groups: dict[object, list[_WantedForward]] = {}
    for proposal in proposals:
        for wanted in _wanted_forwards(proposal, len(proposals), aids):
            groups.setdefault(wanted.asked.session.group, []).append(wanted)
    for group in groups.values():
        _run_forward(group, aids)


def _wanted_forwards(proposal: Proposal, requests: int, aids: Aids) -> list[_WantedForward]:
    sequence = proposal.sequence
    limits = sequence.limits(requests, requests - 1, requests - 1.0)
    if not sequence.forwards or limits.max_depth < 1 or not limits.max_nodes:
        return []
    without = aids.planning(sequence, lambda: aids.planner.without(proposal.candidates, limits), None)
    if without is None:
        return []
    budget = match_budget(limits.max_nodes, sequence.last_num_fixed)

    def wanted(name: str, session: ForwardSession) -> _WantedForward | None:
        behind = session.behind
        pays = aids.planning(sequence, lambda: aids.planner.forward_pays(name, behind, without, limits), False)
        return _WantedForward(proposal, name, Asked(session, budget), behind, without) if pays else None

    found = [
        aids.drafting(sequence, name, partial(wanted, name, session), None)
        for name, session in sequence.forwards.items()
    ]
    return [each for each in found if each is not None]


def _run_forward(group: Sequence[_WantedForward], aids: Aids) -> None:
    """Run one forward for a group; each request pays its share of the time, and its drafter fails alone."""
    asked, started = [each.asked for each in group], perf_counter()
    try:
        asked[0].session.match_together(asked)
    except Exception as error:  # raised by the drafter itself, so it cannot be assigned to one session
        for one in asked:
            one.error = error
    share = (perf_counter() - started) / len(group)
    for each in group:
        each.proposal.sequence.stats.draft_model_seconds += share
        take = partial(_take_candidates, each, share, len(group), aids)
        aids.drafting(each.proposal.sequence, each.name, take, None)


def _take_candidates(wanted: _WantedForward, seconds: float, together: int, aids: Aids) -> None:
    """Add the candidates of a forward. Raises its error."""
    if wanted.asked.error is not None:
        raise wanted.asked.error
    proposal, name, sequence = wanted.proposal, wanted.name, wanted.proposal.sequence
    found = checked(wanted.asked.candidates, wanted.asked.budget, sequence.request.num_tokens)
    observe = partial(aids.planner.observe_forward_of, name, wanted.behind, seconds * 1e3, together)
    aids.planning(sequence, observe, None)
    proposal.candidates.append(found)
    proposal.without[name] = wanted.without


# Plans


def _plan(proposal: Proposal, limits: Limits, aids: Aids) -> None:
    sequence = proposal.sequence
    if limits.max_depth < 1 or limits.max_nodes + limits.max_draws == 0:
        return
    started, sources = perf_counter(), dict[str, DrawSource]()
    for name, session in sequence.drawing.items():
        source = aids.drafting(sequence, name, partial(_checked_source, session), None)
        if source is not None:
            sources[name] = source
    planned = aids.planning(
        sequence, lambda: _checked_plan(aids.planner.plan(proposal.candidates, sources, limits), limits), Plan()
    )
    proposal.take(planned)
    for name, without in proposal.without.items():
        aids.planning(sequence, partial(aids.planner.observe_gain, name, without, planned), None)
    sequence.last_num_fixed = len(planned.builder)
    sequence.stats.draft_seconds += perf_counter() - started


def _checked_source(session: DrawSession) -> DrawSource:
    source = session.source()
    if not is_whole(source.behind):
        raise TypeError(f"expected a whole number, got behind={source.behind!r}")
    return source


def _checked_plan(plan: Plan, limits: Limits) -> Plan:
    """Return the plan. Raises Fault if it is not a plan, or larger than allowed."""
    if not isinstance(plan, Plan) or not isfinite(plan.expected_tokens):
        raise Fault(PLANNER, f"expected a plan with a finite number of tokens, got {type(plan).__name__}")
    if len(plan.builder) > limits.max_nodes:
        raise Fault(PLANNER, f"planned {len(plan.builder)} nodes, of at most {limits.max_nodes}")
    if not all(is_whole(number) and number >= 0 for number in (*plan.draws.values(), *plan.runners_up.values())):
        raise Fault(PLANNER, "planned draws are not whole numbers")
    return plan


# Samples


@dataclass(slots=True, eq=False)
class _PlannedDraw:
    """A planned draw of one sequence; `behind` is the session's value before it."""

    proposal: Proposal
    source: str
    draw: Draw
    group: object
    behind: int


def draw(proposals: Sequence[Proposal], aids: Aids) -> None:
    """Draw as planned, together for sessions of the same group, and build the trees."""
    groups: dict[object, list[_PlannedDraw]] = {}
    for proposal in proposals:
        for source, number in proposal.plan.draws.items():
            begin = partial(_planned_draw, proposal, source, number)
            if number and (planned := aids.drafting(proposal.sequence, source, begin, None)) is not None:
                groups.setdefault(planned.group, []).append(planned)
    for group in groups.values():
        _draw_together(group, aids)
    for proposal in proposals:
        proposal.tree = _sound_tree(proposal, proposal.plan.builder.build(), aids)


def _planned_draw(proposal: Proposal, source: str, number: int) -> _PlannedDraw:
    session = proposal.sequence.drawing[source]
    draw = Draw(session, proposal.plan.builder, number, proposal.sequence.rng())
    return _PlannedDraw(proposal, source, draw, session.group, session.behind)


def _draw_together(group: Sequence[_PlannedDraw], aids: Aids) -> None:
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
        aids.drafting(each.proposal.sequence, each.source, partial(_finish_draw, each, len(group), aids), None)


def _finish_draw(planned: _PlannedDraw, together: int, aids: Aids) -> None:
    """Learn what a draw cost, and draw its runners-up. Raises its error; what was sampled stays in the tree."""
    draw, sequence = planned.draw, planned.proposal.sequence
    if draw.error is not None:
        raise draw.error
    observe = partial(aids.planner.observe_draws, planned.source, draw.number, planned.behind)
    aids.planning(sequence, partial(observe, draw.seconds * 1e3, together), None)
    number = planned.proposal.plan.runners_up.get(planned.source, 0)
    if number:
        started = perf_counter()
        draw.session.draw_runners_up(draw.builder, number, draw.rng)
        sequence.stats.draft_model_seconds += perf_counter() - started


# Checks of what drafters added


def _sound_tree(proposal: Proposal, tree: CandidateTree, aids: Aids) -> CandidateTree:
    """The tree without candidates that the target's rows cannot verify; the drafters that made them are dropped.

    Whether a sample is left out depends on its distribution and its place, never on its token: that keeps the output
    distribution.
    """
    num_tokens = proposal.sequence.request.num_tokens
    if not num_samples(proposal.plan) and (num_tokens is None or max(tree.token_ids, default=0) < num_tokens):
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
    """Return those of a tree's candidates that cannot be verified, and why: it may have `most_nodes` nodes."""
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
    """Say why a row is not a distribution over the target's tokens; None if it is.

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
