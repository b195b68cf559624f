"""Well-known wrong shortcuts: each must fail the very tests that the shipped verifiers pass.

They come from published code (docs/verification.md). If one of them passes, the law test has gone blind.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import pytest
import torch

from precedent.sampling.probabilities import Coins
from precedent.testing.enumeration import DraftProcess, ExactLaw, exact_law
from precedent.testing.random_trees import always, independent_paths, sibling_draws, toy_model
from precedent.tree import NULL, ROOT, CandidateTree, Draw, Drawn, Point, TreeBuilder
from precedent.verify import Rows, Verdict, Weights, walk
from precedent.verify.recursion import Residual, State

TARGET_V4 = torch.tensor([0.10, 0.20, 0.30, 0.40], dtype=torch.float64)
DRAFT_V4 = torch.tensor([0.45, 0.30, 0.15, 0.10], dtype=torch.float64)
TARGET_TOY = torch.tensor([1 / 3, 2 / 3], dtype=torch.float64)
DRAFT_TOY = torch.tensor([2 / 3, 1 / 3], dtype=torch.float64)
VISIBLE = 1e-3  # a bias of this total variation is nine orders of magnitude above what the law test lets pass


def with_weights(kind: type[Weights], *, lazy: bool) -> Callable[[CandidateTree, Rows], Callable[[Coins], Verdict]]:
    """The shipped walk over tampered weights."""

    def first_half(tree: CandidateTree, rows: Rows) -> Callable[[Coins], Verdict]:
        weights = kind(tree, rows, lazy=lazy)
        return lambda coins: walk(weights, coins)

    return first_half


def biased_by(target_row: torch.Tensor, draft: DraftProcess, verifier) -> tuple[float, ExactLaw]:
    """Total variation from the target, and the law; the shipped verifiers are exact on the same draft process."""
    target = always(target_row)
    law = exact_law(target, draft, verifier)
    return law.total_variation(target), law


class SkipsDuplicates(Weights):
    """Leaves out the residual update of a token that was drawn before."""

    def _after(self, state: State, draw: Draw) -> State:
        first = self._trials[draw.parent][self._ordinals[draw.child]]
        return super()._after(state, draw) if draw is first else state


@pytest.mark.parametrize("lazy", [True, False])
def test_skipping_a_duplicate_draw_without_its_residual_update_is_seen(lazy: bool) -> None:
    """Draws with replacement, duplicates removed, as EAGLE-style trees do; V4: total variation 0.0167."""
    draft = sibling_draws([DRAFT_V4, DRAFT_V4], replacement=True)
    distance, _ = biased_by(TARGET_V4, draft, with_weights(SkipsDuplicates, lazy=lazy))
    assert distance == pytest.approx(0.0167, abs=1e-4)


@pytest.mark.parametrize("key", ["token id", "draft probability", "target probability"])
def test_resorting_siblings_is_seen(key: str) -> None:
    """Draws without replacement from one law, verified in another order than they were drawn in."""
    ranks = {
        "token id": lambda token: token,
        "draft probability": lambda token: -float(DRAFT_V4[token]),
        "target probability": lambda token: -float(TARGET_V4[token]),
    }

    def resorted(tree: CandidateTree, rows: Rows) -> Callable[[Coins], Verdict]:
        order = sorted(tree.draws, key=lambda draw: ranks[key](tree.token_ids[draw.child]))
        tokens = [tree.token_ids[draw.child] for draw in order]
        draws = tuple(
            Draw(ROOT, draw.child, Drawn(DRAFT_V4, tuple(tokens[:position]))) for position, draw in enumerate(order)
        )
        weights = Weights(replace(tree, draws=draws), rows, lazy=True)
        return lambda coins: walk(weights, coins)

    distance, _ = biased_by(TARGET_V4, sibling_draws([DRAFT_V4, DRAFT_V4], replacement=False), resorted)
    assert distance > 0.05


def test_dropping_a_sampled_candidate_is_seen() -> None:
    """A draw of low draft probability removed after it was drawn, instead of a keep_mask."""

    def draft(coins: Coins) -> CandidateTree:
        token = coins.categorical(DRAFT_V4, ROOT, "draw")
        builder = TreeBuilder()
        if DRAFT_V4[token] >= 0.2:
            builder.add_draw(ROOT, token, Drawn(DRAFT_V4), "draft")
        return builder.build()

    distance, _ = biased_by(TARGET_V4, draft, "traversal")
    assert distance == pytest.approx(0.075, abs=1e-3)


class ArgmaxCoins:
    """Takes the most likely token where the target's token should be drawn."""

    def __init__(self, coins: Coins) -> None:
        self.bernoulli = coins.bernoulli

    def categorical(self, weights: torch.Tensor, node: int, purpose: str) -> int:
        return int(weights.argmax())


@pytest.mark.parametrize("mode_is_lazy", [True, False])
def test_an_argmax_bonus_token_is_seen(mode_is_lazy: bool) -> None:
    """Accepting by sampling but adding the most likely token."""

    def verifier(tree: CandidateTree, rows: Rows) -> Callable[[Coins], Verdict]:
        weights = Weights(tree, rows, lazy=mode_is_lazy)
        return lambda coins: walk(weights, ArgmaxCoins(coins))

    distance, _ = biased_by(TARGET_V4, sibling_draws([DRAFT_V4], replacement=True), verifier)
    assert distance > 0.1


class UncappedLastPosition(Weights):
    """Accepts the whole chain with min(1, product of all ratios), not capped at 1 along the way (HSD's code)."""

    def _entering(self, node: int) -> float:
        if node == ROOT or node in self.tree.draws_at:
            return super()._entering(node)
        ratio = 1.0
        for below in self.tree.path_to(node):
            parent, token = self.tree.parents[below], self.tree.token_ids[below]
            law = self.tree.draws_at[parent][0].law
            ratio *= float(self.row(parent)[token]) / float(law.probs()[token])  # type: ignore[union-attr]
        return min(1.0, ratio)


def test_an_uncapped_final_acceptance_is_seen_and_exceeds_the_optimum() -> None:
    """E[accepted] = 4/3 where the linear program allows 11/9; total variation 1/9."""
    draft = independent_paths(always(DRAFT_TOY), 1, 2)
    distance, law = biased_by(TARGET_TOY, draft, with_weights(UncappedLastPosition, lazy=True))
    assert law.expected_accepted == pytest.approx(4 / 3)
    assert law.expected_accepted > 11 / 9 + 0.1
    assert distance == pytest.approx(1 / 9, abs=1e-6)


@pytest.mark.parametrize(("number", "expected"), [(2, 0.20), (3, 0.50)])
def test_deterministic_candidates_scored_with_a_softmax_are_seen(number: int, expected: float) -> None:
    """MCSD's acceptance at draft temperature 0: the top tokens are certain, yet q is a softmax over them."""
    top = torch.zeros_like(DRAFT_V4).scatter(0, DRAFT_V4.topk(number).indices, DRAFT_V4.topk(number).values)

    def draft(coins: Coins) -> CandidateTree:
        builder = TreeBuilder()
        for token in range(number):
            builder.add_draw(ROOT, token, Drawn(top / top.sum(), tuple(range(token))), "draft")
        return builder.build()

    distance, _ = biased_by(TARGET_V4, draft, "topdown")
    assert distance == pytest.approx(expected, abs=5e-3)


def test_a_draft_law_that_was_not_sampled_is_seen() -> None:
    """Reporting the raw law while drawing from a warped one (a processor forgotten on one side)."""
    warped = DRAFT_V4**2 / (DRAFT_V4**2).sum()

    def draft(coins: Coins) -> CandidateTree:
        builder = TreeBuilder()
        builder.add_draw(ROOT, coins.categorical(warped, ROOT, "draw"), Drawn(DRAFT_V4), "draft")
        return builder.build()

    distance, _ = biased_by(TARGET_V4, draft, "traversal")
    assert distance > VISIBLE


class ForgetsNullDraws(Weights):
    """Treats a swallowed draw as if it had never been made."""

    def _after(self, state: State, draw: Draw) -> State:
        return state if draw.child == NULL else super()._after(state, draw)


def test_forgetting_a_swallowed_draw_is_seen() -> None:
    """The null event carries mass: the residual must be taken although nothing was proposed."""

    def draft(coins: Coins) -> CandidateTree:
        builder = TreeBuilder()
        law = Drawn(DRAFT_V4, (), DRAFT_V4 >= 0.2)
        builder.add_draw(ROOT, coins.categorical(DRAFT_V4, ROOT, "draw"), law, "draft")
        return builder.build()

    distance, _ = biased_by(TARGET_V4, draft, with_weights(ForgetsNullDraws, lazy=False))
    assert distance == pytest.approx(0.075, abs=1e-3)


class NormalisedWeight(Weights):
    """Forgets that a rejection is news about a: keeps the entering weight instead of R / (R + 1 - a)."""

    def _after(self, state: State, draw: Draw) -> State:
        return State(state.accept, super()._after(state, draw).residual)


def test_an_unchanged_prefix_weight_is_seen_in_a_tree() -> None:
    """The a-update is what separates block verification from a plain product of ratios."""
    target, draft = toy_model("target", 3, plain=True), toy_model("draft", 3, plain=True)
    law = exact_law(target, independent_paths(draft, 1, 3), with_weights(NormalisedWeight, lazy=True))
    assert law.total_variation(target) > VISIBLE


class CacheFirst(CandidateTree):
    """Makes every point a trial of its own, so that the order of draws is the order of trials."""

    @property
    def all_points_below(self) -> tuple[bool, ...]:  # type: ignore[override]
        return (False,) * len(self)


def test_cached_tokens_first_is_lossless_but_accepts_less() -> None:
    """Draws before points at a mixed node: 0.850 against 0.770, and the gain is what the order is for."""

    def cache_first(tree: CandidateTree, rows: Rows) -> Callable[[Coins], Verdict]:
        cached = Draw(ROOT, tree.token_ids.index(3), Point())  # there whatever was drawn, or its presence would tell
        draws = (cached, *(draw for draw in tree.draws if isinstance(draw.law, Drawn)))
        weights = Weights(CacheFirst(tree.token_ids, tree.parents, draws, tree.sources), rows, lazy=False)
        return lambda coins: walk(weights, coins)

    draft = sibling_draws([DRAFT_V4], points=(3,), replacement=True)
    distance, law = biased_by(TARGET_V4, draft, cache_first)
    assert distance < 1e-12
    assert law.expected_accepted == pytest.approx(0.770, abs=1e-12)
    _, shipped = biased_by(TARGET_V4, draft, "topdown")
    assert shipped.expected_accepted == pytest.approx(0.850, abs=1e-12)


def test_the_tampered_harness_itself_is_exact_without_tampering() -> None:
    """Guards the controls: untampered weights through the same route pass."""
    for lazy in (True, False):
        distance, _ = biased_by(
            TARGET_V4, sibling_draws([DRAFT_V4] * 2, replacement=True), with_weights(Weights, lazy=lazy)
        )
        assert distance < 1e-12


def test_residual_arithmetic_is_what_the_controls_tamper_with() -> None:
    """(a B - q)+ by hand: B = V4 target at a = 1/2 after a draw from the draft law."""
    state = State(0.5, Residual(TARGET_V4)).after_rejecting_draw(DRAFT_V4)
    left = (0.5 * TARGET_V4 - DRAFT_V4).clamp(min=0)
    assert torch.allclose(state.residual.dense(), left)
    assert state.accept == pytest.approx(float(left.sum()) / (float(left.sum()) + 0.5))
