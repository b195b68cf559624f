"""The best tree of a block: of all paths through its positions, the likeliest ones (DDTree, 2604.12989).

A block gives a distribution per position, and a Markov term one per pair of neighbours. A path's probability is the
product along it, so it never exceeds that of a shorter path, and the likeliest `budget` paths are a tree.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from precedent.runtime.compiled import Floats, compiled

_NONE = -1

Places = NDArray[np.int64]


@compiled
def best_first(first: Floats, steps: Floats, ends: NDArray[np.bool_], budget: int) -> tuple[Places, Places, Places]:
    """The `budget` likeliest paths as a tree: depth, choice and parent of each node, `[num_nodes]`, best first.

    `first` `[choices]` are the probabilities at the first position, `steps` `[positions - 1, choices, choices]` those
    of each choice at the next position after each at this one. `ends` `[positions, choices]` marks choices below which
    nothing hangs. Probability 0 is never taken; of equals the one whose parent came first, then the lower choice.
    """
    positions, root, count = steps.shape[0] + 1, budget, 0  # the root's entries are the last ones
    depths, chosen, parents = np.empty(budget, np.int64), np.empty(budget, np.int64), np.empty(budget, np.int64)
    paths, taken = np.ones(budget + 1), np.zeros((budget + 1, first.size), np.bool_)
    best, reach = np.full(budget + 1, _NONE, np.int64), np.zeros(budget + 1)
    best[root], reach[root] = _best_left(first, taken[root])
    while count < budget:
        at = root
        for node in range(count):
            at = node if reach[node] > reach[at] else at
        if reach[at] <= 0.0:
            break
        depths[count], chosen[count] = 0 if at == root else depths[at] + 1, best[at]
        parents[count], paths[count] = _NONE if at == root else at, reach[at]
        taken[at, best[at]] = True
        for node in (at, count):
            if node == root:
                best[node], reach[node] = _best_left(first, taken[node])
            elif depths[node] + 1 < positions and not ends[depths[node], chosen[node]]:
                best[node], chance = _best_left(steps[depths[node], chosen[node]], taken[node])
                reach[node] = paths[node] * chance
        count += 1
    return depths[:count], chosen[:count], parents[:count]


@compiled
def _best_left(chances: Floats, taken: NDArray[np.bool_]) -> tuple[int, float]:
    """The likeliest choice that is not taken, and its probability; 0 if none is left."""
    best, chance = _NONE, 0.0
    for choice in range(chances.size):
        if not taken[choice] and chances[choice] > chance:
            best, chance = choice, chances[choice]
    return best, chance
