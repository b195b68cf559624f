"""What one step of speculative decoding does, exactly: every tree that can be drafted, every verdict on it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor

from precedent.config import SamplingParams
from precedent.sampling.rng import Rng
from precedent.sampling.target_rows import TargetRows
from precedent.tree import ROOT, CandidateTree, TreeBuilder
from precedent.verify import Verifier, verifier_of
from precedent_testing.draft_distribution import Drawing
from precedent_testing.replay_rng import enumerate_outcomes
from precedent_testing.trees import check_tree

ToyModel = Callable[[tuple[int, ...]], Tensor]
"""A toy target model: the tokens after the committed text to the next token's probabilities `[vocab_size]`, float64."""

DraftProcess = Callable[[Rng], CandidateTree]
"""Builds a candidate tree; whatever is random in it comes from its argument."""


def toy_rows(model: ToyModel, tree: CandidateTree, seed: int = 0, position: int = 0) -> TargetRows:
    """The rows of a toy model over one tree; `seed` and `position` (of the root's row) are for coupled mode."""
    probs = torch.stack([model(tree.tokens_to(node)) for node in range(ROOT, len(tree))])
    return TargetRows(probs.log(), tree, SamplingParams(temperature=1.0, seed=seed), (0,) * position)


def string_distribution(target: ToyModel, length: int, prefix: tuple[int, ...] = ()) -> Tensor:
    """The target's distribution of the next `length` tokens after `prefix`, `[vocab_size ** length]`, float64."""
    if length == 0:
        return torch.ones(1, dtype=torch.float64)
    row = target(prefix)
    tails = [string_distribution(target, length - 1, (*prefix, token)) for token in range(row.numel())]
    return torch.cat([probability * tail for probability, tail in zip(row, tails, strict=True)])


@dataclass(frozen=True)
class ExactStep:
    """What one step of speculative decoding does, exactly.

    `prefixes` maps every committed token sequence (accepted tokens and the added one) to its probability;
    `expected_accepted` counts accepted draft tokens; `num_trees` and `num_outcomes` say how much was replayed.
    """

    prefixes: dict[tuple[int, ...], float]
    expected_accepted: float
    num_trees: int
    num_outcomes: int

    @cached_property
    def max_length(self) -> int:
        """Tokens of the longest committed sequence."""
        return max(map(len, self.prefixes))

    def strings(self, target: ToyModel, length: int) -> Tensor:
        """The distribution of the next `length` tokens if plain decoding follows the step, `[vocab_size ** length]`."""
        size = target(()).numel()
        distribution = torch.zeros(size**length, dtype=torch.float64)
        for prefix, probability in self.prefixes.items():
            tail = string_distribution(target, length - len(prefix), prefix)
            start = sum(token * size ** (length - 1 - i) for i, token in enumerate(prefix))
            distribution[start : start + tail.numel()] += probability * tail
        return distribution

    def total_variation(self, target: ToyModel) -> float:
        """Half the L1 distance between the distributions of all strings of `max_length` tokens and the target's own."""
        difference = self.strings(target, self.max_length) - string_distribution(target, self.max_length)
        return 0.5 * float(difference.abs().sum())


def exact_step(target: ToyModel, draft: DraftProcess, verifier: str | Verifier) -> ExactStep:
    """Enumerate a step: every tree that `draft` can build, every verdict of `verifier` (or of a mode) on it."""
    prepare = verifier if callable(verifier) else verifier_of(verifier)
    prefixes: dict[tuple[int, ...], float] = {}
    accepted, num_trees, num_outcomes = 0.0, 0, 0
    for tree_probability, tree in enumerate_outcomes(draft):
        check_tree(tree)
        num_trees += 1
        for probability, verdict in enumerate_outcomes(prepare(tree, toy_rows(target, tree))):
            num_outcomes += 1
            committed = (*(tree.token_ids[node] for node in verdict.path), verdict.next_token)
            weight = tree_probability * probability
            prefixes[committed] = prefixes.get(committed, 0.0) + weight
            accepted += weight * verdict.num_accepted
    return ExactStep(prefixes, accepted, num_trees, num_outcomes)


def check_drawn_step(target: ToyModel, drawing: Drawing, mode: str) -> None:
    """Whatever tree is drawn, and whatever the verdict on it: the committed tokens are the target's, exactly."""

    def draft(rng: Rng) -> CandidateTree:
        builder = TreeBuilder()
        drawing(builder, rng)
        return builder.build()

    step = exact_step(target, draft, mode)
    assert step.num_trees > 1
    assert step.total_variation(target) < 1e-12


def mean_spent(target: ToyModel, draft: DraftProcess, verifier: Verifier) -> float:
    """The mean of what the verdicts of a step say they spent."""
    return sum(
        chance * probability * verdict.spent_tv
        for chance, tree in enumerate_outcomes(draft)
        for probability, verdict in enumerate_outcomes(verifier(tree, toy_rows(target, tree)))
    )


@dataclass(frozen=True, slots=True)
class RngOfAStep:
    """Random numbers that tell the steps of an answer apart."""

    rng: Rng
    step: int

    def bernoulli(self, probability: float, node: int, purpose: str) -> bool:
        """The same, at a purpose of this step."""
        return self.rng.bernoulli(probability, node, f"{self.step} {purpose}")

    def categorical(self, weights: Tensor, node: int, purpose: str) -> int:
        """The same, at a purpose of this step."""
        return self.rng.categorical(weights, node, f"{self.step} {purpose}")
