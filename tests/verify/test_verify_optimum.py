"""No lossless verifier may accept more than the linear program allows: exceeding it would prove a bias.

The program of one step: over every tree T that drafting can build, every node v of it and every next token y, choose
pi_T(v, y) >= 0 with sum over (v, y) = P(T) and the target's distribution on all strings; maximise the expected depth of
v.
"""

from __future__ import annotations

import itertools

import numpy as np
import pytest
from helpers.enumeration import DraftProcess, ToyModel, exact_step
from helpers.random_trees import (
    DRAFT_V4,
    TARGET_V4,
    always,
    independent_paths,
    near,
    random_problem,
    sibling_samples,
    toy_model,
)
from scipy.optimize import linprog
from scipy.sparse import coo_matrix

from precedent.tree import ROOT, CandidateTree
from precedent_testing.replay_rng import enumerate_outcomes

SOLVER = 1e-7


def optimum(target: ToyModel, draft: DraftProcess, depth: int) -> float:
    """The most draft tokens that any lossless one-step verifier can accept on average."""
    size = target(()).numel()
    strings = list(itertools.product(range(size), repeat=depth + 1))
    index = {string: number for number, string in enumerate(strings)}
    entries: list[tuple[int, int, float]] = []
    depths: list[int] = []
    trees = list(enumerate_outcomes(draft))
    for number, (_, tree) in enumerate(trees):
        for node in range(ROOT, len(tree)):
            path = tree.tokens_to(node)
            for token in range(size):
                column = len(depths)
                depths.append(len(path))
                entries.append((number, column, 1.0))
                for tail in itertools.product(range(size), repeat=depth - len(path)):
                    string = (*path, token, *tail)
                    chance = _probability(target, string, len(path) + 1)
                    entries.append((len(trees) + index[string], column, chance))
    rows, columns, values = zip(*entries, strict=True)
    right = [chance for chance, _ in trees] + [_probability(target, string, 0) for string in strings]
    equations = coo_matrix((values, (rows, columns)), shape=(len(right), len(depths))).tocsr()
    solution = linprog(-np.array(depths, dtype=float), A_eq=equations, b_eq=right, method="highs")
    assert solution.status == 0, solution.message
    return float(-solution.fun)


def _probability(target: ToyModel, string: tuple[int, ...], start: int) -> float:
    """The target's probability of the tokens of `string` from position `start` on."""
    probability = 1.0
    for position in range(start, len(string)):
        probability *= float(target(string[:position])[string[position]])
    return probability


@pytest.mark.parametrize(("vocab_size", "length"), [(2, 2), (2, 4), (3, 2), (3, 3), (4, 2)])
def test_block_verification_is_optimal_on_chains(vocab_size: int, length: int) -> None:
    """Sun et al. 2403.10444, theorem 2; token verification stays at or below."""
    for seed in range(3):
        target = toy_model(("target", seed), vocab_size, plain=True)
        draft = near(target, toy_model(("draft", seed), vocab_size, plain=True), 0.5)
        process = independent_paths(draft, 1, length)
        best = optimum(target, process, length)
        assert exact_step(target, process, "traversal").expected_accepted == pytest.approx(best, abs=SOLVER)
        assert exact_step(target, process, "topdown").expected_accepted <= best + SOLVER


@pytest.mark.parametrize("block", range(300, 340, 10))
def test_nothing_exceeds_the_optimum_on_random_trees(block: int) -> None:
    """Small mixed trees; with fixed candidates alone the optimum is reached."""
    for seed in range(block, block + 10):
        problem = random_problem(seed, max_trees=16)
        trees: list[CandidateTree] = [tree for _, tree in enumerate_outcomes(problem.draft)]
        depth = max((int(tree.depths.max()) for tree in trees if len(tree)), default=0)
        target = toy_model((seed, "positive"), problem.vocab_size, plain=True)  # HiGHS dislikes vanishing probabilities
        if problem.vocab_size**depth > 125:
            continue
        best = optimum(target, problem.draft, depth)
        lazy, eager = (exact_step(target, problem.draft, mode).expected_accepted for mode in ("traversal", "topdown"))
        assert eager - SOLVER <= lazy <= best + SOLVER, problem
        if all(all(tree.only_fixed_below) and not problem.plan.shape for tree in trees):
            assert lazy == pytest.approx(best, abs=SOLVER)


def test_one_sample_beside_cached_tokens_is_optimal() -> None:
    """A mixed node with one sample: tested first, with fixed candidates last, it leaves nothing on the table."""
    for fixed, exclude in (((3,), False), ((3,), True), ((0, 1), True), ((1, 2), False)):
        draft = sibling_samples([DRAFT_V4], fixed=fixed, replacement=True, exclude_fixed=exclude)
        best = optimum(always(TARGET_V4), draft, 1)
        assert exact_step(always(TARGET_V4), draft, "traversal").expected_accepted == pytest.approx(best, abs=SOLVER)
