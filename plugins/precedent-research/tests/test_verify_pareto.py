"""Rejections against total variation: the front against linear programs, and each mode's point by enumeration."""

from __future__ import annotations

import random

import numpy as np
import pytest
import torch
from helpers.enumeration import exact_step
from helpers.random_trees import always, random_distribution, sibling_samples
from scipy.optimize import linprog

from precedent.tree import Sampled
from precedent.verify import verifier_of
from precedent_research.judge import overruled_by
from precedent_research.lossy import Mentored, Offer, TopBeta, Typical
from precedent_research.pareto import least_rejections, point_of, point_of_judge

TARGET_V4 = torch.tensor([0.10, 0.20, 0.30, 0.40], dtype=torch.float64)
DRAFT_V4 = torch.tensor([0.45, 0.30, 0.15, 0.10], dtype=torch.float64)
NOTHING = torch.zeros(4, dtype=torch.float64)
EXACT = 1e-12


def offer(target: torch.Tensor, draft: torch.Tensor, fixed: tuple[int, ...] = ()) -> Offer:
    """What is proposed at a node."""
    return Offer(target, target.log(), draft, fixed)


def best(offered: Offer, total_variation: float) -> float:
    """The least rejections of any verifier that writes within so much total variation, by a linear program.

    Variables: the joint distribution of (sampled token, output) `[size, size]`, and how far each output's probability
    lies above the target's. An output is accepted if it is the sample or one of the cached tokens.
    """
    size, draft = offered.target_probs.numel(), offered.draft_probs.clone()
    if float(draft.sum()) == 0.0:
        draft[offered.fixed[0]] = 1.0  # nothing was sampled: as if a cached token had been, for certain
    joint, above = size * size, size
    accepted = np.array([x == y or y in offered.fixed for x in range(size) for y in range(size)], dtype=float)
    sampled = np.kron(np.eye(size), np.ones(size))
    written = np.kron(np.ones(size), np.eye(size))
    found = linprog(
        np.concatenate([-accepted, np.zeros(above)]),
        A_eq=np.hstack([sampled, np.zeros((size, above))]),
        b_eq=draft.numpy(),
        A_ub=np.vstack([np.hstack([written, -np.eye(size)]), np.concatenate([np.zeros(joint), np.ones(above)])[None]]),
        b_ub=np.concatenate([offered.target_probs.numpy(), [total_variation]]),
    )
    assert found.success
    return 1.0 + found.fun


@pytest.mark.parametrize("seed", range(12))
def test_the_front_is_what_linear_programs_find(seed: int) -> None:
    """One sample, cached tokens, and both; from lossless to accepting everything."""
    source = random.Random(seed)
    target, draft = random_distribution(source, 4), random_distribution(source, 4)
    for fixed in ((), (2,), (0, 3)):
        rows = [Sampled(draft, fixed).probs()] if float(draft[[t for t in range(4) if t not in fixed]].sum()) else []
        for row in [*rows, *([NOTHING] if fixed else [])]:
            offered = offer(target, row, fixed)
            for variation in (0.0, 0.05, 0.3, 1.0):
                assert least_rejections(offered, variation) == pytest.approx(best(offered, variation), abs=1e-8)


@pytest.mark.parametrize("fixed", [(), (3,), (0, 1)])
@pytest.mark.parametrize(
    ("mode", "rule"),
    [
        ("lossy_mentored:kl=0.05", Mentored(0.05)),
        ("lossy_mentored:kl=0.5", Mentored(0.5)),
        ("lossy_typical:epsilon=0.3,delta=0.6", Typical(0.3, 0.6)),
        ("lossy_top_beta:beta=2,tau=2", TopBeta(2, 2.0)),
    ],
)
def test_a_rules_point_is_what_its_mode_does(mode: str, rule: object, fixed: tuple[int, ...]) -> None:
    """Enumerated: how often nothing is accepted, and the distance of what is written; never below the front."""
    draft = sibling_samples([DRAFT_V4], fixed=fixed, replacement=True, exclude_fixed=True)
    done = exact_step(always(TARGET_V4), draft, verifier_of(mode))
    offered = offer(TARGET_V4, Sampled(DRAFT_V4, fixed).probs(), fixed)
    point = point_of(rule, offered)  # type: ignore[arg-type]
    assert point.rejections == pytest.approx(1.0 - done.expected_accepted, abs=EXACT)
    assert point.total_variation == pytest.approx(done.total_variation(always(TARGET_V4)), abs=EXACT)
    assert point.rejections >= least_rejections(offered, point.total_variation) - EXACT


@pytest.mark.parametrize("seed", range(6))
def test_with_one_sample_alone_every_rule_is_on_the_front(seed: int) -> None:
    """What it spends it gains, one for one."""
    source = random.Random(seed)
    offered = offer(random_distribution(source, 5, plain=True), random_distribution(source, 5, plain=True))
    for rule in (Mentored(0.1), Typical(0.2, 0.5), TopBeta(2, 1.0)):
        point = point_of(rule, offered)
        assert point.rejections == pytest.approx(least_rejections(offered, point.total_variation), abs=1e-9)


def test_a_rule_that_spends_on_a_cached_token_what_another_loses_is_above_the_front() -> None:
    """Both are cached, one is not typical: all its mass moves to the other, and no more is accepted."""
    offered = offer(TARGET_V4, NOTHING, (0, 3))
    point = point_of(Typical(0.3, 0.6), offered)
    assert point.total_variation == pytest.approx(0.6)  # all of what is not token 3
    assert point.rejections == 0.0
    assert least_rejections(offered, 0.6) == 0.0
    assert least_rejections(offered, 0.5) == 0.0  # as good for less


@pytest.mark.parametrize("fixed", [(), (3,)])
def test_a_judges_point_is_the_mean_over_samples(fixed: tuple[int, ...]) -> None:
    """Against enumeration, with a judge that overrules some tokens and never a cached one."""
    chances = torch.tensor([0.0, 0.75, 0.5, 1.0], dtype=torch.float64)
    chances[list(fixed)] = 0.0

    def judge(tree: object, rows: object, node: int) -> float:
        return float(chances[tree.token_ids[node]])  # type: ignore[attr-defined]

    draft = sibling_samples([DRAFT_V4], fixed=fixed, replacement=True, exclude_fixed=True)
    done = exact_step(always(TARGET_V4), draft, overruled_by(judge))
    row = Sampled(DRAFT_V4, fixed).probs()
    offered = offer(TARGET_V4, row, fixed)
    points = [(float(row[x]), point_of_judge(offered, x, float(chances[x]))) for x in range(4) if float(row[x]) > 0]
    rejections = sum(chance * point.rejections for chance, point in points)
    variation = sum(chance * point.total_variation for chance, point in points)
    assert rejections == pytest.approx(1.0 - done.expected_accepted, abs=EXACT)
    assert variation == pytest.approx(done.total_variation(always(TARGET_V4)), abs=EXACT)
    assert rejections == pytest.approx(least_rejections(offered, variation), abs=EXACT)
