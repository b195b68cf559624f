"""Expected acceptance of the shipped verifiers against numbers from the literature and from closed forms."""

from __future__ import annotations

from fractions import Fraction

import pytest
import torch
from helpers.enumeration import DraftProcess, exact_step, toy_rows
from helpers.random_trees import DRAFT_V4, TARGET_V4, always, independent_paths, sibling_samples, toy_model

from precedent.sampling.rng import Rng
from precedent.tree import ROOT, CandidateTree, Sampled, TreeBuilder
from precedent.verify import prepare
from precedent_testing.replay_rng import enumerate_outcomes

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


@pytest.mark.parametrize("length", [1, 3, 5])
def test_leviathans_expected_tokens_for_identical_positions(length: int) -> None:
    """E[tokens] = (1 - alpha^(length + 1)) / (1 - alpha), alpha = sum min(target, draft) (2211.17192, eq. 1)."""
    alpha = float(torch.minimum(TARGET_TOY, DRAFT_TOY).sum())
    tokens = 1.0 + accepted(TARGET_TOY, independent_paths(always(DRAFT_TOY), 1, length))
    assert tokens == pytest.approx((1 - alpha ** (length + 1)) / (1 - alpha), abs=1e-12)


def test_rejecting_every_sample_with_replacement_is_a_product_of_total_variations() -> None:
    """P(all rejected) = prod TV(B_m, draft), B the running residual."""
    residual, product = TARGET_V4, 1.0
    for number in range(1, 5):
        left = (residual - DRAFT_V4).clamp(min=0)
        product *= float(left.sum())
        residual = left / left.sum()
        value = accepted(TARGET_V4, sibling_samples([DRAFT_V4] * number, replacement=True))
        assert value == pytest.approx(1.0 - product, abs=1e-12)


def spechub(rng: Rng) -> CandidateTree:
    """A sample, and beside it the top token, or another sample where the first one was the top token."""
    builder = TreeBuilder()
    token = rng.categorical(DRAFT_V4, ROOT, "sample 0")
    builder.add_sampled(ROOT, token, Sampled(DRAFT_V4), "draft")
    if token == 0:
        distribution = Sampled(DRAFT_V4, (0,))
        second = rng.categorical(distribution.probs(), ROOT, "sample 1")
        builder.add_sampled(ROOT, second, distribution, "draft")
    else:
        builder.add_fixed(ROOT, 0, "draft")
    return builder.build()


@pytest.mark.parametrize("mode", ["topdown", "traversal"])
def test_spechub_and_greedy_drafts_make_the_same_pairs_and_the_greedy_ones_are_verified_optimally(mode: str) -> None:
    """SpecHub 2411.05289 pairs the likeliest token with another one; greedy draft 2502.18779 makes the same pairs.

    Drafted as SpecHub writes it (a sample, then the top token or a second sample) the distribution holds, but the
    sample is tested first; drafted as a fixed candidate and one sample beside it the optimum of the pairs is reached:
    0.754545.
    """
    greedy = sibling_samples([DRAFT_V4], fixed=(0,), replacement=True, exclude_fixed=True)
    pairs = [pair_distribution(process) for process in (spechub, greedy)]
    assert pairs[0] == pytest.approx(pairs[1])
    assert accepted(TARGET_V4, spechub, mode) < accepted(TARGET_V4, greedy, mode) == pytest.approx(0.754545, abs=5e-7)


def pair_distribution(process: DraftProcess) -> dict[tuple[int, ...], float]:
    """The distribution of the candidate set at the root."""
    found: dict[tuple[int, ...], float] = {}
    for chance, tree in enumerate_outcomes(process):
        key = tuple(sorted(tree.token_ids))
        found[key] = found.get(key, 0.0) + chance
    return found


@pytest.mark.parametrize("num_tokens", [1, 2, 3])
def test_expected_rejections_are_the_sum_of_total_variations(num_tokens: int) -> None:
    """Yin et al. 2411.00841: over `num_tokens` tokens, sum over prefixes of target(prefix) TV(target, draft)."""
    target, draft = toy_model("t", 3, plain=True), toy_model("d", 3, plain=True)
    expected = _expected_distance(target, draft, num_tokens, ())
    assert _expected_rejections(target, draft, num_tokens, ()) == pytest.approx(expected, abs=1e-12)


def _expected_distance(target, draft, num_tokens: int, path: tuple[int, ...]) -> float:
    if len(path) == num_tokens:
        return 0.0
    here = 0.5 * float((target(path) - draft(path)).abs().sum())
    below = (_expected_distance(target, draft, num_tokens, (*path, token)) for token in range(3))
    return here + sum(float(p) * value for p, value in zip(target(path), below, strict=True))


def _expected_rejections(target, draft, num_tokens: int, path: tuple[int, ...]) -> float:
    """Each step drafts all that is left (no bonus token escapes the test); a recovered token is one rejection."""
    left = num_tokens - len(path)
    if left <= 0:
        return 0.0
    here, after = (lambda tail: target((*path, *tail))), (lambda tail: draft((*path, *tail)))
    total = 0.0
    for tree_probability, tree in enumerate_outcomes(independent_paths(after, 1, left)):
        for probability, verdict in enumerate_outcomes(prepare(tree, toy_rows(here, tree), "topdown")):
            committed = (*path, *(tree.token_ids[node] for node in verdict.path), verdict.next_token)
            rejected = float(verdict.kind == "recovered")
            total += (
                tree_probability * probability * (rejected + _expected_rejections(target, draft, num_tokens, committed))
            )
    return total
