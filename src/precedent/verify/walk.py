"""The half of verification that uses random numbers: one acceptance test per visited candidate, then one token."""

from __future__ import annotations

from precedent.sampling.rng import Rng
from precedent.tree import ROOT
from precedent.verify.verdict import Verdict
from precedent.verify.weights import Weights

ACCEPT = "verify-accept"


def walk(weights: Weights, rng: Rng, start: int = ROOT) -> Verdict:
    """Test the candidates below the accepted node `start`: at most one test and one sampled token per node."""
    node, ordinal = start, 0
    while True:
        tests = weights.tests(node)
        if ordinal < len(tests):
            child, acceptance = tests[ordinal].child, weights.acceptance(node, ordinal)
            purpose = ACCEPT if acceptance > 0.0 and weights.first_test(child) == ordinal else f"{ACCEPT} {ordinal}"
            if acceptance > 0.0 and (weights.is_lazy(child) or rng.bernoulli(acceptance, child, purpose)):
                node, ordinal = child, 0
            else:
                ordinal += 1
        elif node == start or not weights.is_lazy(node) or rng.bernoulli(weights.remaining(node), node, ACCEPT):
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
