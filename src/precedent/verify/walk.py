"""The half of verification that uses random numbers: one acceptance test per visited candidate, then one token.

`Weights` is what a walk needs to know of a tree: which candidates to test, in which order, and each test's
probabilities.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping

from precedent.sampling.rng import Rng
from precedent.tree import ROOT, Candidate, CandidateTree, Fixed
from precedent.verify.verdict import Verdict

ACCEPT = "verify-accept"

NEXT = "verify-next"
"""Purpose of the random number that chooses the token after an accepted path."""


class Weights(ABC):
    """The acceptance tests of a tree and their probabilities, which depend only on the tree and its rows.

    A fixed child needs no test if its whole subtree is fixed: sampling the next token from the residual, and descending
    as long as it is such a child, is optimal for it and touches fewer rows. With `lazy` a node is tested after its
    subtree, otherwise before.
    """

    def __init__(self, tree: CandidateTree, *, lazy: bool) -> None:
        self.tree, self.lazy = tree, lazy
        self._tests: dict[int, tuple[Candidate, ...]] = {}
        self._fixed: dict[int, dict[int, int]] = {}
        self._first_test: dict[int, int] = {}
        for node, candidates in tree.candidates_at.items():
            self._tests[node], self._fixed[node] = _divided(tree, candidates)
            for ordinal, candidate in enumerate(self._tests[node]):
                self._first_test.setdefault(candidate.child, ordinal)

    @property
    def all_tests(self) -> Mapping[int, tuple[Candidate, ...]]:
        """The tested candidates below each node, in verification order."""
        return self._tests

    def tests(self, node: int) -> tuple[Candidate, ...]:
        """The candidates to test below `node`, in verification order."""
        return self._tests.get(node, ())

    def fixed_children(self, node: int) -> Mapping[int, int]:
        """Token id to child node, for the children that need no test."""
        return self._fixed.get(node, {})

    def first_test(self, node: int) -> int:
        """Ordinal of the first of its parent's tests that proposes `node`."""
        return self._first_test[node]

    @abstractmethod
    def acceptance(self, node: int, ordinal: int) -> float:
        """Probability w that this test below `node` accepts, given that all earlier ones rejected."""

    @abstractmethod
    def remaining(self, node: int) -> float:
        """The acceptance weight a of `node` after all tests below it have rejected."""

    @abstractmethod
    def next_token(self, node: int, rng: Rng) -> int:
        """Sample from the residual B at `node` after all tests below it have rejected."""


def _divided(tree: CandidateTree, candidates: tuple[Candidate, ...]) -> tuple[tuple[Candidate, ...], dict[int, int]]:
    """A node's candidates that need a test, and token id to child node for those that need none.

    A child is never both: one that was also sampled is listed as sampled alone (`TreeBuilder.add_sampled`), since
    leaving its test out would give its token too much probability.
    """
    untested = {
        tree.token_ids[each.child]: each.child
        for each in candidates
        if isinstance(each.distribution, Fixed) and tree.only_fixed_below[each.child]
    }
    children = set(untested.values())
    return tuple(each for each in candidates if each.child not in children), untested


def walk(weights: Weights, rng: Rng, start: int = ROOT) -> Verdict:
    """Test the candidates below the accepted node `start`: at most one test and one sampled token per node."""
    node, ordinal = start, 0
    while True:
        tests = weights.tests(node)
        if ordinal < len(tests):
            child, acceptance = tests[ordinal].child, weights.acceptance(node, ordinal)
            purpose = ACCEPT if acceptance > 0.0 and weights.first_test(child) == ordinal else f"{ACCEPT} {ordinal}"
            if acceptance > 0.0 and (weights.lazy or rng.bernoulli(acceptance, child, purpose)):
                node, ordinal = child, 0
            else:
                ordinal += 1
        elif node == start or not weights.lazy or rng.bernoulli(weights.remaining(node), node, ACCEPT):
            return _finish(weights, node, rng)
        else:
            node, ordinal = weights.tree.parents[node], weights.first_test(node) + 1


def _finish(weights: Weights, node: int, rng: Rng) -> Verdict:
    """Choose the token after the accepted path; descend as long as it is a child that needs no test."""
    tree = weights.tree
    while True:
        token = weights.next_token(node, rng)
        child = weights.fixed_children(node).get(token)
        if child is None:
            return Verdict.ending_at(tree, node, token)
        node = child
