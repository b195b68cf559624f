"""Verification on a GPU with one read: every number that a walk may ask for is on its way before the host waits.

Also the token that would be drawn at every node, were the walk to end there: coins that are uniform numbers by (node,
purpose) are known beforehand. A step of several sequences reads the numbers of all of them together.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol, runtime_checkable

import numpy as np
import torch
from torch import Tensor

from precedent.placing import placed
from precedent.sampling import Coins, categorical_rows
from precedent.tree import ROOT, CandidateTree
from precedent.verify.batched import BatchedWeights
from precedent.verify.verdict import Verdict
from precedent.verify.walk import NEXT, walk

LAZY = {"traversal": True, "topdown": False}
"""Modes that can be weighed ahead, and whether their coins are lazy."""


class Unread(Protocol):
    """Numbers on a device that the host will ask for."""

    def unread(self) -> Tensor:
        """All of them, `[count]` in float64, which holds every token id exactly; nothing is waited for."""

    def take(self, numbers: Sequence[float]) -> None:
        """The same numbers on the host."""


class Summarised(Unread, Protocol):
    """Rows as one matrix, of which the largest number of each must be read (`precedent.sampling.TargetRows`)."""

    def matrix(self) -> Tensor:
        """All probabilities, `[num_nodes + 1, vocab_size]`, row 0 for the root; not yet checked."""

    def check(self, node: int, /) -> None:
        """Raise GenerationError if the row after `node` cannot be sampled."""

    def forget_probs(self) -> None:
        """Let go of the matrix: nobody will ask for it again."""


@runtime_checkable
class KnownCoins(Coins, Protocol):
    """Coins that are functions of (node, purpose) alone (`precedent.sampling.CounterCoins`)."""

    def uniform(self, node: int, purpose: str) -> float:
        """A uniform number in [0, 1)."""


class VerdictAhead:
    """`BatchedWeights` and the tokens that may end its walk; the verdict is that of the same coins without it."""

    def __init__(self, tree: CandidateTree, rows: Summarised, coins: KnownCoins, mode: str) -> None:
        self._rows, self._coins = rows, coins
        self._weights = BatchedWeights(tree, rows.matrix(), lazy=LAZY[mode], check=rows.check)
        uniforms = np.array([coins.uniform(node, NEXT) for node in range(ROOT, len(tree))])
        tokens = categorical_rows(self._weights.leftovers, placed(uniforms, self._weights.leftovers.device))
        self._unread = torch.cat([self._weights.unread(), rows.unread(), tokens.double()])
        self._token_after: list[int] = []
        self._weights.forget_laws()  # as large as the vocabulary, and the other sequences of the step have theirs
        rows.forget_probs()

    def unread(self) -> Tensor:
        """Weights, largest numbers and tokens."""
        return self._unread

    def take(self, numbers: Sequence[float]) -> None:
        """Hand each its own."""
        nodes = len(self._weights.tree) + 1
        rows_from, tokens_from = len(numbers) - 3 * nodes, len(numbers) - nodes
        self._weights.take(numbers[:rows_from])
        self._rows.take(numbers[rows_from:tokens_from])
        self._token_after = [int(token) for token in numbers[tokens_from:]]

    def verdict(self) -> Verdict:
        """Throw the coins. Raises GenerationError for a row on the way that cannot be sampled."""
        return walk(self._weights, self)

    def bernoulli(self, probability: float, node: int, purpose: str) -> bool:
        """The coins' own."""
        return self._coins.bernoulli(probability, node, purpose)

    def categorical(self, weights: Tensor, node: int, purpose: str) -> int:
        """What the coins' own uniform number drew from these weights."""
        return self._token_after[node + 1]


def read_together(pending: Sequence[Unread]) -> None:
    """Read the numbers of all in one copy: the one time that a step waits for the device."""
    if not pending:
        return
    parts = [each.unread() for each in pending]
    numbers: list[float] = torch.cat(parts).tolist()
    start = 0
    for each, part in zip(pending, parts, strict=True):
        each.take(numbers[start : start + part.numel()])
        start += part.numel()
