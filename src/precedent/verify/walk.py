"""The half of verification that throws coins; it reads numbers, and one row of probabilities per token it draws."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Protocol

from torch import Tensor

from precedent.sampling.probabilities import Coins
from precedent.tree import ROOT, CandidateTree, Draw
from precedent.verify.verdict import Verdict

ACCEPT = "verify-accept"
NEXT = "verify-next"


class Weighed(Protocol):
    """A tree whose weights are known: `recursion.Weights` (lazily, one row after the other) or `batched`."""

    @property
    def tree(self) -> CandidateTree:
        """The tree that was weighed."""

    def trials(self, node: int) -> tuple[Draw, ...]:
        """The draws below `node` that are tried one after the other, in verification order."""

    def point_children(self, node: int) -> Mapping[int, int]:
        """Token id to child node, for the point children that are handled after all trials."""

    def ordinal(self, node: int) -> int:
        """Which trial of its parent brought `node` in first."""

    def defers(self, node: int) -> bool:
        """Whether the coin of `node` is thrown after its subtree (lazily), not before it."""

    def worth(self, node: int, ordinal: int) -> float:
        """The weight w of a trial below `node` once all earlier ones were rejected."""

    def accept(self, node: int) -> float:
        """The weight a of `node` once all its trials were rejected."""

    def leftover(self, node: int) -> Tensor:
        """The law B at `node` once all its trials were rejected, `[vocab_size]`, not necessarily normalised."""

    def row(self, node: int, /) -> Tensor:
        """Target probabilities after `node`, `[vocab_size]`."""


def walk(weights: Weighed, coins: Coins, start: int = ROOT) -> Verdict:
    """Throw the coins below `start`, which stands: at most one acceptance coin and one token draw per node."""
    node, ordinal = start, 0
    while True:
        trials = weights.trials(node)
        if ordinal < len(trials):
            child, worth = trials[ordinal].child, weights.worth(node, ordinal)
            purpose = ACCEPT if worth > 0.0 and weights.ordinal(child) == ordinal else f"{ACCEPT} {ordinal}"
            if worth > 0.0 and (weights.defers(child) or coins.bernoulli(worth, child, purpose)):
                node, ordinal = child, 0
            else:
                ordinal += 1
        elif node == start or not weights.defers(node) or coins.bernoulli(weights.accept(node), node, ACCEPT):
            return _finish(weights, node, coins)
        else:
            node, ordinal = weights.tree.parents[node], weights.ordinal(node) + 1


def _finish(weights: Weighed, node: int, coins: Coins) -> Verdict:
    """Draw the next token from what is left at `node`, descending while it is a point child."""
    law = weights.leftover(node)
    while True:
        token = coins.categorical(law, node, NEXT)
        child = weights.point_children(node).get(token)
        if child is None:
            return Verdict.ending_at(weights.tree, node, token)
        node, law = child, weights.row(child)
