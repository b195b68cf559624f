"""Candidates that cost a forward of a drafter's model: asked for where that pays, for all requests together."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import partial
from time import perf_counter

from precedent.decoding.aids import Aids
from precedent.decoding.sequence import DecodingSequence
from precedent.drafters.base import Asked, Candidates, DraftSession, DrawSession, ForwardSession
from precedent.drafters.together import checked, match_budget
from precedent.planning.gate import Without
from precedent.planning.plan import Limits


@dataclass(slots=True, eq=False)
class Matched:
    """A sequence's candidates for a step; `without` describes the plan that it would have had without its forwards."""

    sequence: DecodingSequence
    candidates: list[Candidates]
    ran: dict[str, Without] = field(default_factory=dict)


@dataclass(slots=True, eq=False)
class _Wanted:
    matched: Matched
    name: str
    asked: Asked
    behind: int
    without: Without


def match(sequences: Sequence[DecodingSequence], aids: Aids) -> list[Matched]:
    """Match for each sequence, then run the forwards that pay; a drafter that fails is dropped."""
    found = [_matched(sequence, aids) for sequence in sequences]
    groups: dict[object, list[_Wanted]] = {}
    for matched in found:
        for wanted in _wanted(matched, len(sequences), aids):
            groups.setdefault(wanted.asked.session.group, []).append(wanted)
    for group in groups.values():
        _run(group, aids)
    return found


def _matched(sequence: DecodingSequence, aids: Aids) -> Matched:
    """The candidates of the drafters that need no forward."""
    matched, limits = Matched(sequence, []), sequence.limits()
    aids.leave_switched_off(sequence)
    if limits.max_depth < 1 or limits.max_nodes + limits.max_draws == 0:
        return matched
    started, budget = perf_counter(), match_budget(limits.max_nodes, sequence.last_num_fixed)
    for name, session in list(sequence.sessions.items()):
        if not isinstance(session, ForwardSession):
            match = partial(_candidates, session, budget, sequence.request.num_tokens)
            matched.candidates.append(aids.drafting(sequence, name, match, Candidates(name)))
    sequence.stats.draft_seconds += perf_counter() - started
    return matched


def _candidates(session: DraftSession | DrawSession, budget: int, num_tokens: int | None) -> Candidates:
    return checked(session.match(budget), budget, num_tokens)


def _wanted(matched: Matched, requests: int, aids: Aids) -> list[_Wanted]:
    """The forwards that pay for one sequence."""
    sequence = matched.sequence
    limits = sequence.limits(requests, requests - 1, requests - 1.0)
    if not sequence.forwards or limits.max_depth < 1 or not limits.max_nodes:
        return []
    without = aids.planning(sequence, lambda: aids.planner.without(matched.candidates, limits), None)
    if without is None:
        return []
    budget = match_budget(limits.max_nodes, sequence.last_num_fixed)
    wanted = (
        aids.drafting(sequence, name, partial(_asked, matched, name, session, budget, without, limits, aids), None)
        for name, session in sequence.forwards.items()
    )
    return [each for each in wanted if each is not None]


def _asked(
    matched: Matched, name: str, session: ForwardSession, budget: int, without: Without, limits: Limits, aids: Aids
) -> _Wanted | None:
    """A forward of one drafter, if it pays."""
    behind = session.behind
    pays = aids.planning(
        matched.sequence, lambda: aids.planner.forward_pays(name, behind, without, limits), False
    )  # fmt: skip
    return _Wanted(matched, name, Asked(session, budget), behind, without) if pays else None


def _run(group: Sequence[_Wanted], aids: Aids) -> None:
    """One forward for a group; each request pays its share of the time, and its drafter fails alone."""
    asked, started = [each.asked for each in group], perf_counter()
    try:
        asked[0].session.match_together(asked)
    except Exception as error:  # raised by the drafter itself, so it cannot be assigned to one session
        for one in asked:
            one.error = error
    share = (perf_counter() - started) / len(group)
    for each in group:
        each.matched.sequence.stats.draft_model_seconds += share
        aids.drafting(each.matched.sequence, each.name, partial(_take, each, share, len(group), aids), None)


def _take(wanted: _Wanted, seconds: float, together: int, aids: Aids) -> None:
    """Add the candidates of a forward. Raises its error."""
    if wanted.asked.error is not None:
        raise wanted.asked.error
    matched, name, behind = wanted.matched, wanted.name, wanted.behind
    found = checked(wanted.asked.candidates, wanted.asked.budget, matched.sequence.request.num_tokens)
    observe = partial(aids.planner.observe_forward_of, name, behind, seconds * 1e3, together)
    aids.planning(matched.sequence, observe, None)
    matched.candidates.append(found)
    matched.ran[name] = wanted.without
