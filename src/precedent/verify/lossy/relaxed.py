"""The `lossy_*` modes: at each node the target's law is bent towards what was proposed there, then verified losslessly.

A rule maps (target law p, what was proposed) to the law pi that it is willing to write instead. Nothing else is lossy:
the recursion runs on pi, so pi is exactly what comes out, whatever was drawn. pi may depend on the path, on the law of
the first draw at the node and on the cached tokens beside it, but never on what was drawn there. A node below which
nothing was proposed keeps the target's law. A verdict spent the sum of TV(p, pi) over the rows its tokens came from.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Protocol

import torch
from torch import Tensor

from precedent.sampling.probabilities import Coins
from precedent.tree import ROOT, CandidateTree, Drawn
from precedent.verify.recursion import Weights
from precedent.verify.verdict import Verdict
from precedent.verify.walk import walk


class LogitRows(Protocol):
    """The target model's rows over one tree, logits included."""

    def __call__(self, node: int, /) -> Tensor:
        """Target probabilities after `node` (`ROOT` for the first position), `[vocab_size]`."""

    def logits(self, node: int, /) -> Tensor:
        """Constrained logits after `node` before temperature and truncation, `[vocab_size]`."""


@dataclass(frozen=True, slots=True, eq=False)
class Offer:
    """What a rule sees of a node: the target's law and logits, the law of the first draw, the cached tokens.

    `draft_probs` `[vocab_size]` gives no mass to `points` (token ids); it is all zero when nothing was drawn.
    """

    target_probs: Tensor
    logits: Tensor
    draft_probs: Tensor
    points: tuple[int, ...]


Rule = Callable[[Offer], Tensor]
"""The law `[vocab_size]` that may be written in place of `offer.target_probs`; a function of its argument alone."""


def offer_at(tree: CandidateTree, rows: LogitRows, node: int) -> Offer | None:
    """What was proposed below `node`, None for nothing.

    Beside a draw only tokens that it excludes count as cached: whether others were cached cannot be told from the tree
    once one of them has been drawn.
    """
    draws = tree.draws_at.get(node, ())
    if not draws:
        return None
    target_probs, law = rows(node), draws[0].law
    if isinstance(law, Drawn):
        draft_probs, points = law.probs().to(target_probs), law.excluded
    else:
        draft_probs, points = torch.zeros_like(target_probs), tuple(tree.token_ids[draw.child] for draw in draws)
    return Offer(target_probs, rows.logits(node), draft_probs, points)


class RelaxedRows:
    """The rows that a rule is willing to write, and what each of them costs."""

    def __init__(self, tree: CandidateTree, rows: LogitRows, rule: Rule) -> None:
        self._tree, self._rows, self._rule = tree, rows, rule
        self._relaxed: dict[int, Tensor] = {}
        self._costs: dict[int, Tensor] = {}

    def __call__(self, node: int) -> Tensor:
        """The law written after `node`, `[vocab_size]`."""
        if node not in self._relaxed:
            offer = offer_at(self._tree, self._rows, node)
            self._relaxed[node] = self._rows(node) if offer is None else self._bend(node, offer)
        return self._relaxed[node]

    def cost(self, node: int) -> float:
        """Total variation between the law written after `node` and the target's."""
        self(node)
        return float(self._costs.get(node, 0.0))

    def _bend(self, node: int, offer: Offer) -> Tensor:
        law = self._rule(offer)
        self._costs[node] = (law.double() - offer.target_probs.double()).clamp_(min=0.0).sum()
        return law


def relaxed(rule: Rule) -> Callable[[CandidateTree, LogitRows], Callable[[Coins], Verdict]]:
    """A verifier in two halves that writes the law of `rule`, with lazy coins, and says what it spent."""

    def first_half(tree: CandidateTree, rows: LogitRows) -> Callable[[Coins], Verdict]:
        bent = RelaxedRows(tree, rows, rule)
        weights = Weights(tree, bent, lazy=True)

        def decide(coins: Coins) -> Verdict:
            verdict = walk(weights, coins)
            return replace(verdict, spent_tv=sum(bent.cost(node) for node in (ROOT, *verdict.path)))

        return decide

    return first_half
