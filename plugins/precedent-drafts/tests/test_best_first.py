"""The best tree of a block against brute force over all paths."""

from __future__ import annotations

from itertools import product

import numpy as np
import pytest
from numpy.typing import NDArray

from precedent_drafts.block_drafter import best_first

Path = tuple[int, ...]


def all_paths(first: NDArray[np.float64], steps: NDArray[np.float64], ends: NDArray[np.bool_]) -> dict[Path, float]:
    """Every path that stops at an end, with its probability."""
    found: dict[Path, float] = {}
    for length in range(1, steps.shape[0] + 2):
        for path in product(range(first.size), repeat=length):
            chance = first[path[0]]
            for depth in range(1, length):
                chance *= steps[depth - 1, path[depth - 1], path[depth]]
            if not any(ends[depth, choice] for depth, choice in enumerate(path[:-1])):
                found[path] = float(chance)
    return found


def tree_of(depths: NDArray[np.int64], chosen: NDArray[np.int64], parents: NDArray[np.int64]) -> list[Path]:
    paths: list[Path] = []
    for depth, choice, parent in zip(depths.tolist(), chosen.tolist(), parents.tolist(), strict=True):
        paths.append((choice,) if parent < 0 else (*paths[parent], choice))
        assert len(paths[-1]) == depth + 1
    return paths


@pytest.mark.parametrize("seed", range(6))
@pytest.mark.parametrize("budget", [1, 2, 7, 30, 500])
def test_the_tree_holds_the_likeliest_paths(seed: int, budget: int) -> None:
    """In the order of their probability, whatever ends where; parents come first by themselves."""
    random = np.random.default_rng(seed)
    first, steps = random.dirichlet([0.4] * 4), random.dirichlet([0.4] * 4, size=(3, 4))
    ends = random.random((4, 4)) < 0.2
    known = all_paths(first, steps, ends)
    found = tree_of(*best_first(first, steps, ends, budget))
    assert found == sorted(known, key=lambda path: -known[path])[:budget]


def test_nothing_impossible_is_taken() -> None:
    """Probability 0 ends the tree before its budget, and equals come in the order of their parents."""
    first, steps = np.array([0.5, 0.5, 0.0]), np.zeros((1, 3, 3))
    steps[0, 1, 2] = 1.0
    found = tree_of(*best_first(first, steps, np.zeros((2, 3), np.bool_), 9))
    assert found == [(0,), (1,), (1, 2)]
