"""K-SEQ (SpecTr 2310.15141): another way to weigh several independent draws from one law at a node, with eager coins.

Recursive rejection tests the first draw against all of p, the second against what is left. K-SEQ tests each of K draws
against p / rho, rho in [1, K], with a coin of its own, so each accepts with probability beta = sum min(q, p / rho).
The smallest rho for which nothing is overpaid solves `1 - (1 - beta)^K = rho beta`. It accepts at least
`1 - (1 - 1/K)^K` of what an optimal transport plan (`precedent.verify.transport`) would. Two plans need no code, for
they are ways of drafting that the recursion verifies optimally: greedy draft (2502.18779: top tokens as points and one
draw beside them) and its case of two candidates, SpecHub (2411.05289).
"""

from __future__ import annotations

import torch
from torch import Tensor

from precedent.tree import CandidateTree, Draw, Drawn
from precedent.verify.recursion import Residual, RowsOf, State, Weights
from precedent.verify.siblings import leading_siblings

BISECTIONS = 50


class KSeqWeights(Weights):
    """Weights with eager coins where the independent draws that open a node's list form a K-SEQ group."""

    def __init__(self, tree: CandidateTree, rows: RowsOf) -> None:
        super().__init__(tree, rows, lazy=False)
        groups = {node: leading_siblings(tree, draws, len(draws)) for node, draws in self._trials.items()}
        self._groups = {node: group for node, group in groups.items() if group is not None and group.replacement}
        self._plans: dict[int, tuple[Tensor, float]] = {}

    def worth(self, node: int, ordinal: int) -> float:
        """The chance of a trial; inside a group the same for every draw of a token, repeated ones included."""
        if ordinal >= self._size(node):
            return super().worth(node, ordinal)
        law, token = self._trials[node][ordinal].law, self._groups[node].tokens[ordinal]
        assert isinstance(law, Drawn)
        return min(1.0, float(self._plan(node)[0][token]) / float(self._law(law)[token]))

    def _after(self, state: State, draw: Draw) -> State:
        position, size = len(self._states[draw.parent]), self._size(draw.parent)
        if position > size:
            return super()._after(state, draw)
        return state if position < size else self._after_group(draw.parent)

    def _after_group(self, node: int) -> State:
        """B once the whole group was rejected: what the target is owed beyond what the group pays."""
        each, share = self._plan(node)
        left = Residual.of((self.row(node) - share * each).clamp_(min=0.0))
        return State(1.0, left if left.mass > torch.finfo(left.values.dtype).tiny else Residual(self.row(node)))

    def _plan(self, node: int) -> tuple[Tensor, float]:
        """min(q, p / rho), and the factor by which a group of K pays it."""
        if node not in self._plans:
            row, law = self.row(node), self._groups[node].law(()).probs()
            self._plans[node] = k_seq(row, law.to(row), self._size(node))
        return self._plans[node]

    def _size(self, node: int) -> int:
        group = self._groups.get(node)
        return 0 if group is None else len(group.tokens)


def k_seq(target_probs: Tensor, draft_probs: Tensor, num_draws: int) -> tuple[Tensor, float]:
    """`min(draft, target / rho)` `[vocab_size]` for the smallest rho, and (1 - (1 - beta)^K) / beta."""

    def paid(rho: float) -> tuple[Tensor, float]:
        each = torch.minimum(draft_probs, target_probs / rho)
        beta = min(1.0, float(each.sum()))
        return each, (1.0 - (1.0 - beta) ** num_draws) / beta if beta > 0.0 else float(num_draws)

    low, high = 1.0, float(num_draws)
    for _ in range(BISECTIONS):
        middle = (low + high) / 2
        low, high = (low, middle) if paid(middle)[1] <= middle else (middle, high)
    return paid(high)
