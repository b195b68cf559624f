"""What a walk asks of a tree: which candidates it tests, in which order, and the numbers of each test."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping

from precedent.sampling.rng import Rng
from precedent.tree import Candidate, CandidateTree, Fixed

NEXT = "verify-next"
"""The purpose of the random number that chooses the token after an accepted path."""


class Weights(ABC):
    """The acceptance tests of a tree and their numbers, which are functions of tree and rows alone.

    Fixed children whose whole subtree is fixed need no test of their own: sampling the next token from the residual and
    descending while it is such a child is optimal for them, and touches fewer rows. With `lazy` a node is tested after
    its subtree, else before it.
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
        """The candidates below each node that are tested, in verification order."""
        return self._tests

    def tests(self, node: int) -> tuple[Candidate, ...]:
        """The candidates below `node` that are tested one after the other, in verification order."""
        return self._tests.get(node, ())

    def fixed_children(self, node: int) -> Mapping[int, int]:
        """Token id to child node, for the children that need no test of their own."""
        return self._fixed.get(node, {})

    def first_test(self, node: int) -> int:
        """Which test of its parent proposes `node` for the first time."""
        return self._first_test[node]

    def is_lazy(self, node: int) -> bool:
        """Whether `node` is tested after its subtree, not before it."""
        return self.lazy

    @abstractmethod
    def acceptance(self, node: int, ordinal: int) -> float:
        """Probability w that a test below `node` accepts, once all earlier ones rejected."""

    @abstractmethod
    def remaining(self, node: int) -> float:
        """The acceptance weight a of `node` once all tests below it rejected."""

    @abstractmethod
    def next_token(self, node: int, rng: Rng) -> int:
        """Sample from the residual B at `node`, once all tests below it rejected."""


def _divided(tree: CandidateTree, candidates: tuple[Candidate, ...]) -> tuple[tuple[Candidate, ...], dict[int, int]]:
    """The candidates of a node that need a test, and token id to child of those that need none."""
    untested = {
        tree.token_ids[each.child]: each.child
        for each in candidates
        if isinstance(each.distribution, Fixed) and tree.only_fixed_below[each.child]
    }
    children = set(untested.values())
    return tuple(each for each in candidates if each.child not in children), untested
