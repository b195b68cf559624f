"""All rejection-type verifiers as one recursion over (a, B): the half without random numbers, computed row by row.

At a node, `a` is the acceptance weight left for its prefix and `B` the residual distribution of the next token. A
candidate x sampled from q is accepted with probability `w = min(1, a B(x) / q(x))`. Rejecting it leaves `(a B - q)+`
with mass R. The event "rejected, or dropped by a keep_mask" has probability `1 - sum min(a B, q) = R + 1 - a`, hence

    a <- R / (R + 1 - a),    B <- (a B - q)+ / R.

*Eager* tests, one per candidate with probability w (the child then starts at a = 1): token verification (Leviathan et
al. 2211.17192), recursive rejection with or without replacement (SpecInfer, MCSD 2401.06706, Sequoia). *Lazy* tests,
one per node after its subtree with probability a (the child starts at a = w): block verification on a chain (Sun et
al. 2403.10444), traversal verification on a tree (2505.12398).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from precedent.sampling.rng import Rng
from precedent.tree import NULL, ROOT, Candidate, CandidateTree, Fixed, Sampled
from precedent.verify.walk import NEXT, Weights

CANCELLATION = 1e-3  # once a mass falls below this share of its original sum, it is summed again


@dataclass(frozen=True, slots=True, eq=False)
class Residual:
    """An unnormalised distribution: `values` `[vocab_size]` without the `removed` token ids, with total `mass`.

    `mass` is the original sum `summed` minus what has been removed since; it keeps the rounding error of that sum.
    """

    values: Tensor
    mass: float = 1.0
    removed: tuple[int, ...] = ()
    summed: float = 1.0

    def prob(self, token: int) -> float:
        """Probability of one token."""
        return 0.0 if token in self.removed else min(1.0, float(self.values[token]) / self.mass)

    def dense(self) -> Tensor:
        """The unnormalised probabilities of all tokens, `[vocab_size]`; do not write to it."""
        if not self.removed:
            return self.values
        return self.values.index_fill(0, torch.tensor(self.removed, device=self.values.device), 0.0)

    def without(self, token: int) -> Residual:
        """The same distribution without one token; constant time unless nearly all the mass has been removed."""
        mass = self.mass - float(self.values[token])
        rest = Residual(self.values, mass, (*self.removed, token), self.summed)
        return rest if mass > CANCELLATION * self.summed else Residual.of(rest.dense())

    @classmethod
    def of(cls, values: Tensor) -> Residual:
        """The distribution of unnormalised `values` `[vocab_size]`."""
        mass = float(values.sum())
        return cls(values, mass, (), mass)

    def minus(self, weight: float, draft_probs: Tensor) -> Residual:
        """`(weight * self - draft_probs)+`; its mass is the weight that remains after a rejected sample."""
        left = self.dense() * (weight / self.mass) - draft_probs.to(self.values)
        return Residual.of(left.clamp_(min=0.0))


@dataclass(frozen=True, slots=True, eq=False)
class State:
    """(a, B): the acceptance weight left for a prefix, and the residual distribution of its next token."""

    weight: float
    residual: Residual

    def acceptance(self, draft_prob: float, token: int) -> float:
        """`min(1, a B(x) / q(x))`; 0 where q(x) is 0, because such a token cannot have been sampled."""
        covered = self.weight * self.residual.prob(token)
        return min(1.0, covered / draft_prob) if draft_prob > 0.0 else 0.0

    def after_rejecting_sampled(self, draft_probs: Tensor) -> State:
        """The state after a sample from `draft_probs` was rejected, or dropped by its keep_mask."""
        residual = self.residual.minus(self.weight, draft_probs)
        return self._left(residual.mass, residual)

    def after_rejecting_fixed(self, token: int) -> State:
        """The state after a fixed candidate was rejected: B loses its token."""
        residual = self.residual.without(token)
        return self._left(self.weight * residual.mass / self.residual.mass, residual)

    def _left(self, mass: float, residual: Residual) -> State:
        if mass > torch.finfo(residual.values.dtype).tiny:
            return State(mass / (mass + (1.0 - self.weight)), residual)
        # No mass remains. At a = 1 only rounding leads here (such a sample is never rejected), so B stays unchanged.
        return State(1.0 if self.weight == 1.0 else 0.0, self.residual)


class RowWeights(Weights):
    """Every w, a and B of a tree, computed on demand and cached; `probs` returns the target's rows."""

    def __init__(self, tree: CandidateTree, probs: Callable[[int], Tensor], *, lazy: bool) -> None:
        super().__init__(tree, lazy=lazy)
        self._probs = probs
        self._states: dict[int, list[State]] = {}
        self._draft_probs: dict[int, Tensor] = {}

    def acceptance(self, node: int, ordinal: int) -> float:
        """Probability w that this test below `node` accepts, given that all earlier ones rejected."""
        candidate = self._tests[node][ordinal]
        if candidate.child == NULL or self._first_test[candidate.child] != ordinal:
            return 0.0  # dropped, or sampled before: rejecting the earlier sample set B(x) to zero
        token, distribution = self.tree.token_ids[candidate.child], candidate.distribution
        draft_prob = 1.0 if isinstance(distribution, Fixed) else float(self._of(distribution)[token])
        return self.state(node, ordinal).acceptance(draft_prob, token)

    def state(self, node: int, rejected: int) -> State:
        """(a, B) at `node` after the first `rejected` tests have rejected."""
        states = self._states.setdefault(node, [])
        if not states:
            states.append(State(self._entering(node), Residual(self._probs(node))))
        while len(states) <= rejected:
            states.append(self._after(states[-1], self._tests[node][len(states) - 1]))
        return states[rejected]

    def remaining(self, node: int) -> float:
        """The acceptance weight a of `node` after all tests below it have rejected."""
        tests = self.tests(node)
        return self.state(node, len(tests)).weight if tests else self._entering(node)

    def next_token(self, node: int, rng: Rng) -> int:
        """Sample from the residual B at `node` after all tests below it have rejected."""
        tests = self.tests(node)
        residual = self.state(node, len(tests)).residual.dense() if tests else self._probs(node)
        return rng.categorical(residual, node, NEXT)

    def _after(self, state: State, candidate: Candidate) -> State:
        if isinstance(candidate.distribution, Sampled):
            return state.after_rejecting_sampled(self._of(candidate.distribution))
        return state.after_rejecting_fixed(self.tree.token_ids[candidate.child])

    def _entering(self, node: int) -> float:
        if node == ROOT or not self.lazy:
            return 1.0
        return self.acceptance(self.tree.parents[node], self._first_test[node])

    def _of(self, distribution: Sampled) -> Tensor:
        if id(distribution) not in self._draft_probs:  # the tree keeps it alive, so its id is unique
            self._draft_probs[id(distribution)] = distribution.probs()
        return self._draft_probs[id(distribution)]
