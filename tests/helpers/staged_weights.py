"""The weights of `precedent_cuda.stages`, walked with any random numbers: a replay visits every branch.

`precedent_cuda.ahead` also finds the tokens of all rows beforehand, from random numbers that are known. Here each token
is sampled from the residual distribution that `weigh` left, when a walk ends at its node.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from functools import partial
from itertools import accumulate
from typing import NamedTuple

from torch import Tensor

from precedent.sampling.probabilities import probs_of
from precedent.sampling.rng import Rng
from precedent.sampling.target_rows import TargetRows
from precedent.tree import CandidateTree
from precedent.verify import Decide, Verifier, walk
from precedent.verify.walk import NEXT
from precedent_cuda.ahead import LAZY, KnownWeights, constrained_together
from precedent_cuda.stages import in_stages, schedule, weigh


class Weighed(NamedTuple):
    """A tree to be weighed: the target's probabilities `[num_nodes + 1, vocab_size]`, and whether tests are lazy."""

    tree: CandidateTree
    probs: Tensor
    lazy: bool
    check: Callable[[int], None] = lambda node: None


class StagedWeights(KnownWeights):
    """Weights computed in stages; `left` `[num_nodes + 1, vocab_size]` are the residual distributions."""

    left: Tensor

    def next_token(self, node: int, rng: Rng) -> int:
        """Sample from the residual that the stages left at `node`."""
        self._check(node)
        return rng.categorical(self.left[node + 1], node, NEXT)


def weighed(trees: Sequence[Weighed], gap: int = 0) -> Callable[[], list[StagedWeights]]:
    """Compute the weights of several trees together, `gap` other rows around each; call the result to read them."""
    weights = [StagedWeights(tree, check, lazy=lazy) for tree, _, lazy, check in trees]
    first_rows = list(accumulate((len(each.probs) + gap for each in trees), initial=gap))
    first_slots = list(accumulate((len(each.tree) + 1 for each in trees), initial=0))
    left = trees[0].probs.new_ones(first_rows[-1], trees[0].probs.shape[1])
    for each, first, (_, probs, _, _) in zip(weights, first_rows, trees, strict=False):
        each.left = left[first : first + len(probs)]
        each.left.copy_(probs)
    numbered = zip(weights, first_rows, first_slots, strict=False)
    owners = {test: i for i, places in enumerate(numbered) for test in schedule(*places)}
    tests = in_stages(list(owners))
    numbers = weigh(tests, left, first_slots[-1])

    def read() -> list[StagedWeights]:
        acceptance, remaining = (part.tolist() for part in numbers)
        for i, each in enumerate(weights):
            own = {(test.node, test.ordinal): w for test, w in zip(tests, acceptance, strict=True) if owners[test] == i}
            each.take(own, remaining[first_slots[i] : first_slots[i + 1]], ())
        return weights

    return read


def all_probs(rows: TargetRows) -> Tensor:
    """The probabilities of all rows, constrained together as on a GPU, `[num_nodes + 1, vocab_size]`."""
    constrained = constrained_together(rows, math.inf)
    assert constrained is not None, "these rows cannot be constrained together"
    return probs_of(constrained.raw, rows.params)


def _check(rows: TargetRows, node: int) -> None:
    rows.check(float(rows.logits(node).max()), node)


def ahead(mode: str) -> Verifier:
    """How `mode` verifies with every weight computed before the walk."""

    def prepare(tree: CandidateTree, rows: TargetRows) -> Decide:
        (weights,) = weighed([Weighed(tree, all_probs(rows), LAZY[mode], partial(_check, rows))])()
        return lambda rng: walk(weights, rng)

    return prepare
