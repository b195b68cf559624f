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
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from precedent.tree import CandidateTree, Draw
from precedent.verify.flow import improve
from precedent.verify.recursion import Residual, RowsOf, State, Weights
from precedent.verify.siblings import Siblings, leading_siblings

LISTS = 512
"""Lists of candidates that a plan is solved for: a head of 22 tokens for two draws, of 8 for three."""

MOST = 3
"""Draws that are weighed together; further ones at the node follow one after the other."""

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
    return tuple(token for token, prob in zip(tokens.tolist(), probs.tolist(), strict=True) if prob > 0.0)


def _worths(mass: Floats, head: History, tokens: tuple[int, ...]) -> tuple[float, ...]:
    """Conditional chances in draw order; a token drawn again is worth nothing, its mass went to the first draw."""
    masses, worths = {token: float(mass[head.index(token)]) for token in tokens}, list[float]()
    for token in tokens:
        left = float(mass[-1]) + sum(masses.values())  # summed anew: the last sure child is worth exactly 1
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
        self._entering, self._siblings, self._head = entering, siblings, head
        self._states: dict[History, State] = {}
        self._laws: dict[History, Tensor] = {}
        self._lists = self._possible(len(siblings.tokens))
        self._chance, shares, left = self._recursive_rejection()
        self._rejected = self._chance * left
        bits = np.bitwise_or.reduce(1 << self._lists, axis=1)
        sets, which = np.unique(bits, return_inverse=True)
        self._row_of = {int(bit): row for row, bit in enumerate(sets)}
        self.members = np.ones((len(sets), len(head) + 1))
        self.members[:, :-1] = (sets[:, None] >> np.arange(len(head))) & 1
        self.paid = np.zeros_like(self.members)
        np.add.at(self.paid, (which[:, None], self._lists), self._chance[:, None] * shares)
        self.paid[:, -1] = np.bincount(which, weights=self._rejected)

    def set_of(self, indices: list[int]) -> int:
        """The row of the set that these head tokens make."""
        return self._row_of[sum(1 << index for index in set(indices))]

    def left(self) -> tuple[Tensor, float]:
        """What stays owed once every list is rejected, `[vocab_size]`, and the mass that need not be honoured."""
        by_state: dict[History, float] = {}
        for indices, rejected in zip(self._lists.tolist(), self._rejected.tolist(), strict=True):
            if rejected > 0.0:
                key = self._key(indices)
                by_state[key] = by_state.get(key, 0.0) + rejected
        owed, shortfall = torch.zeros_like(self._entering.residual.values), 0.0
        for history, mass in by_state.items():
            state = self._state(history)
            owed.add_(state.residual.dense(), alpha=mass * state.accept / state.residual.mass)
            shortfall += mass * (1.0 - state.accept)
        return owed, shortfall

    def _possible(self, number: int) -> Ints:
        """Head indices of all lists, `[num_lists, number]`."""
        size = range(len(self._head))
        if self._siblings.replacement:
            return np.array(list(itertools.product(size, repeat=number)), dtype=np.int64)
        return np.array(list(itertools.permutations(size, number)), dtype=np.int64)

    def _recursive_rejection(self) -> tuple[Floats, Floats, Floats]:
        """Of each list: its probability, the share accepted at each draw, the share rejected by all."""
        chance, left = np.ones(len(self._lists)), np.ones(len(self._lists))
        shares = np.empty(self._lists.shape)
        for draw in range(self._lists.shape[1]):
            law = self._at(draw, self._law)
            owed = self._at(draw, self._owed)
            worth = np.minimum(1.0, owed / law)
            chance, shares[:, draw], left = chance * law, left * worth, left * (1.0 - worth)
        return chance, shares, left

    def _at(self, draw: int, row_of: Callable[[History], Tensor]) -> Floats:
        """The value at each list's token of this draw, in the row that belongs to the draws before it."""
        values, rows = np.empty(len(self._lists)), dict[History, Floats]()
        for number, indices in enumerate(self._lists.tolist()):
            history = self._key(indices[: draw + 1])
            if history not in rows:
                rows[history] = row_of(history)[list(self._head)].to("cpu", torch.float64).numpy()
            values[number] = rows[history][indices[draw]]
        return values

    def _key(self, indices: list[int]) -> History:
        """All that the law of the last of these draws, and (a, B) around it, depend on: the draws before it."""
        if self._siblings.replacement:
            return (self._head[0],) * (len(indices) - 1)
        return tuple(self._head[index] for index in indices[:-1])

    def _owed(self, history: History) -> Tensor:
        """A B before the draw that follows `history`."""
        state = self._state(history[:-1]) if history else self._entering
        return state.residual.dense() * (state.accept / state.residual.mass)

    def _state(self, history: History) -> State:
        """(a, B) once the draw that follows `history`, and all before it, were rejected."""
        if history not in self._states:
            before = self._state(history[:-1]) if history else self._entering
            self._states[history] = before.after_rejecting_draw(self._law(history))
        return self._states[history]

    def _law(self, history: History) -> Tensor:
        """The law of the draw that follows `history`, `[vocab_size]`."""
        if history not in self._laws:
            self._laws[history] = self._siblings.law(history).probs()
        return self._laws[history]
