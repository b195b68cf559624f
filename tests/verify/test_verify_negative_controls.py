"""Well-known wrong shortcuts: each must fail the very tests that the shipped verifiers pass.

They come from published code (docs/explanation/lossless.md). If one of them passes, the exact tests have gone blind.
"""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from helpers.enumeration import DraftProcess, ExactStep, exact_step
from helpers.random_trees import DRAFT_V4, TARGET_V4, always, independent_paths, sibling_samples, toy_model

from precedent.sampling.rng import Rng
from precedent.sampling.target_rows import TargetRows
from precedent.tree import NULL, ROOT, Candidate, CandidateTree, Fixed, Sampled, TreeBuilder
from precedent.verify import Decide, RowWeights, Verifier, walk
from precedent.verify.recursion import Residual, State

TARGET_TOY = torch.tensor([1 / 3, 2 / 3], dtype=torch.float64)
DRAFT_TOY = torch.tensor([2 / 3, 1 / 3], dtype=torch.float64)
VISIBLE = 1e-3  # a bias of this total variation is nine orders of magnitude above what the exact tests let pass


def with_weights(kind: type[RowWeights], *, lazy: bool) -> Verifier:
    """The shipped walk over tampered weights."""

    def prepare(tree: CandidateTree, rows: TargetRows) -> Decide:
        weights = kind(tree, rows.probs, lazy=lazy)
        return lambda rng: walk(weights, rng)

    return prepare


def biased_by(target_row: torch.Tensor, draft: DraftProcess, verifier: str | Verifier) -> tuple[float, ExactStep]:
    """Total variation from the target, and the step; the shipped verifiers are exact on the same draft process."""
    target = always(target_row)
    done = exact_step(target, draft, verifier)
    return done.total_variation(target), done


class SkipsDuplicates(RowWeights):
    """Leaves out the residual update of a token that was sampled before."""

    def _after(self, state: State, candidate: Candidate) -> State:
        first = self.tests(candidate.parent)[self.first_test(candidate.child)]
        return super()._after(state, candidate) if candidate is first else state


@pytest.mark.parametrize("lazy", [True, False])
def test_skipping_a_duplicate_sample_without_its_residual_update_is_seen(lazy: bool) -> None:
    """Samples with replacement, duplicates removed, as EAGLE-style trees do; V4: total variation 0.0167."""
    draft = sibling_samples([DRAFT_V4, DRAFT_V4], replacement=True)
    distance, _ = biased_by(TARGET_V4, draft, with_weights(SkipsDuplicates, lazy=lazy))
    assert distance == pytest.approx(0.0167, abs=1e-4)


@pytest.mark.parametrize("key", ["token id", "draft probability", "target probability"])
def test_resorting_siblings_is_seen(key: str) -> None:
    """Samples without replacement from one distribution, verified in another order than they were sampled in."""
    ranks = {
        "token id": lambda token: token,
        "draft probability": lambda token: -float(DRAFT_V4[token]),
        "target probability": lambda token: -float(TARGET_V4[token]),
    }

    def resorted(tree: CandidateTree, rows: TargetRows) -> Decide:
        order = sorted(tree.candidates, key=lambda candidate: ranks[key](tree.token_ids[candidate.child]))
        tokens = [tree.token_ids[candidate.child] for candidate in order]
        candidates = tuple(
            Candidate(ROOT, candidate.child, Sampled(DRAFT_V4, tuple(tokens[:position])))
            for position, candidate in enumerate(order)
        )
        weights = RowWeights(replace(tree, candidates=candidates), rows.probs, lazy=True)
        return lambda rng: walk(weights, rng)

    distance, _ = biased_by(TARGET_V4, sibling_samples([DRAFT_V4, DRAFT_V4], replacement=False), resorted)
    assert distance > 0.05


def test_dropping_a_sampled_candidate_is_seen() -> None:
    """A sample of low draft probability removed after it was sampled, instead of a keep_mask."""

    def draft(rng: Rng) -> CandidateTree:
        token = rng.categorical(DRAFT_V4, ROOT, "sample")
        builder = TreeBuilder()
        if DRAFT_V4[token] >= 0.2:
            builder.add_sampled(ROOT, token, Sampled(DRAFT_V4), "draft")
        return builder.build()

    distance, _ = biased_by(TARGET_V4, draft, "traversal")
    assert distance == pytest.approx(0.075, abs=1e-3)


class ArgmaxRng:
    """Takes the most likely token where the target's token should be sampled."""

    def __init__(self, rng: Rng) -> None:
        self.bernoulli = rng.bernoulli

    def categorical(self, weights: torch.Tensor, node: int, purpose: str) -> int:
        return int(weights.argmax())


@pytest.mark.parametrize("mode_is_lazy", [True, False])
def test_an_argmax_bonus_token_is_seen(mode_is_lazy: bool) -> None:
    """Accepting by sampling but adding the most likely token."""

    def verifier(tree: CandidateTree, rows: TargetRows) -> Decide:
        weights = RowWeights(tree, rows.probs, lazy=mode_is_lazy)
        return lambda rng: walk(weights, ArgmaxRng(rng))

    distance, _ = biased_by(TARGET_V4, sibling_samples([DRAFT_V4], replacement=True), verifier)
    assert distance > 0.1


class UncappedLastPosition(RowWeights):
    """Accepts the whole chain with min(1, product of all ratios), not capped at 1 along the way (HSD's code)."""

    def _entering(self, node: int) -> float:
        if node == ROOT or node in self.tree.candidates_at:
            return super()._entering(node)
        ratio = 1.0
        for below in self.tree.path_to(node):
            parent, token = self.tree.parents[below], self.tree.token_ids[below]
            distribution = self.tree.candidates_at[parent][0].distribution
            ratio *= float(self._probs(parent)[token]) / float(distribution.probs()[token])  # type: ignore[union-attr]
        return min(1.0, ratio)


def test_an_uncapped_final_acceptance_is_seen_and_exceeds_the_optimum() -> None:
    """E[accepted] = 4/3 where the linear program allows 11/9; total variation 1/9."""
    draft = independent_paths(always(DRAFT_TOY), 1, 2)
    distance, done = biased_by(TARGET_TOY, draft, with_weights(UncappedLastPosition, lazy=True))
    assert done.expected_accepted == pytest.approx(4 / 3)
    assert done.expected_accepted > 11 / 9 + 0.1
    assert distance == pytest.approx(1 / 9, abs=1e-6)


@pytest.mark.parametrize(("number", "expected"), [(2, 0.20), (3, 0.50)])
def test_deterministic_candidates_scored_with_a_softmax_are_seen(number: int, expected: float) -> None:
    """MCSD's acceptance at draft temperature 0: the top tokens are certain, yet q is a softmax over them."""
    top = torch.zeros_like(DRAFT_V4).scatter(0, DRAFT_V4.topk(number).indices, DRAFT_V4.topk(number).values)

    def draft(rng: Rng) -> CandidateTree:
        builder = TreeBuilder()
        for token in range(number):
            builder.add_sampled(ROOT, token, Sampled(top / top.sum(), tuple(range(token))), "draft")
        return builder.build()

    distance, _ = biased_by(TARGET_V4, draft, "topdown")
    assert distance == pytest.approx(expected, abs=5e-3)


def test_a_draft_distribution_that_was_not_sampled_is_seen() -> None:
    """Reporting the raw distribution while sampling from a warped one (a processor forgotten on one side)."""
    warped = DRAFT_V4**2 / (DRAFT_V4**2).sum()

    def draft(rng: Rng) -> CandidateTree:
        builder = TreeBuilder()
        builder.add_sampled(ROOT, rng.categorical(warped, ROOT, "sample"), Sampled(DRAFT_V4), "draft")
        return builder.build()

    distance, _ = biased_by(TARGET_V4, draft, "traversal")
    assert distance > VISIBLE


class ForgetsDroppedSamples(RowWeights):
    """Treats a sample that a keep_mask dropped as if it had never been taken."""

    def _after(self, state: State, candidate: Candidate) -> State:
        return state if candidate.child == NULL else super()._after(state, candidate)


def test_forgetting_a_dropped_sample_is_seen() -> None:
    """The null event carries mass: the residual must be taken although nothing was proposed."""

    def draft(rng: Rng) -> CandidateTree:
        builder = TreeBuilder()
        distribution = Sampled(DRAFT_V4, (), DRAFT_V4 >= 0.2)
        builder.add_sampled(ROOT, rng.categorical(DRAFT_V4, ROOT, "sample"), distribution, "draft")
        return builder.build()

    distance, _ = biased_by(TARGET_V4, draft, with_weights(ForgetsDroppedSamples, lazy=False))
    assert distance == pytest.approx(0.075, abs=1e-3)


class UnchangedWeight(RowWeights):
    """Forgets that a rejection is news about a: keeps the entering weight instead of R / (R + 1 - a)."""

    def _after(self, state: State, candidate: Candidate) -> State:
        return State(state.weight, super()._after(state, candidate).residual)


def test_an_unchanged_prefix_weight_is_seen_in_a_tree() -> None:
    """The a-update is what separates block verification from a plain product of ratios."""
    target, draft = toy_model("target", 3, plain=True), toy_model("draft", 3, plain=True)
    done = exact_step(target, independent_paths(draft, 1, 3), with_weights(UnchangedWeight, lazy=True))
    assert done.total_variation(target) > VISIBLE


class CacheFirst(CandidateTree):
    """Makes every fixed candidate a test of its own, so that the order of candidates is the order of tests."""

    @property
    def only_fixed_below(self) -> tuple[bool, ...]:  # type: ignore[override]
        return (False,) * len(self)


def test_cached_tokens_first_is_lossless_but_accepts_less() -> None:
    """Samples before fixed candidates at a mixed node: 0.850 against 0.770, which is what the order is for."""

    def cache_first(tree: CandidateTree, rows: TargetRows) -> Decide:
        # there whatever was sampled, or its presence would tell
        cached = Candidate(ROOT, tree.token_ids.index(3), Fixed())
        candidates = (cached, *(each for each in tree.candidates if isinstance(each.distribution, Sampled)))
        reordered = CacheFirst(tree.token_ids, tree.parents, candidates, tree.sources)
        weights = RowWeights(reordered, rows.probs, lazy=False)
        return lambda rng: walk(weights, rng)

    draft = sibling_samples([DRAFT_V4], fixed=(3,), replacement=True)
    distance, done = biased_by(TARGET_V4, draft, cache_first)
    assert distance < 1e-12
    assert done.expected_accepted == pytest.approx(0.770, abs=1e-12)
    _, shipped = biased_by(TARGET_V4, draft, "topdown")
    assert shipped.expected_accepted == pytest.approx(0.850, abs=1e-12)


def test_the_tampered_harness_itself_is_exact_without_tampering() -> None:
    """Guards the controls: untampered weights through the same route pass."""
    for lazy in (True, False):
        draft = sibling_samples([DRAFT_V4] * 2, replacement=True)
        distance, _ = biased_by(TARGET_V4, draft, with_weights(RowWeights, lazy=lazy))
        assert distance < 1e-12


def test_residual_arithmetic_is_what_the_controls_tamper_with() -> None:
    """(a B - q)+ by hand: B = V4 target at a = 1/2 after a sample from V4 draft."""
    state = State(0.5, Residual(TARGET_V4)).after_rejecting_sampled(DRAFT_V4)
    left = (0.5 * TARGET_V4 - DRAFT_V4).clamp(min=0)
    assert torch.allclose(state.residual.dense(), left)
    assert state.weight == pytest.approx(float(left.sum()) / (float(left.sum()) + 0.5))
