"""Leaves that were drawn while the rest of their tree was scored (`decoding.pearl`): judged without rows of their own.

The verdict on a draw needs the row of its parent only; what follows it is for the next step to say.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cached_property

import torch
from torch import Tensor

from precedent.config import is_lossy
from precedent.decoding.sequence import DecodingSequence
from precedent.sampling.target_rows import TargetRows
from precedent.tree import CandidateTree
from precedent.verify import Verdict


class RowsSoFar:
    """The rows of a tree whose last nodes were drawn while the others were scored.

    Behind those the target has said nothing yet. Verification may ask, and what it hears stands for no law: a verdict
    that gets there ends there.
    """

    def __init__(self, rows: TargetRows, num_scored: int, num_nodes: int) -> None:
        self._rows, self._num_scored, self._num_unscored = rows, num_scored, num_nodes - num_scored

    def __call__(self, node: int) -> Tensor:
        """Target probabilities after `node`, `[vocab_size]`."""
        return self._rows(node) if node < self._num_scored else self._unknown.softmax(0)

    def logits(self, node: int) -> Tensor:
        """The constrained logits after `node`, `[vocab_size]`."""
        return self._rows.logits(node) if node < self._num_scored else self._unknown

    def argmax(self, node: int) -> int:
        """The greedy token after `node`."""
        return self._rows.argmax(node) if node < self._num_scored else 0

    def coupled(self, node: int) -> int:
        """The token that the seed's noise chooses after `node`."""
        return self._rows.coupled(node) if node < self._num_scored else 0

    def noise_keys(self) -> list[int]:
        """The key of the seed's noise after the root and after every node; any behind nodes without a row."""
        return [*self._rows.noise_keys(), *[0] * self._num_unscored]

    @property
    def law(self) -> tuple[float, int, float, float]:
        """What makes a law of a row."""
        return self._rows.law

    def law_of(self, logits: Tensor) -> Tensor:
        """Probabilities of any logits `[..., vocab_size]`."""
        return self._rows.law_of(logits)

    @property
    def vocab_size(self) -> int:
        """Numbers in a row."""
        return self._rows.vocab_size

    def logits_of_all(self) -> Tensor:
        """The constrained logits, `[num_nodes + 1, vocab_size]`."""
        return torch.cat([self._rows.logits_of_all(), self._unknown.expand(self._num_unscored, -1)])

    def matrix(self) -> Tensor:
        """All probabilities, `[num_nodes + 1, vocab_size]`, row 0 for the root."""
        return torch.cat([self._rows.matrix(), self._unknown.softmax(0).expand(self._num_unscored, -1)])

    def check(self, node: int) -> None:
        """Raise GenerationError if the row after a scored `node` cannot be sampled."""
        if node < self._num_scored:
            self._rows.check(node)

    def take(self, numbers: Sequence[float]) -> None:
        """The largest logit of every row, then their ids; those of unscored leaves say nothing."""
        ids = len(numbers) // 2
        scored = self._num_scored + 1
        self._rows.take([*numbers[:scored], *numbers[ids : ids + scored]])

    @cached_property
    def _unknown(self) -> Tensor:
        """Logits of a law that is cheap to draw from."""
        return self._rows.certainty()


def with_draws_at_hand(sequence: DecodingSequence, tree: CandidateTree) -> CandidateTree:
    """A tree that was scored, and below it what was drawn beside the forward: leaves without rows of their own."""
    if sequence.draws_at_hand and not is_lossy(sequence.mode):
        for drafting in sequence.drafting_ahead.values():
            tree = drafting.hung_below(tree)
    return tree


Judged = tuple[CandidateTree, tuple[int, ...], Verdict]
"""The tree that was verified, the nodes that were accepted of it, and the verdict."""


def judged(tree: CandidateTree, num_scored: int, verdict: Verdict) -> Judged:
    """A verdict on a tree of which so many nodes were scored: (tree, accepted nodes, verdict).

    Where the accepted nodes end at a leaf without a row, its token is the verdict's next token, and the verdict's path
    ends before it.
    """
    path = verdict.path
    if path and path[-1] >= num_scored:
        verdict = Verdict(path[:-1], tree.token_ids[path[-1]], verdict.kind, verdict.spent_tv)
    return tree, path, verdict
