"""Candidates that cost a forward of a drafter's model: asked for where that pays, for all requests together."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from time import perf_counter

from precedent.decoding.sequence import DecodingSequence
from precedent.drafters.base import Asked, Candidates, ForwardSession
from precedent.drafters.together import known, match_budget
from precedent.planning.forward_gate import Without
from precedent.planning.planner import Planner


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


def match(sequences: Sequence[DecodingSequence], planner: Planner) -> list[Matched]:
    """Match for each sequence, then run the forwards that pay; a sequence that fails is left out."""
    found = [matched for sequence in sequences if (matched := _matched(sequence)) is not None]
    groups: dict[object, list[_Wanted]] = {}
    for matched in found:
        for wanted in _wanted(matched, len(sequences), planner):
            groups.setdefault(wanted.asked.session.group, []).append(wanted)
    for group in groups.values():
        _run(group, planner)
    return [matched for matched in found if matched.sequence.error is None]


def _matched(sequence: DecodingSequence) -> Matched | None:
    limits = sequence.limits()
    if limits.max_depth < 1 or limits.max_nodes + limits.max_draws == 0:
        return Matched(sequence, [])
    started = perf_counter()
    try:
        return Matched(sequence, sequence.match())
    except Exception as error:
        sequence.fail(error, "drafting")
        return None
    finally:
        sequence.stats.draft_seconds += perf_counter() - started


def _wanted(matched: Matched, requests: int, planner: Planner) -> list[_Wanted]:
    """The forwards that pay for one sequence."""
    sequence = matched.sequence
    sessions: Mapping[str, ForwardSession] = sequence.forwards
    limits = sequence.limits(requests, requests - 1, requests - 1.0)
    if not sessions or limits.max_depth < 1 or not limits.max_nodes:
        return []
    without, budget = (
        planner.without(matched.candidates, limits),
        match_budget(limits.max_nodes, sequence.last_num_fixed),
    )
    return [
        _Wanted(matched, name, Asked(session, budget), session.behind, without)
        for name, session in sessions.items()
        if planner.forward_pays(name, session.behind, without, limits)
    ]


def _run(group: Sequence[_Wanted], planner: Planner) -> None:
    """One forward for a group; each request pays its share of the time and fails alone."""
    asked, started = [each.asked for each in group], perf_counter()
    try:
        asked[0].session.match_together(asked)
    except Exception as error:  # raised by the drafter itself, so it cannot be assigned to one session
        for one in asked:
            one.error = error
    share = (perf_counter() - started) / len(group)
    for each in group:
        sequence = each.matched.sequence
        sequence.stats.draft_model_seconds += share
        if each.asked.error is not None:
            sequence.fail(each.asked.error, "drafting")
            continue
        planner.observe_forward_of(each.name, each.behind, share * 1e3, len(group))
        each.matched.candidates.append(known(each.asked.candidates, sequence.request.num_tokens))
        each.matched.ran[each.name] = each.without
