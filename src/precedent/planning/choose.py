"""The arithmetic of a plan: merges the drafters' tries into one trie, and keeps the part, or the path, that pays off.

Pure functions of arrays; `planner.py` holds what has been learned and passes it in.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from precedent.planning.calibration import BINS_PER_SOURCE, calibrated
from precedent.runtime.compiled import Floats, Int32s, Int64s, compiled, contains
from precedent.tree import ROOT

_POOLED = np.dtype(
    [
        ("token_id", "i4"),
        ("parent", "i4"),
        ("depth", "i4"),
        ("source", "i4"),
        ("sources", "i8"),
        ("first_child", "i4"),
        ("sibling", "i4"),
        ("estimate", "f8"),
        ("path", "f8"),
        ("claimed", "f8"),
    ]
)
"""A merged candidate. `source` has the best estimate; `sources` holds all sources as bits. `path` is the probability of
the whole path, `claimed` the sum of the children's estimates."""

BEST_BITS = 8
BEST = (1 << BEST_BITS) - 1
"""Mask of the bits in `Choice.sources` that hold the best source's number."""

_NONE = -1

Pool = NDArray[np.void]


class Choice(NamedTuple):
    """The fixed candidates chosen for a tree, and their expected value.

    Per chosen node, `[num_fixed]`: `token_ids`, `parents`, `sources` (the best one in the bits of `BEST`, above them
    one bit for each) and calibrated `estimates` of being accepted once the parent is. Per candidate,
    `[num_candidates]`: its calibration bin (`bins`), its calibrated estimate before trust is applied (`believed`), and
    the node that it became (`node_of`, -1 for none). `expected` is the tokens per step with these nodes, including the
    other sequences'; `at_root` is the probability that one of the root's children comes next.
    """

    token_ids: Int32s
    parents: Int32s
    sources: Int64s
    estimates: Floats
    bins: Int64s
    believed: Floats
    node_of: Int32s
    expected: float
    at_root: float


@compiled
def choose(
    candidates: NDArray[np.void],
    parts: Int64s,
    accepted: Floats,
    seen: Floats,
    trust: Floats,
    costs: Floats,
    tokens_beside: float,
    max_nodes: int,
    max_depth: int,
    end_ids: Int32s,
    one_path: bool,
) -> Choice:
    """Choose the fixed candidates that give the most tokens per millisecond; with `one_path`, of the likeliest path.

    `candidates` `[n]` are the `NODE` records of all drafters, concatenated. `parts` `[num_drafters, 2]` gives for each
    drafter the index of its first bin in `accepted` and `seen`, and its number of records. `trust` `[num_drafters]`
    scales each drafter's estimates. `costs[w]` is the milliseconds of a step with w + 1 tokens of this sequence beside
    the other sequences, which are expected to yield `tokens_beside` tokens.
    """
    bins = _bins(candidates, parts)
    believed = _believed(candidates, bins, accepted, seen)
    deepest = min(max_depth, max_nodes) if one_path else max_depth
    pool, place = _merged(candidates, parts[:, 1], believed, trust, deepest, end_ids)
    _set_paths(pool)
    start = 1.0 + tokens_beside
    if one_path:
        kept, expected, at_root = _best_path(pool, costs, start)
    else:
        kept, expected, at_root = _best_part(pool, costs, start, max_nodes)
    return _chosen(pool, kept, bins, believed, place, expected, at_root)


@compiled
def _best_part(pool: Pool, costs: Floats, start: float, max_nodes: int) -> tuple[Int64s, float, float]:
    """The best of all prefixes of the ranking by path probability: its nodes, expected tokens and mass at the root."""
    ranked = np.argsort(-pool["path"], kind="mergesort")[:max_nodes]
    expected, at_root = start, 0.0
    count, best_rate, best_expected, best_root = 0, start / costs[0], start, 0.0
    for i in range(ranked.size):
        node = pool[ranked[i]]
        expected += node.path
        at_root += node.path if node.parent == ROOT else 0.0
        rate = expected / costs[min(i + 1, costs.size - 1)]
        if rate > best_rate:
            count, best_rate, best_expected, best_root = i + 1, rate, expected, at_root
    return np.sort(ranked[:count]), best_expected, best_root


@compiled
def _best_path(pool: Pool, costs: Floats, start: float) -> tuple[Int64s, float, float]:
    """The same of all beginnings of the path that follows each node's likeliest child.

    Of all paths the one with the largest sum of probabilities would accept fewer tokens: errors make it the largest.
    """
    path, size, best = np.empty(pool.size, np.int64), 0, _likeliest_child(pool, ROOT)
    expected, count, best_rate, best_expected = start, 0, start / costs[0], start
    while best != _NONE:
        path[size], size = best, size + 1
        expected += pool[best].path
        rate = expected / costs[min(size, costs.size - 1)]
        if rate > best_rate:
            count, best_rate, best_expected = size, rate, expected
        best = _likeliest_child(pool, best)
    return path[:count], best_expected, pool[path[0]].path if count else 0.0


@compiled
def _likeliest_child(pool: Pool, parent: int) -> int:
    """The likeliest of a node's children, of equal ones the first; -1 if it has none."""
    best = _NONE
    for i in range(pool.size):
        if pool[i].parent == parent and (best == _NONE or pool[i].path > pool[best].path):
            best = i
    return best


@compiled
def _bins(candidates: NDArray[np.void], parts: Int64s) -> Int64s:
    """Each candidate's bin in the arrays that all sources share."""
    bins, begin = np.empty(candidates.size, np.int64), 0
    for first, count in parts:
        for i in range(begin, begin + count):
            bins[i] = first + candidates[i].bin % BINS_PER_SOURCE
        begin += count
    return bins


@compiled
def _believed(candidates: NDArray[np.void], bins: Int64s, accepted: Floats, seen: Floats) -> Floats:
    """Each candidate's calibrated probability of being accepted once its parent is."""
    believed = np.empty(candidates.size)
    for i in range(candidates.size):
        believed[i] = calibrated(accepted, seen, bins[i], candidates[i].estimate)
    return believed


@compiled
def _merged(
    candidates: NDArray[np.void],
    counts: Int64s,
    believed: Floats,
    trust: Floats,
    max_depth: int,
    end_ids: Int32s,
) -> tuple[Pool, Int32s]:
    """Merge all drafters' tries; also returns each candidate's place (-1: below an end token, or too deep)."""
    pool, size = np.empty(candidates.size + 1, _POOLED), 0
    root = pool[candidates.size]  # the last entry, so pool[ROOT] is the root too
    root.first_child, root.depth, root.token_id = _NONE, 0, _NONE
    place, begin = np.empty(candidates.size, np.int32), 0
    for source in range(counts.size):
        for i in range(begin, begin + counts[source]):
            candidate = candidates[i]
            above = ROOT if candidate.parent == ROOT else place[begin + candidate.parent]
            at = _NONE
            if candidate.parent == ROOT or above != _NONE:
                at = _find_or_add(pool, size, above, candidate.token_id, max_depth, end_ids)
                size = max(size, at + 1)
            if at != _NONE:
                _support(pool[at], source, trust[source] * believed[i])
            place[i] = at
        begin += counts[source]
    return pool[:size], place


@compiled
def _find_or_add(pool: Pool, size: int, above: int, token_id: int, max_depth: int, end_ids: Int32s) -> int:
    """Index of `token_id` below `above`, added if missing; -1 if it is not allowed there."""
    parent = pool[above]
    at = parent.first_child
    while at != _NONE:
        if pool[at].token_id == token_id:
            return int(at)
        at = pool[at].sibling
    if parent.depth >= max_depth or (above != ROOT and contains(end_ids, parent.token_id)):
        return _NONE
    node = pool[size]
    node.token_id, node.parent, node.depth = token_id, above, parent.depth + 1
    node.first_child, node.sibling, node.sources, node.estimate = _NONE, parent.first_child, 0, -1.0
    parent.first_child = size
    return size


@compiled
def _support(node: Any, source: int, estimate: float) -> None:
    """Add a source to the node and keep the best estimate."""
    node.sources |= 1 << source
    if estimate > node.estimate:
        node.estimate, node.source = estimate, source


@compiled
def _set_paths(pool: Pool) -> None:
    """P(path) = product of the best estimates; siblings are scaled down if their estimates sum to more than 1."""
    at_root = 0.0
    for node in pool:
        node.claimed = 0.0
    for node in pool:
        if node.parent == ROOT:
            at_root += node.estimate
        else:
            pool[node.parent].claimed += node.estimate
    for node in pool:
        if node.parent == ROOT:
            node.estimate /= max(1.0, at_root)
            node.path = node.estimate
        else:
            above = pool[node.parent]
            node.estimate /= max(1.0, above.claimed)
            node.path = above.path * node.estimate


@compiled
def _chosen(
    pool: Pool, kept: Int64s, bins: Int64s, believed: Floats, place: Int32s, expected: float, at_root: float
) -> Choice:
    """Renumber the `kept` part of the pool (ascending indices, closed under parents)."""
    number = np.full(pool.size + 1, _NONE, np.int32)
    token_ids, parents = np.empty(kept.size, np.int32), np.empty(kept.size, np.int32)
    sources, estimates = np.empty(kept.size, np.int64), np.empty(kept.size)
    for i in range(kept.size):
        node = pool[kept[i]]
        number[kept[i]] = i
        token_ids[i], parents[i] = node.token_id, ROOT if node.parent == ROOT else number[node.parent]
        sources[i], estimates[i] = node.sources << BEST_BITS | node.source, node.estimate
    node_of = np.full(place.size, _NONE, np.int32)
    for i in range(place.size):
        if place[i] != _NONE:
            node_of[i] = number[place[i]]
    return Choice(token_ids, parents, sources, estimates, bins, believed, node_of, expected, at_root)
