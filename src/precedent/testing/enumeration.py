"""Exact laws of shipped code: replay it down every branch of its coins and multiply the probabilities.

    for probability, verdict in enumerate_outcomes(lambda coins: verify(tree, rows, "traversal", coins)): ...

Statistics see a bias of a few per cent; this sees 1e-12. It also refuses code that asks for the same coin twice:
counter-based coins would give the same answer twice, and the law would be wrong although every single coin is fair.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import TypeVar

import torch
from torch import Tensor

from precedent.sampling.coupling import coupled_choice
from precedent.sampling.probabilities import Coins
from precedent.tree import CandidateTree
from precedent.verify import Rows, Verdict, prepare

T = TypeVar("T")

TargetLaw = Callable[[tuple[int, ...]], Tensor]
"""A toy target model: the tokens after the committed text to the next token's probabilities `[vocab_size]`, float64."""

DraftProcess = Callable[[Coins], CandidateTree]
"""Builds a candidate tree; whatever is random in it comes from the coins."""

Prepare = Callable[[CandidateTree, Rows], Callable[[Coins], Verdict]]
"""A verifier in two halves, as in `precedent.verify.MODES`."""

ROUNDING = 1e-9


@dataclass(slots=True)
class ReplayCoins:
    """Coins that follow a script of choices and take the first possible branch where the script ends.

    `branches[i]` lists the (value, probability) pairs that decision i could have taken, `taken[i]` which one it took.
    """

    script: Sequence[int] = ()
    branches: list[list[tuple[int, float]]] = field(default_factory=list)
    taken: list[int] = field(default_factory=list)
    probability: float = 1.0
    _asked: set[tuple[int, str]] = field(default_factory=set)

    def bernoulli(self, probability: float, node: int, purpose: str) -> bool:
        """Both outcomes that have mass. Raises AssertionError unless `probability` lies in [0, 1]."""
        if not -ROUNDING <= probability <= 1.0 + ROUNDING:
            raise AssertionError(f"probability {probability} of {purpose} at node {node} lies outside [0, 1]")
        probability = min(1.0, max(0.0, probability))
        return bool(self._choose([(1, probability), (0, 1.0 - probability)], node, purpose))

    def categorical(self, weights: Tensor, node: int, purpose: str) -> int:
        """Every index that has mass. Raises AssertionError when none has or one is negative."""
        values = weights.tolist()
        total = sum(values)
        if not total > 0.0 or min(values) < 0.0:
            raise AssertionError(f"weights {values} of {purpose} at node {node} are no law")
        return self._choose([(index, value / total) for index, value in enumerate(values)], node, purpose)

    def _choose(self, options: list[tuple[int, float]], node: int, purpose: str) -> int:
        if (node, purpose) in self._asked:
            raise AssertionError(f"the coin {purpose} of node {node} was asked for twice")
        self._asked.add((node, purpose))
        possible = [option for option in options if option[1] > 0.0]
        position = len(self.taken)
        choice = self.script[position] if position < len(self.script) else 0
        self.branches.append(possible)
        self.taken.append(choice)
        value, probability = possible[choice]
        self.probability *= probability
        return value


def enumerate_outcomes(run: Callable[[Coins], T]) -> Iterator[tuple[float, T]]:
    """Every outcome of `run` with its exact probability; the probabilities sum to 1.

    `run` must be a function of its coins alone. An outcome may occur in several entries.
    """
    script: list[int] | None = []
    while script is not None:
        coins = ReplayCoins(script)
        outcome = run(coins)
        yield coins.probability, outcome
        script = _next_script(coins)


def _next_script(coins: ReplayCoins) -> list[int] | None:
    """The script of the next branch in depth-first order, None after the last one."""
    for position in reversed(range(len(coins.taken))):
        if coins.taken[position] + 1 < len(coins.branches[position]):
            return [*coins.taken[:position], coins.taken[position] + 1]
    return None


class ToyRows:
    """The rows of a toy target model over one tree; `seed` and `position` (of the root's row) are for coupled mode."""

    def __init__(self, target: TargetLaw, tree: CandidateTree, seed: int = 0, position: int = 0) -> None:
        self._target, self._tree, self._seed, self._position = target, tree, seed, position

    def __call__(self, node: int) -> Tensor:
        """Target probabilities after `node`, `[vocab_size]`."""
        return self._target(self._tree.tokens_to(node))

    def logits(self, node: int) -> Tensor:
        """Logarithms of the probabilities, `[vocab_size]`."""
        return self(node).log()

    def argmax(self, node: int) -> int:
        """The most likely token after `node`, the lowest id on ties."""
        return int(self(node).argmax())

    def coupled(self, node: int) -> int:
        """The token that the seed's noise chooses after `node`."""
        return coupled_choice(self(node), self._seed, self._position + len(self._tree.path_to(node)))


def string_law(target: TargetLaw, length: int, prefix: tuple[int, ...] = ()) -> Tensor:
    """The target's law of the next `length` tokens after `prefix`, flattened: `[vocab_size ** length]`, float64."""
    if length == 0:
        return torch.ones(1, dtype=torch.float64)
    row = target(prefix)
    tails = [string_law(target, length - 1, (*prefix, token)) for token in range(row.numel())]
    return torch.cat([probability * tail for probability, tail in zip(row, tails, strict=True)])


@dataclass(frozen=True)
class ExactLaw:
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

    def strings(self, target: TargetLaw, length: int) -> Tensor:
        """The law of the next `length` tokens when plain decoding goes on after the step, `[vocab_size ** length]`."""
        size = target(()).numel()
        law = torch.zeros(size**length, dtype=torch.float64)
        for prefix, probability in self.prefixes.items():
            tail = string_law(target, length - len(prefix), prefix)
            start = sum(token * size ** (length - 1 - i) for i, token in enumerate(prefix))
            law[start : start + tail.numel()] += probability * tail
        return law

    def total_variation(self, target: TargetLaw) -> float:
        """Half the L1 distance between the law of all strings of `max_length` tokens and the target's own."""
        difference = self.strings(target, self.max_length) - string_law(target, self.max_length)
        return 0.5 * float(difference.abs().sum())


def exact_law(target: TargetLaw, draft: DraftProcess, verifier: str | Prepare) -> ExactLaw:
    """Enumerate a step: every tree `draft` can build, every verdict on it; `verifier` is a mode or its first half."""
    first_half = verifier if callable(verifier) else lambda tree, rows: prepare(tree, rows, verifier)
    prefixes: dict[tuple[int, ...], float] = {}
    accepted, num_trees, num_outcomes = 0.0, 0, 0
    for tree_probability, tree in enumerate_outcomes(draft):
        tree.check()
        num_trees += 1
        for probability, verdict in enumerate_outcomes(first_half(tree, ToyRows(target, tree))):
            num_outcomes += 1
            committed = (*(tree.token_ids[node] for node in verdict.path), verdict.next_token)
            weight = tree_probability * probability
            prefixes[committed] = prefixes.get(committed, 0.0) + weight
            accepted += weight * verdict.num_accepted
    return ExactLaw(prefixes, accepted, num_trees, num_outcomes)


@dataclass(frozen=True, slots=True)
class CoinsOfAStep:
    """Coins that tell the steps of an answer apart."""

    coins: Coins
    step: int

    def bernoulli(self, probability: float, node: int, purpose: str) -> bool:
        """The coins' own, at a purpose of this step."""
        return self.coins.bernoulli(probability, node, f"{self.step} {purpose}")

    def categorical(self, weights: Tensor, node: int, purpose: str) -> int:
        """The coins' own, at a purpose of this step."""
        return self.coins.categorical(weights, node, f"{self.step} {purpose}")
