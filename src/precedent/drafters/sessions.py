"""All drafting sessions of one request, or of the requests of a batch: their begin, what they propose, their end."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial

import numpy as np

from precedent.drafters.base import NODE, Candidates, Drafter, DraftSession, Nodes, Session
from precedent.drafters.request import Request
from precedent.runtime.compiled import compiled
from precedent.runtime.fence import Fences
from precedent.tree import ROOT

FEW = 8
"""Fewest candidates requested from each drafter."""


def match_budget(most: int, last: int | None, one_path: bool = False) -> int:
    """Candidates to request from each drafter: twice what the last plan used (`last`); at first, the `most` allowed.

    For one path it is twice the `most`, because a drafter's nodes are a tree of which the path is a part.
    """
    if one_path:
        return 2 * most
    return most if last is None else min(most, max(FEW, 2 * last))


@dataclass(slots=True, eq=False)
class Matching:
    """One request's part of a batch: its sessions by drafter, what is asked of them, and what they propose.

    `failed` has the errors of the sessions that have no `candidates` because they failed.
    """

    sessions: Mapping[str, DraftSession]
    budget: int
    num_tokens: int | None
    candidates: list[Candidates] = field(default_factory=list)
    failed: dict[str, Exception] = field(default_factory=dict)


def match_together(batch: Sequence[Matching]) -> None:
    """Match every session of each request; each fails alone."""
    for each in batch:
        for name, session in each.sessions.items():
            try:
                each.candidates.append(checked(session.match(each.budget), each.budget, each.num_tokens))
            except Exception as error:
                each.failed[name] = error


def begin_early(drafters: Mapping[str, Drafter], request: Request, fences: Fences) -> dict[str, Session | None]:
    """The sessions of those drafters that begin on the caller's thread; None for one that fails or is switched off."""
    early = {name: drafter for name, drafter in drafters.items() if getattr(drafter, "begins_early", False)}
    return {name: fences.of(name).run(partial(_begun, drafter, request), None) for name, drafter in early.items()}


def begin_all(
    drafters: Mapping[str, Drafter], request: Request, fences: Fences, early: Mapping[str, Session | None] | None = None
) -> dict[str, Session]:
    """A session of every drafter, begun `early` or now; one that fails to begin, or is switched off, is left out."""
    early = early or {}
    begun = {
        name: early[name] if name in early else fences.of(name).run(partial(_begun, drafter, request), None)
        for name, drafter in drafters.items()
    }
    return {name: session for name, session in begun.items() if session is not None}


def _begun(drafter: Drafter, request: Request) -> Session:
    session = drafter.begin(request)
    if not all(callable(getattr(session, call, None)) for call in ("match", "committed", "end")):
        raise TypeError(f"expected a drafting session, got {type(session).__name__}")
    return session


def end_all(sessions: Mapping[str, Session], fences: Fences) -> None:
    """End every session, even if an earlier one fails."""
    for name, session in sessions.items():
        try:
            session.end()
        except Exception as error:
            fences.of(name).fault(error)


def checked(candidates: Candidates, budget: int, num_tokens: int | None) -> Candidates:
    """The candidates, or none if one of them is outside `num_tokens` (None: unknown): a damaged cache may name any.

    Raises TypeError or ValueError for what no drafter may answer: more than `budget`, what is no trie, or estimates
    that are no probabilities.
    """
    if not isinstance(candidates, Candidates) or not isinstance(candidates.nodes, np.ndarray):
        raise TypeError(f"expected Candidates, got {type(candidates).__name__}")
    nodes = candidates.nodes
    if nodes.dtype != NODE or nodes.ndim != 1:
        raise TypeError(f"expected a row of NODE records, got {nodes.dtype} in {nodes.ndim} dimensions")
    if not nodes.size:
        return candidates
    if nodes.size > max(budget, 0):
        raise ValueError(f"expected at most {budget} candidates, got {nodes.size}")
    is_trie, exist = _sound(nodes, num_tokens or 0)
    if not is_trie:
        raise ValueError("the candidates are no trie with estimates between 0 and 1")
    return candidates if exist or num_tokens is None else Candidates(candidates.source)


@compiled
def _sound(nodes: Nodes, num_tokens: int) -> tuple[bool, bool]:
    """Whether candidates are a trie with estimates between 0 and 1, and whether all their tokens exist."""
    is_trie, exist = True, True
    for i in range(nodes.size):
        node = nodes[i]
        is_trie &= ROOT <= node.parent < i and 0.0 <= node.estimate <= 1.0
        exist &= 0 <= node.token_id < num_tokens
    return is_trie, exist
