"""Proposes a candidate tree for each sequence: match, run the forwards that pay, plan, draw.

Each plan knows what the sequences before it are going to verify in the same step.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from functools import partial
from math import isfinite
from time import perf_counter
from typing import Generic, TypeVar

from precedent.decoding.aids import Aids
from precedent.decoding.sequence import DecodingSequence
from precedent.drafters.base import Asked, Candidates, DraftSession, Draw, DrawSession, DrawSource, ForwardSession
from precedent.drafters.sessions import checked, match_budget
from precedent.planning.gate import Without
from precedent.planning.planner import PLANNER, Limits, Plan
from precedent.runtime.fence import Fault
from precedent.runtime.plain_values import is_whole
from precedent.tree import EMPTY_TREE, NULL, ROOT, Candidate, CandidateTree, Sampled

MASS_ERROR = 1e-2
"""By how much a draft model's probabilities may miss a sum of 1."""

Work = TypeVar("Work", Asked, Draw)


@dataclass(slots=True, eq=False)
class Proposal:
    """One sequence's proposal for a step: its candidates, the plan for them, and the tree once samples are drawn.

    `forwards` are the drafters that ran one for it, `without` describes the plan that it would have had without them.
    The tree may have up to `most_nodes`: the fixed candidates, and the samples that are planned.
    """

    sequence: DecodingSequence
    plan: Plan = field(default_factory=Plan)
    tree: CandidateTree = EMPTY_TREE
    candidates: list[Candidates] = field(default_factory=list)
    forwards: list[str] = field(default_factory=list)
    without: Without | None = None
    most_nodes: int = 0


def propose(sequences: Sequence[DecodingSequence], aids: Aids) -> list[Proposal]:
    """Match, plan and draw for each sequence. Nothing that fails here fails a sequence."""
    proposals = plan(sequences, aids)
    draw(proposals, aids)
    return proposals


def plan(sequences: Sequence[DecodingSequence], aids: Aids) -> list[Proposal]:
    """Match and plan for each sequence, given the rows and expected tokens of the others planned so far."""
    proposals, number = [Proposal(sequence) for sequence in sequences], len(sequences)
    for proposal in proposals:
        _match(proposal, aids)
    forwards = [job for proposal in proposals for job in _wanted_forwards(proposal, number, aids)]
    _run_together(forwards, lambda asked: asked[0].session.match_together(asked), _take_candidates, aids)
    rows, tokens = number, float(number)
    for proposal in proposals:
        _plan(proposal, proposal.sequence.limits(number, rows - 1, tokens - 1.0), aids)
        rows += proposal.most_nodes
        tokens += proposal.plan.expected_tokens - 1.0
    return proposals


def draw(proposals: Sequence[Proposal], aids: Aids) -> None:
    """Draw as planned, together for sessions of the same group, and build the trees."""
    draws = []
    for proposal in proposals:
        for name, number in proposal.plan.draws.items():
            begin = partial(_planned_draw, proposal, name, number)
            if number and (job := aids.drafting(proposal.sequence, name, begin, None)) is not None:
                draws.append(job)
    _run_together(draws, lambda asked: asked[0].session.draw_together(asked), _finish_draw, aids)
    for proposal in proposals:
        proposal.tree = _sound_tree(proposal, proposal.plan.builder.build(), aids)


# Work that drafters do for several sequences at once


@dataclass(slots=True, eq=False)
class _Job(Generic[Work]):
    """What one sequence's drafter is asked, and its session's `group` and `behind` before that."""

    proposal: Proposal
    name: str
    asked: Work
    group: object
    behind: int

    @classmethod
    def of(cls, proposal: Proposal, name: str, asked: Work) -> _Job[Work]:
        return cls(proposal, name, asked, asked.session.group, asked.session.behind)


def _run_together(
    jobs: Iterable[_Job[Work]],
    run: Callable[[list[Work]], None],
    finish: Callable[[_Job[Work], float, int, Aids], None],
    aids: Aids,
) -> None:
    """Run the jobs of each group together, then `finish` each, given the seconds and their number; each fails alone."""
    groups: dict[object, list[_Job[Work]]] = {}
    for job in jobs:
        groups.setdefault(job.group, []).append(job)
    for group in groups.values():
        asked, started = [job.asked for job in group], perf_counter()
        try:
            run(asked)
        except Exception as error:  # raised by the drafter itself, so it cannot be assigned to one session
            for one in asked:
                one.error = error
        seconds = perf_counter() - started
        for job in group:
            job.proposal.sequence.stats.draft_model_seconds += seconds
            finishing = partial(finish, job, seconds, len(group), aids)
            aids.drafting(job.proposal.sequence, job.name, finishing, None)


# Candidates


def _match(proposal: Proposal, aids: Aids) -> None:
    """Ask the drafters that need no forward for candidates."""
    sequence, limits = proposal.sequence, proposal.sequence.limits()
    aids.leave_switched_off(sequence)
    if not _allows_any(limits):
        return
    started, budget = perf_counter(), match_budget(limits.max_nodes, sequence.last_num_fixed, limits.one_path)
    for name, session in list(sequence.sessions.items()):
        if not isinstance(session, ForwardSession):
            match = partial(_checked_match, session, budget, sequence.request.num_tokens)
            proposal.candidates.append(aids.drafting(sequence, name, match, Candidates(name)))
    sequence.stats.draft_seconds += perf_counter() - started


def _allows_any(limits: Limits) -> bool:
    return limits.max_depth >= 1 and limits.max_nodes + limits.max_draws > 0


def _checked_match(session: DraftSession | DrawSession, budget: int, num_tokens: int | None) -> Candidates:
    return checked(session.match(budget), budget, num_tokens)


def _wanted_forwards(proposal: Proposal, requests: int, aids: Aids) -> list[_Job[Asked]]:
    """The drafters' forwards that pay for a sequence."""
    sequence = proposal.sequence
    limits = sequence.limits(requests, requests - 1, requests - 1.0)
    if not sequence.forwards or limits.max_depth < 1 or not limits.max_nodes:
        return []
    without = aids.planning(sequence, lambda: aids.planner.without(proposal.candidates, limits), None)
    if without is None:
        return []
    proposal.without, wanted = without, []
    for name, session in sequence.forwards.items():
        asked = Asked(session, match_budget(limits.max_nodes, sequence.last_num_fixed))
        job = aids.drafting(sequence, name, partial(_Job.of, proposal, name, asked), None)
        if job is not None:
            pays = partial(aids.planner.forward_pays, name, job.behind, without, limits)
            wanted += [job] if aids.planning(sequence, pays, False) else []
    return wanted


def _take_candidates(job: _Job[Asked], seconds: float, together: int, aids: Aids) -> None:
    """Add the candidates of a forward; each request pays its share of the time. Raises its error."""
    if job.asked.error is not None:
        raise job.asked.error
    sequence, milliseconds = job.proposal.sequence, seconds / together * 1e3
    found = checked(job.asked.candidates, job.asked.budget, sequence.request.num_tokens)
    observe = partial(aids.planner.observe_forward_of, job.name, job.behind, milliseconds, together)
    aids.planning(sequence, observe, None)
    job.proposal.candidates.append(found)
    job.proposal.forwards.append(job.name)


# Plans


def _plan(proposal: Proposal, limits: Limits, aids: Aids) -> None:
    sequence, without = proposal.sequence, proposal.without
    if not _allows_any(limits):
        return
    started, sources = perf_counter(), dict[str, DrawSource]()
    for name, session in sequence.drawing.items():
        source = aids.drafting(sequence, name, partial(_checked_source, session), None)
        if source is not None:
            sources[name] = source
    act = partial(aids.planner.plan, proposal.candidates, sources, limits)
    proposal.plan = plan = aids.planning(sequence, lambda: _checked_plan(act(), limits), Plan())
    proposal.most_nodes = len(plan.builder) + _num_samples(plan)
    if without is not None:
        for name in proposal.forwards:
            aids.planning(sequence, partial(aids.planner.observe_gain, name, without, plan), None)
    sequence.last_num_fixed = len(plan.builder)
    sequence.stats.draft_seconds += perf_counter() - started


def _checked_source(session: DrawSession) -> DrawSource:
    source = session.source()
    if not is_whole(source.behind):
        raise TypeError(f"expected a whole number, got behind={source.behind!r}")
    return source


def _num_samples(plan: Plan) -> int:
    return sum(plan.draws.values()) + sum(plan.runners_up.values())


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


def _planned_draw(proposal: Proposal, name: str, number: int) -> _Job[Draw]:
    session = proposal.sequence.drawing[name]
    return _Job.of(proposal, name, Draw(session, proposal.plan.builder, number, proposal.sequence.rng()))


def _finish_draw(job: _Job[Draw], seconds: float, together: int, aids: Aids) -> None:
    """Learn what a draw cost, and draw its runners-up. Raises its error; what was sampled stays in the tree."""
    draw, sequence = job.asked, job.proposal.sequence
    if draw.error is not None:
        raise draw.error
    observe = partial(aids.planner.observe_draws, job.name, draw.number, job.behind)
    aids.planning(sequence, partial(observe, draw.seconds * 1e3, together), None)
    number = job.proposal.plan.runners_up.get(job.name, 0)
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
    if not _num_samples(proposal.plan) and (num_tokens is None or max(tree.token_ids, default=0) < num_tokens):
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
    found = {each: _fault_of(each, tree, most_nodes, num_tokens) for each in candidates}
    return {each: ValueError(f"a drafter's {fault}") for each, fault in found.items() if fault}


def _fault_of(each: Candidate, tree: CandidateTree, most_nodes: int, num_tokens: int | None) -> str:
    """Say why a candidate cannot be verified; empty if it can.

    Of a row on a GPU only the width is checked: reading its numbers would wait once more, and the draft model has
    checked them.
    """
    if each.child >= most_nodes:
        return f"tree has more than the {most_nodes} nodes that were planned"
    if not ROOT <= each.parent < each.child and each.child != NULL:
        return f"node {each.child} hangs below {each.parent}, which does not come before it"
    if isinstance(each.distribution, Sampled):
        row = each.distribution.row
        if num_tokens is not None and row.shape != (num_tokens,):
            return (
                f"sample comes from a distribution of shape {tuple(row.shape)}, and the target chooses among "
                f"{num_tokens} tokens: cut the draft's rows there (Request.num_tokens)"
            )
        if row.is_cpu and not (abs(float(row.sum()) - 1.0) < MASS_ERROR and float(row.min()) >= 0.0):
            return "sample comes from a row that is not a distribution: its numbers do not sum to 1"
    token = 0 if each.child == NULL else tree.token_ids[each.child]
    if token < 0 or (num_tokens is not None and token >= num_tokens):
        return f"candidate is token {token}, and the target chooses among {num_tokens}"
    return ""
