"""A tree whose weights are computed at once, on any device, without waiting for it until a walk reads one small tensor.

The formulas are those of `precedent.verify.recursion`, which stays the reference and the default on a CPU: there,
asking only for what a walk visits costs less. Nodes with nothing but points below gain nothing from lazy coins, so they
are eager in either mode.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

from torch import Tensor

from precedent.tree import ROOT, CandidateTree, Draw
from precedent.verify.trials import Trials
from precedent.verify.weighing import Weighing


class BatchedWeights(Trials):
    """Every w, a and B of a tree; `target_probs` is `[num_nodes + 1, vocab_size]`, row 0 for the root.

    Nothing is read back from the device before the first question of a walk, and then once: w of all trials and a of
    all nodes. `check` is called with each node that the walk comes to, and raises where the node's row is not to be
    believed: a row behind a token that a grammar forbids may hold anything, and nobody gets there.

    Every point is a trial here, so that a walk draws one token. With `ahead` the token after every node is drawn
    before the walk begins: then points are left to that draw, as `recursion.Weights` does, and a `Weighing` of this and
    other trees is to follow, of whose rows `target_probs` is a part: it becomes the laws that are left (`leftover`).
    """

    def __init__(
        self,
        tree: CandidateTree,
        target_probs: Tensor,
        *,
        lazy: bool,
        check: Callable[[int], None] | None = None,
        ahead: bool = False,
    ) -> None:
        super().__init__(tree, lazy=lazy, of_points=not ahead)
        self._target_probs, self._check = target_probs, check
        self._left = target_probs if ahead or not tree.draws else target_probs.clone()
        if not ahead:
            Weighing([self], self._left)

    def weighed_by(self, weighing: Weighing, first_row: int, numbers: Mapping[tuple[int, int], int]) -> None:
        """Ask `weighing` from now on: this tree's root has its row `first_row`, and trials have these numbers there."""
        self._weighing, self._first_row, self._number = weighing, first_row, numbers

    def trials(self, node: int) -> tuple[Draw, ...]:
        """The draws below `node` that are tried one after the other, in verification order."""
        if self._check is not None:
            self._check(node)
        return super().trials(node)

    def defers(self, node: int) -> bool:
        """Whether the coin of `node` is thrown after its subtree (lazily), not before it."""
        return self.lazy and node != ROOT and not self.tree.all_points_below[node]

    def worth(self, node: int, ordinal: int) -> float:
        """The weight w of a trial below `node` once all earlier ones were rejected."""
        return self._weighing.worth(self._number[node, ordinal])

    def accept(self, node: int) -> float:
        """The weight a of `node` once all its trials were rejected."""
        return self._weighing.accept(self._first_row + node + 1)

    def leftover(self, node: int) -> Tensor:
        """The law B at `node` once all its trials were rejected, `[vocab_size]`."""
        return self._left[node + 1]

    def row(self, node: int) -> Tensor:
        """Target probabilities after `node`, `[vocab_size]`."""
        return self._target_probs[node + 1]

    def forget_laws(self) -> None:
        """Keep the weights alone, for a walk whose last token is known beforehand."""
        self._left = self._target_probs = self._left.new_empty((len(self.tree) + 1, 0))
