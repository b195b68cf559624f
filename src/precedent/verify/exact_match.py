"""Verification by exact match: choose the target's token at a node, descend while it is a child.

No distribution of any candidate is needed, so nothing that a drafter does can change the output. With the argmax as
choice this is greedy decoding. With noise that depends on seed and position alone (Gumbel-max coupling, Daliri et al.
2408.07978) it is sampling whose text is a function of the seed, whatever was proposed.
"""

from __future__ import annotations

from collections.abc import Callable

from precedent.tree import ROOT, CandidateTree
from precedent.verify.verdict import Verdict


def exact_match(tree: CandidateTree, choose: Callable[[int], int]) -> Verdict:
    """Descend while the token chosen after a node (`ROOT` at first) is a child; asks for that path's nodes only."""
    edges = zip(tree.parents, tree.token_ids, strict=True)
    children, node = {edge: child for child, edge in enumerate(edges)}, ROOT
    while node < tree.num_scored:
        token = choose(node)
        child = children.get((node, token))
        if child is None:
            return Verdict.ending_at(tree, node, token)
        node = child
    return Verdict.ending_unscored(tree, node)
