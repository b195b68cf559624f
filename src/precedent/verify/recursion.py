"""All rejection-type verifiers as one recursion over (a, B), in a half without coins and a half without tensors.

At a node, `a` is the weight still to be honoured for its prefix and `B` the residual law of the next token. A draw of
token x from law q is worth `w = min(1, a B(x) / q(x))`. When it is rejected, `(a B - q)+` is left; its mass is R,
and the event "rejected, or swallowed by a keep_mask" has probability `1 - sum min(a B, q) = R + 1 - a`, hence

    a <- R / (R + 1 - a),    B <- (a B - q)+ / R.

Coins thrown *eagerly*, at each draw with probability w (the child then starts at a = 1): token verification
(Leviathan et al. 2211.17192), recursive rejection with or without replacement (SpecInfer, MCSD 2401.06706, Sequoia).
Coins thrown *lazily*, once per node after its subtree, with probability a (the child starts at a = w): block
verification on a chain (Sun et al. 2403.10444), traversal verification on a tree (2505.12398).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from precedent.tree import NULL, ROOT, CandidateTree, Draw, Drawn, Point
from precedent.verify.trials import Trials

RowsOf = Callable[[int], Tensor]
"""Target probabilities after a node (`ROOT` for the first position), `[vocab_size]`."""

CANCELLATION = 1e-3  # below this share of the sum it began with, a difference of floats is summed anew


@dataclass(frozen=True, slots=True, eq=False)
class Residual:
    """A law kept unnormalised: `values` `[vocab_size]` without the `removed` token ids, of total `mass`.

    `mass` is the sum `summed` less what was removed since; the rounding of that sum stays in it.
    """

    values: Tensor
    mass: float = 1.0
    removed: tuple[int, ...] = ()
    summed: float = 1.0

    def prob(self, token: int) -> float:
        """Probability of one token."""
        return 0.0 if token in self.removed else min(1.0, float(self.values[token]) / self.mass)

    def dense(self) -> Tensor:
        """The unnormalised weights of all tokens, `[vocab_size]`; not to be written to."""
        if not self.removed:
            return self.values
        return self.values.index_fill(0, torch.tensor(self.removed, device=self.values.device), 0.0)

    def without(self, token: int) -> Residual:
        """The same law without one token, in constant time unless removed tokens held nearly all the mass."""
        mass = self.mass - float(self.values[token])
        rest = Residual(self.values, mass, (*self.removed, token), self.summed)
        return rest if mass > CANCELLATION * self.summed else Residual.of(rest.dense())

    @classmethod
    def of(cls, values: Tensor) -> Residual:
        """The law of unnormalised `values` `[vocab_size]`."""
        mass = float(values.sum())
        return cls(values, mass, (), mass)

    def minus(self, weight: float, law: Tensor) -> Residual:
        """`(weight * self - law)+`, whose mass is the weight that `law` left unhonoured."""
        left = self.dense() * (weight / self.mass) - law.to(self.values)
        return Residual.of(left.clamp_(min=0.0))


@dataclass(frozen=True, slots=True, eq=False)
class State:
    """(a, B): the weight still to be honoured for a prefix, and the residual law of its next token."""

    accept: float
    residual: Residual

    def worth(self, law_prob: float, token: int) -> float:
        """`min(1, a B(x) / q(x))`; 0 where the law is 0, for such a token cannot have been drawn."""
        honoured = self.accept * self.residual.prob(token)
        return min(1.0, honoured / law_prob) if law_prob > 0.0 else 0.0

    def after_rejecting_draw(self, law: Tensor) -> State:
        """What is left once a draw from `law` was rejected, or swallowed by its keep_mask."""
        residual = self.residual.minus(self.accept, law)
        return self._left(residual.mass, residual)

    def after_rejecting_point(self, token: int) -> State:
        """What is left once a point was rejected: B loses its token."""
        residual = self.residual.without(token)
        return self._left(self.accept * residual.mass / self.residual.mass, residual)

    def _left(self, mass: float, residual: Residual) -> State:
        if mass > torch.finfo(residual.values.dtype).tiny:
            return State(mass / (mass + (1.0 - self.accept)), residual)
        # Nothing is left. At a = 1 only rounding gets here (such a draw is never rejected): keep B as it stands.
        return State(1.0 if self.accept == 1.0 else 0.0, self.residual)


class Weights(Trials):
    """Every w, a and B of a tree: pure functions of (tree, rows), computed where a walk asks and memoised."""

    def __init__(self, tree: CandidateTree, rows: RowsOf, *, lazy: bool) -> None:
        super().__init__(tree, lazy=lazy)
        self.row = rows
        self._states: dict[int, list[State]] = {}
        self._laws: dict[int, Tensor] = {}

    def worth(self, node: int, ordinal: int) -> float:
        """The weight w of a trial below `node` once all earlier ones were rejected."""
        draw = self._trials[node][ordinal]
        if draw.child == NULL or self._ordinals[draw.child] != ordinal:
            return 0.0  # swallowed, or drawn before: its B(x) fell to zero when the earlier draw was rejected
        token = self.tree.token_ids[draw.child]
        law_prob = 1.0 if isinstance(draw.law, Point) else float(self._law(draw.law)[token])
        return self.state(node, ordinal).worth(law_prob, token)

    def state(self, node: int, rejected: int) -> State:
        """(a, B) at `node` after its first `rejected` trials were rejected."""
        states = self._states.setdefault(node, [])
        if not states:
            states.append(State(self._entering(node), Residual(self.row(node))))
        while len(states) <= rejected:
            draw = self._trials[node][len(states) - 1]
            states.append(self._after(states[-1], draw))
        return states[rejected]

    def accept(self, node: int) -> float:
        """The weight a of `node` once all its trials were rejected."""
        return self.left(node).accept

    def leftover(self, node: int) -> Tensor:
        """The law B at `node` once all its trials were rejected, unnormalised, `[vocab_size]`."""
        return self.left(node).residual.dense()

    def left(self, node: int) -> State:
        """(a, B) at `node` after all its trials were rejected."""
        return self.state(node, len(self.trials(node)))

    def _after(self, state: State, draw: Draw) -> State:
        if isinstance(draw.law, Drawn):
            return state.after_rejecting_draw(self._law(draw.law))
        return state.after_rejecting_point(self.tree.token_ids[draw.child])

    def _entering(self, node: int) -> float:
        if node == ROOT or not self.defers(node):
            return 1.0
        return self.worth(self.tree.parents[node], self._ordinals[node])

    def _law(self, law: Drawn) -> Tensor:
        if id(law) not in self._laws:  # draws hold their law, so the id lives as long as the tree
            self._laws[id(law)] = law.probs()
        return self._laws[id(law)]
