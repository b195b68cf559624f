"""Relaxed verification: shift the target's distribution towards the proposals, then verify losslessly against that.

At each node a rule maps (target distribution p, what was proposed) to a distribution pi to sample from instead. Nothing
else is lossy: the recursion runs on pi, so the output follows pi exactly, whatever was sampled. pi may depend on the
path, on the distribution of the first sample at the node and on the cached tokens beside it, but never on which token
was sampled there. A node without proposals keeps the target's distribution. A verdict spends the sum of TV(p, pi) over
the rows that its tokens came from.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from precedent.sampling.rng import Rng
from precedent.sampling.target_rows import TargetRows
from precedent.tree import ROOT, CandidateTree, Sampled
from precedent.verify import Decide, RowWeights, Verdict, Verifier, walk


@dataclass(frozen=True, slots=True, eq=False)
class Offer:
    """What a rule sees at a node: the target's probabilities and logits, and what was proposed there.

    `draft_probs` `[vocab_size]` is the distribution of the first sample, all zero if nothing was sampled; it gives no
    mass to the cached tokens, `fixed` (token ids).
    """

    target_probs: Tensor
    logits: Tensor
    draft_probs: Tensor
    fixed: tuple[int, ...]


Rule = Callable[[Offer], Tensor]
"""The distribution `[vocab_size]` to use in place of `offer.target_probs`; depends only on its argument."""


def offer_at(tree: CandidateTree, rows: TargetRows, node: int) -> Offer | None:
    """What was proposed below `node`, or None if nothing was.

    Beside a sample, only the tokens that it excludes count as cached: once a cached token has been sampled, the tree no
    longer shows that it was cached.
    """
    candidates = tree.candidates_at.get(node, ())
    if not candidates:
        return None
    target_probs, distribution = rows.probs(node), candidates[0].distribution
    if isinstance(distribution, Sampled):
        draft_probs, fixed = distribution.probs().to(target_probs), distribution.excluded
    else:
        draft_probs, fixed = torch.zeros_like(target_probs), tuple(tree.token_ids[each.child] for each in candidates)
    return Offer(target_probs, rows.logits(node), draft_probs, fixed)


class Bent:
    """The distributions that a rule puts in place of the target's, and what each of them costs."""

    def __init__(self, tree: CandidateTree, rows: TargetRows, rule: Rule) -> None:
        self._tree, self._rows, self._rule = tree, rows, rule
        self._probs: dict[int, Tensor] = {}
        self._costs: dict[int, Tensor] = {}

    def probs(self, node: int) -> Tensor:
        """The distribution used after `node`, `[vocab_size]`."""
        if node not in self._probs:
            offer = offer_at(self._tree, self._rows, node)
            self._probs[node] = self._rows.probs(node) if offer is None else self._bent(node, offer)
        return self._probs[node]

    def cost(self, node: int) -> float:
        """Total variation between the distribution used after `node` and the target's."""
        self.probs(node)
        return float(self._costs.get(node, 0.0))

    def _bent(self, node: int, offer: Offer) -> Tensor:
        probs = self._rule(offer)
        self._costs[node] = (probs.double() - offer.target_probs.double()).clamp_(min=0.0).sum()
        return probs


def relaxed(rule: Rule) -> Verifier:
    """Verify with lazy tests against the distributions of `rule`; verdicts report what they spent."""

    def prepare(tree: CandidateTree, rows: TargetRows) -> Decide:
        bent = Bent(tree, rows, rule)
        weights = RowWeights(tree, bent.probs, lazy=True)

        def decide(rng: Rng) -> Verdict:
            verdict = walk(weights, rng)
            return replace(verdict, spent_tv=sum(bent.cost(node) for node in (ROOT, *verdict.path)))

        return decide

    return prepare
