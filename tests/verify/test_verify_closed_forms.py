"""Expected acceptance of the shipped verifiers against numbers from the literature and from closed forms."""

from __future__ import annotations

from fractions import Fraction

import pytest
import torch
from helpers.enumeration import DraftProcess, exact_step
from helpers.random_trees import always, independent_paths, sibling_samples, toy_model

from precedent.sampling.rng import Rng
from precedent.tree import ROOT, CandidateTree, Sampled, TreeBuilder

TARGET_V4 = torch.tensor([0.10, 0.20, 0.30, 0.40], dtype=torch.float64)
DRAFT_V4 = torch.tensor([0.45, 0.30, 0.15, 0.10], dtype=torch.float64)
OTHER_V4 = torch.tensor([0.05, 0.15, 0.35, 0.45], dtype=torch.float64)
TARGET_TOY = torch.tensor([1 / 3, 2 / 3], dtype=torch.float64)
DRAFT_TOY = torch.tensor([2 / 3, 1 / 3], dtype=torch.float64)


def accepted(target: torch.Tensor, draft: DraftProcess, mode: str = "topdown") -> float:
    """Expected accepted tokens for a target that answers every path with one row; checks the distribution as well."""
    done = exact_step(always(target), draft, mode)
    assert done.total_variation(always(target)) < 1e-12
    return done.expected_accepted


@pytest.mark.parametrize(
    ("mode", "length", "expected"),
    [
        ("topdown", 2, Fraction(10, 9)),
        ("traversal", 2, Fraction(11, 9)),
        ("traversal", 3, Fraction(5, 3)),
        ("traversal", 4, Fraction(166, 81)),
        ("traversal", 5, Fraction(64, 27)),
    ],
)
def test_token_and_block_verification_on_the_toy_of_the_paper(mode: str, length: int, expected: Fraction) -> None:
    """Sun et al. 2403.10444: two tokens, target (1/3, 2/3), draft (2/3, 1/3)."""
    draft = independent_paths(always(DRAFT_TOY), 1, length)
    assert accepted(TARGET_TOY, draft, mode) == pytest.approx(float(expected), abs=1e-12)


@pytest.mark.parametrize(("vocab_size", "length"), [(2, 4), (3, 3), (4, 2)])
def test_block_verification_accepts_the_reflected_product_of_ratios(vocab_size: int, length: int) -> None:
    """P(at least i accepted) = E[p_i] with p_i = min(1, p_{i-1} target/draft)."""
    target, draft = toy_model("t", vocab_size, plain=True), toy_model("d", vocab_size, plain=True)
    done = exact_step(target, independent_paths(draft, 1, length), "traversal")
    expected = _sum_of_prefix_weights(target, draft, length, (), 1.0)
    assert done.expected_accepted == pytest.approx(expected, abs=1e-12)


def _sum_of_prefix_weights(target, draft, length: int, path: tuple[int, ...], weight: float) -> float:
    total = 0.0
    for token, probability in enumerate(draft(path).tolist() if len(path) < length else []):
        below = min(1.0, weight * float(target(path)[token]) / probability)
        total += probability * (below + _sum_of_prefix_weights(target, draft, length, (*path, token), below))
    return total


TOP = tuple(range(4))
"""Tokens, the draft model's likeliest first."""

SIBLINGS: dict[str, tuple[DraftProcess, float]] = {
    # SpecInfer's multi-step speculative sampling at one node
    **{
        f"{number} with replacement": (sibling_samples([DRAFT_V4] * number, replacement=True), expected)
        for number, expected in ((1, 0.550), (2, 0.662500), (3, 0.746875))
    },
    # MCSD 2401.06706 and Sequoia; with the whole vocabulary sampled something is always accepted (cover property)
    **{
        f"{number} without replacement": (sibling_samples([DRAFT_V4] * number, replacement=False), expected)
        for number, expected in ((1, 0.550), (2, 0.744805), (3, 0.880000), (4, 1.0))
    },
    # the draft model's top tokens as fixed candidates: their target mass
    **{
        f"{number} fixed": (sibling_samples([], fixed=TOP[:number], replacement=True), expected)
        for number, expected in ((1, 0.10), (2, 0.30), (3, 0.60))
    },
    # Hu et al. 2502.18779: all candidates fixed but the last one, which is sampled from the rest
    **{
        f"{number} fixed and a sample": (
            sibling_samples([DRAFT_V4], fixed=TOP[:number], replacement=True, exclude_fixed=True),
            expected,
        )
        for number, expected in ((1, 0.754545), (2, 1.0))
    },
    # the better draft model first; either order keeps the distribution
    "two draft models": (sibling_samples([DRAFT_V4, OTHER_V4], replacement=True), 0.9025),
    "two draft models, the better first": (sibling_samples([OTHER_V4, DRAFT_V4], replacement=True), 0.975),
}


@pytest.mark.parametrize("mode", ["topdown", "traversal"])
@pytest.mark.parametrize("name", SIBLINGS)
def test_siblings_at_one_node_accept_what_the_literature_says(name: str, mode: str) -> None:
    draft, expected = SIBLINGS[name]
    assert accepted(TARGET_V4, draft, mode) == pytest.approx(expected, abs=5e-7)


@pytest.mark.parametrize("mode", ["topdown", "traversal"])
def test_one_sample_beside_a_cached_token_reaches_the_optimum_of_a_mixed_node(mode: str) -> None:
    """target(D) + sum outside D of min(target, draft); 0.867 when the sample excludes the cached token."""
    assert accepted(TARGET_V4, sibling_samples([DRAFT_V4], fixed=(3,), replacement=True), mode) == pytest.approx(
        0.850, abs=1e-12
    )
    excluding = accepted(TARGET_V4, sibling_samples([DRAFT_V4], fixed=(3,), replacement=True, exclude_fixed=True), mode)
    distribution = Sampled(DRAFT_V4, (3,)).probs()
    optimum = 0.40 + float(torch.minimum(TARGET_V4, distribution)[:3].sum())
    assert excluding == pytest.approx(optimum, abs=1e-12) == pytest.approx(0.867, abs=5e-4)


@pytest.mark.parametrize("mode", ["topdown", "traversal"])
def test_a_sample_dropped_by_a_mask_costs_exactly_its_mass(mode: str) -> None:
    """A sample kept only where draft >= 0.2 accepts sum over kept tokens of min(target, draft)."""
    keep = DRAFT_V4 >= 0.2

    def draft(rng: Rng) -> CandidateTree:
        builder = TreeBuilder()
        builder.add_sampled(ROOT, rng.categorical(DRAFT_V4, ROOT, "sample"), Sampled(DRAFT_V4, (), keep), "draft")
        return builder.build()

    assert accepted(TARGET_V4, draft, mode) == pytest.approx(0.30, abs=1e-12)
