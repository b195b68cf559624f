"""Verification by exact match: choose the target's token at a node, descend while it is a child.

No law of any draw is needed, so nothing that a drafter does can change the output. With the argmax as choice this is
greedy decoding; with noise that depends on seed and position alone (Gumbel-max coupling, Daliri et al. 2408.07978) it
is sampling whose text is a function of the seed, whatever was proposed.
"""

from __future__ import annotations

from collections.abc import Callable

from precedent.sampling.probabilities import Coins
from precedent.tree import ROOT, CandidateTree
from precedent.verify.verdict import Verdict

Chooser = Callable[[int], int]
"""The target's token after a node (`ROOT` for the first position)."""


def matching(tree: CandidateTree, choose: Chooser) -> Callable[[Coins], Verdict]:
    """Descend while the chosen token is a child; only the nodes on that path are asked, and no coin is thrown."""
    siblings = zip(tree.parents, tree.token_ids, strict=True)
    children = {(parent, token): node for node, (parent, token) in enumerate(siblings)}

    def decide(coins: Coins) -> Verdict:
        node = ROOT
        while (child := children.get((node, token := choose(node)))) is not None:
            node = child
        return Verdict.ending_at(tree, node, token)

    return decide
