"""Verification by exact match: choose the target's token at a node, and descend as long as it is a child.

It needs no candidate's distribution, so no drafter can change the output: the tokens are those that plain decoding
would choose one after the other. In `greedy` the choice is the argmax of the row. In `coupled` it is
`argmax(probs / noise)` with standard exponential noise that depends only on seed, position and token id (Gumbel-max
coupling, Daliri et al. 2408.07978): a sample from the row's distribution, and the same one whatever was proposed.
"""

from __future__ import annotations

from collections.abc import Callable

from precedent.tree import ROOT, CandidateTree
from precedent.verify.verdict import Verdict


def exact_match(tree: CandidateTree, choose: Callable[[int], int]) -> Verdict:
    """Descend from `ROOT` as long as the token chosen after a node is its child; calls `choose` on that path only."""
    edges = zip(tree.parents, tree.token_ids, strict=True)
    children, node = {edge: child for child, edge in enumerate(edges)}, ROOT
    while True:
        token = choose(node)
        child = children.get((node, token))
        if child is None:
            return Verdict.ending_at(tree, node, token)
        node = child
