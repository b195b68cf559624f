"""Optimal transport at a node: the draws there are weighed together, not one after the other.

Recursive rejection decides on the first of several draws before it looks at the second. A plan looks at the whole list:
with m(S, x) for the mass that the candidate set S pays to its token x, all that the law needs is

    sum over S of m(S, x) <= a B(x),    sum over x of m(S, x) <= P(S),

and the plan that pays the most is a maximum flow from sets to tokens (SpecTr 2310.15141; at a < 1, within traversal
verification, as in UniVer 2605.04543). A child x of S is then worth m(S, x) / P(S), conditionally on the children
before it; what stays unpaid is (a, B) behind the group.

Sets are many, so the flow is solved on a *head*: the likeliest tokens under the draft law, few enough that there are at
most `LISTS` lists of them. With E for the event that every draw fell into the head, the target's mass is split between
E and the rest as recursive rejection would split it. Outside E nothing changes. Within E the flow starts from what
recursive rejection pays there and can only grow, so the node accepts at least as much, and when the head holds all
that can be drawn, the node accepts what the linear program says.
"""

from __future__ import annotations

import itertools
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from precedent.tree import CandidateTree, Draw
from precedent.verify.flow import improve
from precedent.verify.recursion import CANCELLATION, Residual, RowsOf, State, Weights
from precedent.verify.siblings import Siblings, leading_siblings

LISTS = 256
"""Lists of candidates that a plan is solved for: a head of 16 tokens for two draws, of 6 for three."""

RARE = 1e-9
"""Tokens drawn more rarely than this are no part of a head: lists of them are not worth their place."""

MOST = 3
"""Draws that are weighed together; further ones at the node follow one after the other."""

ROUNDING = 1e-14
"""Rejected mass below this, and far below that of its set, is the rounding of a set that is accepted for sure."""

Floats = NDArray[np.float64]
Ints = NDArray[np.int64]
History = tuple[int, ...]


class TransportWeights(Weights):
    """Weights of the recursion, but by a transport plan where the draws that open a node's list share one row."""

    def __init__(self, tree: CandidateTree, rows: RowsOf, *, lazy: bool) -> None:
        super().__init__(tree, rows, lazy=lazy)
        self._siblings = {node: leading_siblings(tree, draws, MOST) for node, draws in self._trials.items()}
        self._plans: dict[int, Plan | None] = {}

    def worth(self, node: int, ordinal: int) -> float:
        """The weight w of a trial below `node` once all earlier ones were rejected."""
        plan = self._plan(node)
        if plan is None or ordinal >= len(plan.worths):
            return super().worth(node, ordinal)
        return plan.worths[ordinal]

    def _after(self, state: State, draw: Draw) -> State:
        plan, position = self._plan(draw.parent), len(self._states[draw.parent])
        if plan is None or position > len(plan.worths):
            return super()._after(state, draw)
        return plan.after if position == len(plan.worths) else state

    def _plan(self, node: int) -> Plan | None:
        if node not in self._plans:
            siblings = self._siblings.get(node)
            self._plans[node] = None if siblings is None else transport(self.state(node, 0), siblings)
        return self._plans[node]


@dataclass(frozen=True, slots=True)
class Plan:
    """The weight of each draw of a group once the earlier ones were rejected, and (a, B) behind the group."""

    worths: tuple[float, ...]
    after: State


def transport(entering: State, siblings: Siblings) -> Plan | None:
    """The plan for the draws that were made, None where one of them lies outside the head."""
    head = _head(siblings)
    if not set(siblings.tokens) <= set(head):
        return None
    lists = _Lists(entering, siblings, head)
    owed, shortfall = lists.left()
    slack = owed[list(head)].to("cpu", torch.float64).numpy()
    paid = improve(lists.paid, lists.members, slack)
    mass = paid[lists.set_of([head.index(token) for token in siblings.tokens])]
    owed[list(head)] = torch.from_numpy(slack).to(owed)
    return Plan(_worths(mass, head, siblings.tokens), _after(entering, owed, shortfall))


def _head(siblings: Siblings) -> History:
    """The likeliest tokens under the draft law, as many as `LISTS` allows; a function of that law alone."""
    number = len(siblings.tokens)
    size = max(size for size in range(1, LISTS + 1) if size**number <= LISTS)
    probs, tokens = siblings.law(()).probs().topk(min(size, siblings.row.numel()))
    return tuple(token for token, prob in zip(tokens.tolist(), probs.tolist(), strict=True) if prob > RARE)


def _worths(mass: Floats, head: History, tokens: tuple[int, ...]) -> tuple[float, ...]:
    """Conditional chances in draw order; a token drawn again is worth nothing, its mass went to the first draw."""
    masses, worths = {token: float(mass[head.index(token)]) for token in tokens}, list[float]()
    rejected = float(mass[-1]) if mass[-1] > min(ROUNDING, 1e-6 * mass.sum()) else 0.0
    for token in tokens:
        left = rejected + sum(masses.values())  # summed anew: the last sure child is worth exactly 1
        share = masses.pop(token, 0.0)
        worths.append(share / left if share > 0.0 else 0.0)
    return tuple(worths)


def _after(entering: State, owed: Tensor, shortfall: float) -> State:
    """(a, B) once every draw of the group was rejected: what is still owed, against what need not be honoured."""
    residual = Residual.of(owed)
    if residual.mass > torch.finfo(owed.dtype).tiny:
        return State(residual.mass / (residual.mass + shortfall), residual)
    return State(1.0 if entering.accept == 1.0 else 0.0, entering.residual)


class _Lists:
    """Every list of head tokens that could have been drawn, and what recursive rejection pays to each of its tokens.

    `paid` is `[num_sets, num_head + 1]`: by the set of a list's tokens, the mass paid to each, then the rejected mass;
    `members` marks which tokens a set holds, the last column always. Indices count within the head.
    """

    def __init__(self, entering: State, siblings: Siblings, head: History) -> None:
        self._siblings, self._head = siblings, torch.tensor(head, device=siblings.row.device)
        residual = entering.residual
        self._owed = residual.dense()[None] * (entering.accept / residual.mass)
        self._accept, self._factor = np.array([entering.accept]), np.ones(1)
        self._base = siblings.law(()).probs().to(self._owed)
        self._lists = self._possible(len(siblings.tokens), len(head))
        chance, shares, left = self._recursive_rejection()
        self._rejected = chance * left
        bits = np.bitwise_or.reduce(1 << self._lists, axis=1)
        sets, which = np.unique(bits, return_inverse=True)
        self._row_of = {int(bit): row for row, bit in enumerate(sets)}
        self.members = np.ones((len(sets), len(head) + 1))
        self.members[:, :-1] = (sets[:, None] >> np.arange(len(head))) & 1
        self.paid = np.zeros_like(self.members)
        np.add.at(self.paid, (which[:, None], self._lists), chance[:, None] * shares)
        self.paid[:, -1] = np.bincount(which, weights=self._rejected)

    def set_of(self, indices: list[int]) -> int:
        """The row of the set that these head tokens make."""
        return self._row_of[sum(1 << index for index in set(indices))]

    def left(self) -> tuple[Tensor, float]:
        """What stays owed once every list is rejected, `[vocab_size]`, and the mass that need not be honoured."""
        _, which = self._histories(self._lists.shape[1] - 1)
        mass = np.bincount(which, weights=self._rejected, minlength=len(self._accept))
        owed = torch.from_numpy(mass * self._factor).to(self._owed) @ self._owed
        return owed, float((mass * (1.0 - self._accept)).sum())

    def _possible(self, number: int, size: int) -> Ints:
        """Head indices of all lists, `[num_lists, number]`."""
        if self._siblings.replacement:
            return np.array(list(itertools.product(range(size), repeat=number)), dtype=np.int64)
        return np.array(list(itertools.permutations(range(size), number)), dtype=np.int64)

    def _recursive_rejection(self) -> tuple[Floats, Floats, Floats]:
        """Of each list: its probability, the share accepted at each draw, the share rejected by all."""
        chance, left = np.ones(len(self._lists)), np.ones(len(self._lists))
        shares = np.empty(self._lists.shape)
        base = self._base[self._head].to("cpu", torch.float64).numpy()
        for draw, tokens in enumerate(self._lists.T):
            histories, which = self._histories(draw)
            scale = self._scale(histories)
            law = base[tokens] * scale[which]
            before = self._histories(max(draw - 1, 0))[1]
            owed = self._owed[:, self._head].to("cpu", torch.float64).numpy() * self._factor[:, None]
            worth = np.minimum(1.0, owed[before, tokens] / law)
            chance, shares[:, draw], left = chance * law, left * worth, left * (1.0 - worth)
            self._reject(histories, scale)
        return chance, shares, left

    def _histories(self, number: int) -> tuple[Ints, Ints]:
        """The first `number` draws of all lists, each once, as far as laws depend on them; which of them a list has."""
        first = self._lists[:, : 0 if self._siblings.replacement else number]
        if first.shape[1] == 0:
            return first[:1], np.zeros(len(first), dtype=np.int64)
        histories, which = np.unique(first, axis=0, return_inverse=True)
        return histories, which.reshape(-1)

    def _scale(self, histories: Ints) -> Floats:
        """By how much the law of a draw grows because earlier draws are excluded from it."""
        if histories.shape[1] == 0:
            return np.ones(1)
        tokens = self._head[torch.from_numpy(histories).to(self._head.device)]
        total = float(self._base.sum(dtype=torch.float64))
        left = total - self._base[tokens].sum(1, dtype=torch.float64).to("cpu").numpy()
        for history in np.flatnonzero(left < CANCELLATION * total):
            left[history] = float(self._base.index_fill(0, tokens[history], 0.0).sum(dtype=torch.float64))
        scale: Floats = 1.0 / left
        return scale

    def _reject(self, histories: Ints, scale: Floats) -> None:
        """(a, B) for each history once the draw that follows it was rejected too; `_owed` times `_factor` is a B."""
        _, parents = np.unique(histories[:, :-1], axis=0, return_inverse=True) if histories.shape[1] > 1 else (0, 0)
        parents = np.broadcast_to(np.asarray(parents).reshape(-1), len(histories))
        accept, owed = self._accept[parents], self._owed * torch.from_numpy(self._factor).to(self._owed)[:, None]
        if len(owed) > 1:
            owed = owed[torch.from_numpy(parents.copy()).to(owed.device)]
        left = self._base * torch.from_numpy(scale).to(self._owed)[:, None]
        left.scatter_(1, self._head[torch.from_numpy(histories).to(left.device)], 0.0)
        left.neg_().add_(owed).clamp_(min=0.0)
        mass = left.sum(1).to("cpu", torch.float64).numpy()
        none = mass <= torch.finfo(left.dtype).tiny
        if none.any():  # by rounding alone at a = 1, where B stays; else the node is rejected for sure
            stays = torch.from_numpy(accept == 1.0).to(left)[:, None]
            left = torch.where(torch.from_numpy(none).to(left.device)[:, None], owed * stays, left)
        reached = np.where(none, 1.0, mass + (1.0 - accept))
        self._owed, self._factor = left, 1.0 / reached
        self._accept = np.where(none, accept == 1.0, mass / reached)
