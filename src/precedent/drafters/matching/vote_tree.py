"""From weighted occurrences to a tree of candidates, best first.

Each occurrence votes for the tokens that followed it, with weight `exp(log_weight)`. Where votes split, the tree
branches; where they agree, it grows deep. Nodes are taken in order of the estimated probability of their whole path.
"""

from __future__ import annotations

import math
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from precedent.drafters.base import NODE, Nodes
from precedent.drafters.matching.occurrences import Occurrences
from precedent.runtime.compiled import Floats, Int32s, Int64s, compiled, contains
from precedent.tree import ROOT

LENGTH_BINS = np.array([1, 2, 3, 4, 6, 8, 12, 16, 24, 40], dtype=np.int64)
SHARE_BINS = np.array([0.05, 0.1, 0.2, 0.3, 0.45, 0.6, 0.75, 0.9, 0.98])
COUNT_BINS = np.array([2, 3, 5, 9, 20, 60], dtype=np.int64)
SIMILARITY_BINS = 6

MAX_DEPTH = 64
"""Longest continuation to propose, in tokens."""

MIN_SHARE = 0.004
"""Tokens with less than this share of their parent's votes are not followed."""

MIN_PATH = 0.004
"""Candidates with a less likely path are not proposed. With 0.02 trees of at most 32 nodes had 15 to 25."""

LIGHTEST = -30.0
"""Lower bound of a vote's log weight relative to the heaviest; lighter votes would vanish in sums."""

PLACES = 1 << 32
"""Factor for the token in integers that combine token and place; larger than every place."""


_RANGE = np.dtype(
    [
        ("begin", "i8"),
        ("end", "i8"),
        ("depth", "i8"),
        ("parent", "i4"),
        ("token", "i4"),
        ("bin", "i8"),
        ("heaviest", "i8"),
        ("path", "f8"),
        ("estimate", "f8"),
    ]
)
"""A possible node: rows `begin:end` agree in `depth` tokens, the last of which is `token`; `path` is the probability of
the whole path."""

Ranges = NDArray[np.void]


class VotePrior(NamedTuple):
    """The estimate before calibration: logistic in log odds of the vote share, match length, number and similarity.

    The share is first multiplied by `(count + 1/2) / (count + 1)`, so that a single occurrence is never certain. From
    similarity bin `sure_from` on, the probability of rejection is multiplied by `doubt`.
    """

    offset: float
    odds: float
    length: float
    number: float
    similarity: float
    sure_from: float = float(SIMILARITY_BINS)
    doubt: float = 1.0


class Ballot(NamedTuple):
    """The votes being counted: their weights, and their rows, which are sorted while the tree grows."""

    votes: Occurrences
    weights: Floats
    rows: Int64s
    following: Int32s
    prior: VotePrior


@compiled
def grow(
    tokens: Int32s, votes: Occurrences, length: float, budget: int, prior: VotePrior, end_ids: Int32s
) -> tuple[Nodes, Int64s]:
    """The nodes, best path first, and the heaviest vote of each; every matched token adds `length` to a log weight.

    A possible node is a range of rows that agree in their first tokens. The ranges waiting to become nodes are
    disjoint, so there are never more of them than votes.
    """
    nodes, heaviest, size = np.empty(budget, NODE), np.empty(budget, np.int64), 0
    waiting, num_waiting = np.empty(votes.size + 1, _RANGE), 0
    ballot = Ballot(votes, _weights(votes, length), np.arange(votes.size), np.empty(votes.size, np.int32), prior)
    chosen = waiting[votes.size]
    chosen.begin, chosen.end, chosen.depth, chosen.path = 0, votes.size, 0, 1.0
    if budget and votes.size:
        num_waiting = _add_children(waiting, 0, tokens, chosen, ROOT, ballot)
    while num_waiting and size < budget:
        best = _most_likely(waiting, num_waiting)
        waiting[votes.size] = waiting[best]
        if chosen.path < MIN_PATH:
            break
        num_waiting -= 1
        waiting[best] = waiting[num_waiting]
        node = nodes[size]
        node.token_id, node.parent, node.estimate, node.bin = chosen.token, chosen.parent, chosen.estimate, chosen.bin
        heaviest[size] = chosen.heaviest
        if chosen.depth < MAX_DEPTH and not contains(end_ids, chosen.token):
            num_waiting = _add_children(waiting, num_waiting, tokens, chosen, size, ballot)
        size += 1
    return nodes[:size], heaviest[:size]


@compiled
def _most_likely(waiting: Ranges, num_waiting: int) -> int:
    best = 0
    for i in range(1, num_waiting):
        if waiting[i].path > waiting[best].path or (
            waiting[i].path == waiting[best].path and waiting[i].begin < waiting[best].begin
        ):
            best = i
    return best


@compiled
def _weights(votes: Occurrences, length: float) -> Floats:
    weights = np.empty(votes.size)
    for i in range(votes.size):
        weights[i] = length * votes[i].score + votes[i].weight
    return np.exp(np.maximum(weights - weights.max(), LIGHTEST)) if votes.size else weights


@compiled
def _sort_by_next_token(tokens: Int32s, above: Any, ballot: Ballot) -> None:
    """Sort the range's rows by next token (stable); `following` receives those tokens.

    Sorts integers with the token in the high bits and the place in the low ones. Deep in a tree most rows agree, and
    nothing has to move.
    """
    rows, size = ballot.rows[above.begin : above.end].copy(), above.end - above.begin
    keys, in_order = np.empty(size, np.int64), True
    for i in range(size):
        token = tokens[ballot.votes[rows[i]].position + 1 + above.depth]
        ballot.following[above.begin + i] = token
        keys[i] = np.int64(token) * PLACES + i
        in_order = in_order and (i == 0 or keys[i] > keys[i - 1])
    if in_order:
        return
    keys.sort()
    for i in range(size):
        ballot.rows[above.begin + i] = rows[keys[i] % PLACES]
        ballot.following[above.begin + i] = keys[i] // PLACES


@compiled
def _add_children(waiting: Ranges, num_waiting: int, tokens: Int32s, above: Any, node: int, ballot: Ballot) -> int:
    """Add the ranges below `above`, which became `node`, to the waiting ones; returns the new number waiting."""
    _sort_by_next_token(tokens, above, ballot)
    rows, following, weights = ballot.rows, ballot.following, ballot.weights
    total, low = 0.0, above.begin
    for i in range(above.begin, above.end):
        total += weights[rows[i]]
    while low < above.end:
        high, mass, best = low, 0.0, low
        while high < above.end and following[high] == following[low]:
            mass += weights[rows[high]]
            best = high if weights[rows[high]] > weights[rows[best]] else best
            high += 1
        if following[low] >= 0 and mass >= MIN_SHARE * total:  # a negative id means that the sequence has ended
            child, vote, count = waiting[num_waiting], ballot.votes[rows[best]], high - low
            length, share = round(vote.score) + above.depth, mass / total
            child.begin, child.end, child.depth, child.parent = low, high, above.depth + 1, node
            child.token, child.heaviest = following[low], rows[best]
            child.estimate = prior_estimate(ballot.prior, share, count, length, vote.bin)
            child.path = above.path * child.estimate
            child.bin = _bin_of(share, count, length, vote.bin)
            num_waiting += 1
        low = high
    return num_waiting


@compiled
def _bin_of(share: float, count: int, length: int, similarity: int) -> int:
    number = _bin(LENGTH_BINS, length) * (SHARE_BINS.size + 1) + _bin(SHARE_BINS, share)
    return (number * (COUNT_BINS.size + 1) + _bin(COUNT_BINS, count)) * SIMILARITY_BINS + similarity


@compiled
def _bin(edges: Int64s | Floats, value: float) -> int:
    number = 0
    while number < edges.size and value >= edges[number]:
        number += 1
    return number


@compiled
def prior_estimate(prior: VotePrior, share: float, count: int, length: int, similarity: int) -> float:
    """The estimate in (0, 1)."""
    shrunk = min(max(share * (count + 0.5) / (count + 1.0), 1e-4), 0.9999)
    score = prior.offset + prior.odds * math.log(shrunk / (1.0 - shrunk)) + prior.length * math.log1p(length)
    score += prior.number * math.log(count) + prior.similarity * similarity
    estimate = 1.0 / (1.0 + math.exp(-score))
    return 1.0 - prior.doubt * (1.0 - estimate) if similarity >= prior.sure_from else estimate
