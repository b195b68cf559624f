"""From weighted occurrences to a tree of candidates, best first.

Each occurrence votes for the tokens that followed it, with `exp(log_weight)`. Where the votes split the tree branches,
where they agree it grows deep: nodes are taken in order of the estimated probability of their whole path.
"""

from __future__ import annotations

import heapq
import itertools
import math
from bisect import bisect_right
from collections.abc import Callable, Collection
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from precedent.drafters.base import Candidates
from precedent.tree import ROOT

LENGTH_BINS = (1, 2, 3, 4, 6, 8, 12, 16, 24, 40)
SHARE_BINS = (0.05, 0.1, 0.2, 0.3, 0.45, 0.6, 0.75, 0.9, 0.98)
COUNT_BINS = (2, 3, 5, 9, 20, 60)

MIN_SHARE = 0.02
"""Votes below this share of their parent's are not followed up."""

MIN_PATH = 0.02
"""Candidates whose whole path is less likely than this are not proposed: no forward is cheap enough for them."""

Estimator = Callable[[float, int, int, int], float]
"""`(vote share, number of occurrences, matched tokens, similarity bin) -> probability of acceptance` in (0, 1]."""


@dataclass(frozen=True, slots=True)
class Evidence:
    """What followed the occurrences of the live context.

    `continuations` `[n, depth]` holds token ids, negative from the end of a sequence on; `log_weights` `[n]` are the
    votes; `lengths` `[n]` the matched tokens; `similarity_bins` `[n]` small ints, higher is nearer.
    """

    continuations: NDArray[np.int32]
    log_weights: NDArray[np.float64]
    lengths: NDArray[np.int64]
    similarity_bins: NDArray[np.int64]


@dataclass(frozen=True, slots=True)
class Expansion:
    """Candidates and, for each node, the row of the evidence that voted for it with the greatest weight."""

    candidates: Candidates
    best_rows: list[int]


def expand(
    source: str, evidence: Evidence, budget: int, estimator: Estimator, end_ids: Collection[int] = ()
) -> Expansion:
    """At most `budget` candidates, in order of path probability; nothing hangs below a token of `end_ids`."""
    expansion = Expansion(Candidates(source), [])
    if budget <= 0 or not evidence.log_weights.size:
        return expansion
    votes, candidates = _SortedVotes(evidence, estimator), expansion.candidates
    queue = [(-child.estimate, child.begin, ROOT, child) for child in votes.children(0, votes.num_rows, 0)]
    heapq.heapify(queue)
    while queue and len(candidates) < budget:
        minus_path, _, parent, range_ = heapq.heappop(queue)
        if -minus_path < MIN_PATH:
            break
        node = candidates.add(parent, range_.token, range_.estimate, range_.feature)
        expansion.best_rows.append(range_.best_row)
        if range_.token not in end_ids:
            for child in votes.children(range_.begin, range_.end, range_.depth):
                heapq.heappush(queue, (minus_path * child.estimate, child.begin, node, child))
    return expansion


class _Range(NamedTuple):
    """One possible node: the rows `begin:end` agree in their first `depth` tokens, the last of which is `token`."""

    begin: int
    end: int
    depth: int
    token: int
    estimate: float
    feature: tuple[int, ...]
    best_row: int


class _SortedVotes:
    """The evidence with equal prefixes side by side, so that every tree node is a range of rows."""

    def __init__(self, evidence: Evidence, estimator: Estimator) -> None:
        rows = np.ascontiguousarray(evidence.continuations)
        order = np.argsort(rows.view(np.dtype((np.void, rows.shape[1] * 4))).ravel(), kind="stable")
        rows = rows[order]
        self.num_rows, self._max_depth = rows.shape
        self._estimator, self._order = estimator, order.tolist()
        log_weights = evidence.log_weights[order]
        self._weights = np.exp(np.maximum(log_weights - log_weights.max(), -30.0))  # lighter ones would cancel in sums
        self._mass = [0.0, *np.cumsum(self._weights).tolist()]
        self._lengths = evidence.lengths[order].tolist()
        self._similarity = evidence.similarity_bins[order].tolist()
        self._shared = _shared_prefixes(rows)
        self._rows = rows

    def children(self, begin: int, end: int, depth: int) -> list[_Range]:
        """The ranges below a range of rows that agree in their first `depth` tokens."""
        if depth == self._max_depth:
            return []
        cuts = [] if end - begin == 1 else (self._shared[begin : end - 1] == depth).nonzero()[0].tolist()
        if not cuts:
            return self._child(begin, end, depth, 1.0)
        bounds = [begin, *(begin + 1 + cut for cut in cuts), end]
        mass = self._mass
        total = mass[end] - mass[begin]
        found: list[_Range] = []
        for low, high in itertools.pairwise(bounds):
            share = (mass[high] - mass[low]) / total
            if share >= MIN_SHARE:
                found += self._child(low, high, depth, share)
        return found

    def _child(self, begin: int, end: int, depth: int, share: float) -> list[_Range]:
        best = begin if end - begin == 1 else begin + int(self._weights[begin:end].argmax())
        token = int(self._rows.item(best, depth))
        if token < 0:  # these sequences end here
            return []
        count, length, similarity = end - begin, self._lengths[best] + depth, self._similarity[best]
        estimate = self._estimator(share, count, length, similarity)
        bins = (bisect_right(LENGTH_BINS, length), bisect_right(SHARE_BINS, share), bisect_right(COUNT_BINS, count))
        return [_Range(begin, end, depth + 1, token, estimate, (*bins, similarity), self._order[best])]


def _shared_prefixes(rows: NDArray[np.int32]) -> NDArray[np.int64]:
    """How many leading tokens each row shares with the next one, `[n - 1]`."""
    differs = np.ones((rows.shape[0] - 1, rows.shape[1] + 1), dtype=np.bool_)
    np.not_equal(rows[1:], rows[:-1], out=differs[:, :-1])
    shared: NDArray[np.int64] = differs.argmax(axis=1)
    return shared


@dataclass(frozen=True, slots=True)
class LogisticPrior:
    """An estimate before any calibration: logistic in the log odds of the vote, the match length and the evidence.

    The share is shrunk by `(count + 1/2) / (count + 1)` first, so that one lone occurrence is never certain.
    """

    offset: float
    odds: float
    length: float
    count: float
    similarity: float

    def __call__(self, share: float, count: int, length: int, similarity: int) -> float:
        """The estimate, in (0, 1)."""
        shrunk = min(max(share * (count + 0.5) / (count + 1.0), 1e-4), 0.9999)
        score = (
            self.offset
            + self.odds * math.log(shrunk / (1.0 - shrunk))
            + self.length * math.log1p(length)
            + self.count * math.log(count)
            + self.similarity * similarity
        )
        return 1.0 / (1.0 + math.exp(-score))
