"""Draft sessions that follow one output through an index of texts.

A search finds the places where the context continues (`occurrences`), adds those that a trail leads to (`alignment`),
and lets them vote for a tree of candidates (`vote_tree`).
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import NamedTuple

import numpy as np

from precedent.drafters.base import Candidates, Nodes
from precedent.drafters.matching.alignment import Pointers, Trail, align
from precedent.drafters.matching.context_order import MAX_MATCH, START
from precedent.drafters.matching.occurrences import NO_OCCURRENCES, Occurrences, Text, VoteWeights, find
from precedent.drafters.matching.token_index import TokenIndex, reversed_context
from precedent.drafters.matching.vote_tree import VotePrior, grow
from precedent.drafters.request import Request
from precedent.runtime.compiled import Int32s, Int64s, compiled


class Found(NamedTuple):
    """The candidates of a search, the heaviest vote of each, and all votes."""

    nodes: Nodes
    heaviest: Int64s
    votes: Occurrences


class SearchSession:
    """A draft session that follows one output through an index.

    Nothing else may change the index while `lock` is held. At most `limit` places of the context vote, with an estimate
    of `prior`. A subclass says how they weigh.
    """

    lock: AbstractContextManager[object] = nullcontext()

    def __init__(self, source: str, request: Request, index: TokenIndex | None, prior: VotePrior, limit: int) -> None:
        self.source, self.index, self._prior, self._limit = source, index, prior, limit
        self._end_ids = np.array(sorted(request.end_token_ids), dtype=np.int32)
        self._context, self.trail = [START], Trail()
        self._found: Found | None = None

    def weighted(self) -> tuple[VoteWeights, Int32s]:
        """How sequences weigh, and an order of positions to search first."""
        raise NotImplementedError

    def match(self, budget: int) -> Candidates:
        """At most `budget` fixed candidates that continue the output."""
        self._found, index = None, self.index
        if index is None or budget <= 0:
            return Candidates(self.source)
        with self.lock:
            weights, near = self.weighted()
            self._found = found = Found(
                *_searched(
                    index.text, near, index.order, reversed_context(self._context), weights, self._limit,
                    self.trail.pointers, budget, self._prior, self._end_ids,
                )
            )  # fmt: skip
        return Candidates(self.source, self.nodes(found))

    def nodes(self, found: Found) -> Nodes:
        """The candidates of a search."""
        return found.nodes

    def committed(self, token_ids: Sequence[int]) -> None:
        """Advance in the sequences that agree with the committed tokens."""
        if self.index is None:
            return
        with self.lock:
            votes = NO_OCCURRENCES if self._found is None else self._found.votes
            self.trail.advance(self.index.text, votes, token_ids)
        self._found, self._context = None, [*self._context, *token_ids][-MAX_MATCH:]

    def end(self) -> None:
        """Drop the index; the session proposes nothing afterwards."""
        self.index, self._context, self.trail, self._found = None, [START], Trail(), None


@compiled
def _searched(
    text: Text,
    near: Int32s,
    order: Int32s,
    recent: Int32s,
    weights: VoteWeights,
    limit: int,
    pointers: Pointers,
    budget: int,
    prior: VotePrior,
    end_ids: Int32s,
) -> tuple[Nodes, Int64s, Occurrences]:
    """One search in compiled code; as one tuple its arguments would make it a third slower."""
    found = find(text, near, order, recent, weights, limit)
    votes = align(text, recent, found, pointers, weights) if pointers.size else found
    nodes, heaviest = grow(text.tokens, votes, weights.length, budget, prior, end_ids)
    return nodes, heaviest, votes
