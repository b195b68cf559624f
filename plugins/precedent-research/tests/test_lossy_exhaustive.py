"""Six hundred larger random trees for every lossy rule and a judge; the small sizes run in `make test`."""

from __future__ import annotations

import pytest
from helpers.enumeration import exact_step, mean_spent, toy_rows
from helpers.random_trees import Problem, random_problem

from precedent.tree import CandidateTree
from precedent_research.judge import overruled_by
from precedent_research.lossy import Bent, Mentored, TopBeta, Typical, relaxed
from precedent_testing.replay_rng import enumerate_outcomes

EXACT = 1e-12
FIRST, COUNT, BLOCK = 20_000, 600, 40
BLOCKS = pytest.mark.parametrize("block", range(FIRST, FIRST + COUNT, BLOCK))
RULES = [Mentored(0.05), Mentored(1.0), Typical(), Typical(0.5, 1.0), TopBeta(), TopBeta(2, 4.0)]

pytestmark = pytest.mark.exhaustive


def problems(block: int, max_trees: int) -> list[Problem]:
    """The problems of one block, with up to `max_trees` trees each."""
    return [random_problem(seed, max_trees=max_trees) for seed in range(block, block + BLOCK)]


@BLOCKS
@pytest.mark.parametrize("rule", RULES, ids=str)
def test_what_lossy_modes_say_they_spend_bounds_the_distance_on_every_tree(rule, block: int) -> None:
    """Every verdict says what the rows on its path cost; their mean bounds the distance of what is written."""
    for problem in problems(block, 16):
        written, distance, spent = exact_step(problem.target, problem.draft, relaxed(rule)), 0.0, 0.0
        for chance, tree in enumerate_outcomes(problem.draft):
            rows = toy_rows(problem.target, tree)
            bent = Bent(tree, rows, rule)
            for probability, verdict in enumerate_outcomes(relaxed(rule)(tree, rows)):
                spent += chance * probability * verdict.spent_tv
                own = sum(bent.cost(node) for node in (-1, *verdict.path))
                assert verdict.spent_tv == pytest.approx(own, abs=EXACT)
        distance = written.total_variation(problem.target)
        assert distance <= spent + 1e-10, problem


@BLOCKS
def test_a_judge_is_lossless_until_it_overrules_and_then_says_so(block: int) -> None:
    def sometimes(tree: CandidateTree, rows: object, node: int) -> float:
        return (0.0, 0.25, 0.5, 1.0)[sum(tree.tokens_to(node)) % 4]

    for problem in problems(block, 16):
        never = exact_step(problem.target, problem.draft, overruled_by(lambda *_: 0.0))
        assert never.total_variation(problem.target) < EXACT
        spent = mean_spent(problem.target, problem.draft, overruled_by(sometimes))
        done = exact_step(problem.target, problem.draft, overruled_by(sometimes))
        assert done.total_variation(problem.target) <= spent + 1e-10, problem
