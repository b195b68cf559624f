"""A maximum flow from candidate sets to their tokens, by shortest augmenting paths between tokens."""

from __future__ import annotations

import itertools

import numpy as np
from numpy.typing import NDArray

Floats = NDArray[np.float64]

FLOOR = 1e-15
"""Mass below which an edge counts as saturated; a plan that stops early is still exact, it only accepts less."""

MAX_PATHS = 2_000


def improve(paid: Floats, members: Floats, slack: Floats) -> Floats:
    """The most that sets can pay to their tokens, grown from the plan `paid`.

    `paid[S, x]` is the mass that set S pays to token x, its last column what S pays to nobody; `members` `[as paid]`
    is 1 where S may pay; `slack` `[num_tokens]` is what tokens can still take, and is lowered in place. All the sets
    that hold both x and y make up one edge, from x to y: as much as they now pay to x could go to y instead.
    """
    paid = paid.copy()
    for _ in range(MAX_PATHS):
        edges = paid.T @ members
        path = _path(edges, slack)
        if path is None:
            break
        steps = list(itertools.pairwise(path))
        amount = min(float(slack[path[-1]]), *(float(edges[step]) for step in steps))
        for giver, taker in reversed(steps):  # from the end, so that no token gives on what it has not got
            moved = paid[:, giver] * members[:, taker] * (amount / edges[giver, taker])
            paid[:, giver] -= moved
            paid[:, taker] += moved
        slack[path[-1]] -= amount
    return paid


def _path(edges: Floats, slack: Floats) -> list[int] | None:
    """The shortest path from "nobody" to a token that can take more; among equals the one that is widest so far."""
    nobody = len(slack)
    width, before = np.zeros(nobody + 1), np.full(nobody + 1, nobody)
    width[nobody] = np.inf
    level = [nobody]
    while level:
        reached = np.minimum(width[level, None], edges[level])
        best = reached.max(0)
        fresh = (width == 0.0) & (best > FLOOR)
        before[fresh] = np.array(level)[reached.argmax(0)][fresh]
        width[fresh] = best[fresh]
        level = np.flatnonzero(fresh).tolist()
        takers = np.minimum(width[:nobody], slack)[[token for token in level if token != nobody]]
        if takers.size and takers.max() > FLOOR:
            return _trace(level[int(takers.argmax())], before, nobody)
    return None


def _trace(end: int, before: NDArray[np.int64], start: int) -> list[int]:
    path = [end]
    while path[-1] != start:
        path.append(int(before[path[-1]]))
    return path[::-1]
