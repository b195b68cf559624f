"""One search of a context in an index, as plain data: so that searches of many requests run in one compiled call.

A search finds the places where the context continues (`occurrences`), adds those that a trail leads to (`alignment`),
and lets them vote for a tree of candidates (`vote_tree`). Compiled code releases the GIL, so parts of a batch run
beside each other.
"""

from __future__ import annotations

from collections.abc import Sequence
from concurrent.futures import Executor
from contextlib import AbstractContextManager, nullcontext
from itertools import pairwise
from typing import NamedTuple

import numpy as np

from precedent.drafters.base import NODE, Candidates, Nodes
from precedent.drafters.matching.alignment import POINTER, WINDOW, Pointers, Trail, align
from precedent.drafters.matching.context_order import MAX_MATCH, START
from precedent.drafters.matching.occurrences import (
    HIT,
    NO_OCCURRENCES,
    OCCURRENCE,
    Occurrences,
    Text,
    VoteWeights,
    find,
)
from precedent.drafters.matching.token_index import TokenIndex, reversed_context
from precedent.drafters.matching.vote_tree import VotePrior, grow
from precedent.drafters.request import Request
from precedent.runtime.compiled import Int32s, Int64s, compiled

AT_ONCE = 8
"""Searches in one compiled call; a batch is filled up with empty ones."""

WORTH_FILLING_UP = 4
"""Fewer searches than this run one by one."""


class Search(NamedTuple):
    """All that a search reads: the index (`text` to `ends`), the context, newest token first, and how votes count.

    `near`, `limit` and `weights` are those of `occurrences.find`, `pointers` those of a trail, `budget`, `prior` and
    `end_ids` those of `vote_tree.grow`.
    """

    text: Text
    near: Int32s
    tail: Int32s
    order: Int32s
    ends: Int64s
    recent: Int32s
    weights: VoteWeights
    limit: int
    pointers: Pointers
    budget: int
    prior: VotePrior
    end_ids: Int32s


class Found(NamedTuple):
    """The candidates of a search, the heaviest vote of each, and all votes."""

    nodes: Nodes
    heaviest: Int64s
    votes: Occurrences


class SearchSession:
    """A draft session that follows one output through an index; the searches of many sessions can run together.

    Hold the `lock`, if there is one, from `search` until `take` has returned: nothing else may change the index. At
    most `limit` places of the context vote, with an estimate of `prior`. A subclass says how they weigh.
    """

    lock: AbstractContextManager[object] | None = None

    def __init__(self, source: str, request: Request, index: TokenIndex | None, prior: VotePrior, limit: int) -> None:
        self.source, self.index, self._prior, self._limit = source, index, prior, limit
        self._end_ids = np.array(sorted(request.end_token_ids), dtype=np.int32)
        self._context, self.trail = [START], Trail()
        self._found: Found | None = None

    def weighted(self) -> tuple[VoteWeights, Int32s]:
        """How sequences weigh, and an order of positions to search first."""
        raise NotImplementedError

    def search(self, budget: int) -> Search | None:
        """The search for at most `budget` candidates; None if there is nothing to search."""
        if self.index is None or budget <= 0:
            return None
        weights, near = self.weighted()
        return Search(
            self.index.text, near, *self.index.orders, reversed_context(self._context), weights, self._limit,
            self.trail.pointers, budget, self._prior, self._end_ids,
        )  # fmt: skip

    def take(self, found: Found | None) -> Candidates:
        """Turn what the search found into candidates; None if there was none."""
        self._found = found
        return Candidates(self.source) if found is None else Candidates(self.source, self.nodes(found))

    def nodes(self, found: Found) -> Nodes:
        """The candidates of a search."""
        return found.nodes

    def match(self, budget: int) -> Candidates:
        """At most `budget` fixed candidates that continue the output."""
        with nullcontext() if self.lock is None else self.lock:
            search = self.search(budget)
            return self.take(None if search is None else searched(search))

    def committed(self, token_ids: Sequence[int]) -> None:
        """Advance in the sequences that agree with the committed tokens."""
        if self.index is None:
            return
        with nullcontext() if self.lock is None else self.lock:
            votes = NO_OCCURRENCES if self._found is None else self._found.votes
            self.trail.advance(self.index.text, votes, token_ids)
        self._found, self._context = None, [*self._context, *token_ids][-MAX_MATCH:]

    def end(self) -> None:
        """Drop the index; the session proposes nothing afterwards."""
        self.index, self._context, self.trail, self._found = None, [START], Trail(), None


def searched(search: Search) -> Found:
    """Run one search."""
    return Found(*_searched(*search))


def searched_together(searches: Sequence[Search], beside: Executor | None = None, threads: int = 1) -> list[Found]:
    """Run many searches, on this thread and `threads` - 1 of the executor `beside`; results in the same order."""
    share = -(-len(searches) // threads)
    share += -share % AT_ONCE
    parts = [searches[begin : begin + share] for begin in range(0, len(searches), max(1, share))]
    others = [] if beside is None else [beside.submit(_in_turn, part) for part in parts[1:]]
    found = [each for part in parts[: 1 if others else None] for each in _in_turn(part)]
    for other in others:
        found += other.result()
    return found


def _in_turn(searches: Sequence[Search]) -> list[Found]:
    found: list[Found] = []
    for begin in range(0, len(searches), AT_ONCE):
        some = searches[begin : begin + AT_ONCE]
        if len(some) < WORTH_FILLING_UP:
            found += map(searched, some)
            continue
        nodes, heaviest, votes, ends = _searched_many((*some, *(NO_SEARCH,) * (AT_ONCE - len(some))))
        for (node, vote), (next_node, next_vote) in pairwise(ends[: len(some) + 1].tolist()):
            found.append(Found(nodes[node:next_node], heaviest[node:next_node], votes[vote:next_vote]))
    return found


@compiled
def _searched(
    text: Text,
    near: Int32s,
    tail: Int32s,
    order: Int32s,
    ends: Int64s,
    recent: Int32s,
    weights: VoteWeights,
    limit: int,
    pointers: Pointers,
    budget: int,
    prior: VotePrior,
    end_ids: Int32s,
) -> tuple[Nodes, Int64s, Occurrences]:
    """The fields of a `Search` one by one: as one tuple they make compiled code a third slower."""
    found = find(text, near, tail, order, ends, recent, weights, limit)
    votes = align(text, recent, found, pointers, weights) if pointers.size else found
    nodes, heaviest = grow(text.tokens, votes, budget, prior, end_ids)
    return nodes, heaviest, votes


@compiled
def _searched_many(searches: tuple[Search, ...]) -> tuple[Nodes, Int64s, Occurrences, Int64s]:
    """The results one behind the other, and where each ends: `[AT_ONCE + 1, 2]`, in nodes and votes."""
    most_nodes, most_votes = 0, 0
    for i in range(AT_ONCE):
        most_nodes += searches[i].budget
        most_votes += searches[i].limit + searches[i].pointers.size * WINDOW
    nodes, heaviest, votes = (
        np.empty(most_nodes, NODE),
        np.empty(most_nodes, np.int64),
        np.empty(most_votes, OCCURRENCE),
    )
    ends = np.zeros((AT_ONCE + 1, 2), np.int64)
    for i in range(AT_ONCE):
        one = searches[i]
        if not one.budget:
            ends[i + 1] = ends[i]
            continue
        own_nodes, own_heaviest, own_votes = _searched(
            one.text, one.near, one.tail, one.order, one.ends, one.recent, one.weights, one.limit,
            one.pointers, one.budget, one.prior, one.end_ids,
        )  # fmt: skip
        node, vote = ends[i, 0], ends[i, 1]
        ends[i + 1, 0], ends[i + 1, 1] = node + own_nodes.size, vote + own_votes.size
        nodes[node : ends[i + 1, 0]], heaviest[node : ends[i + 1, 0]] = own_nodes, own_heaviest
        votes[vote : ends[i + 1, 1]] = own_votes
    return nodes, heaviest, votes, ends


_NOWHERE = np.empty(0, dtype=np.int32)

NO_SEARCH = Search(
    text=Text(np.full(MAX_MATCH, START, dtype=np.int32), np.full(MAX_MATCH, -1, dtype=np.int32), MAX_MATCH),
    near=_NOWHERE,
    tail=_NOWHERE,
    order=_NOWHERE,
    ends=np.empty(0, dtype=np.int64),
    recent=_NOWHERE,
    weights=VoteWeights(np.array([(-1, 0, 0.0)], dtype=HIT), np.zeros(1), 0.0),
    limit=0,
    pointers=np.empty(0, POINTER),
    budget=0,
    prior=VotePrior(0.0, 0.0, 0.0, 0.0, 0.0),
    end_ids=_NOWHERE,
)
"""A search that finds nothing."""
