"""How far a lossy rule is from the best one: rejections against total variation at one node (Yin et al. 2411.00841).

Nobody who writes a distribution within total variation b of the target's rejects less than `(r - b)+`, where r are the
least rejections of a lossless verifier: an output that differs from the target's with probability b at most is accepted
with at most that much more. Moving mass b from what nobody proposed onto the proposals attains it. So the Pareto front
of every node, and of every mean over nodes, is a line.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from precedent_research.lossy import Offer, Rule


class Point(NamedTuple):
    """What a rule does at a node: the probability that every proposal is rejected, and the total variation spent."""

    rejections: float
    total_variation: float


def least_rejections(offer: Offer, total_variation: float = 0.0) -> float:
    """The front at a node with one sample, cached tokens, or both: the best that so much total variation buys."""
    return max(0.0, _rejections(offer, offer.target_probs) - total_variation)


def point_of(rule: Rule, offer: Offer) -> Point:
    """Where a rule stands at a node with one sample, cached tokens, or both."""
    written = rule(offer)
    spent = (written.double() - offer.target_probs.double()).clamp(min=0.0).sum()
    return Point(_rejections(offer, written), float(spent))


def point_of_judge(offer: Offer, token: int, overrules: float) -> Point:
    """Where a judge stands at a node, estimated without bias from one sample: the mean over samples is the point.

    `overrules` is the probability that the judge overrules the rejection of the sampled `token`. It is asked once the
    recovered token is none of the cached ones, and never overrules theirs.
    """
    lossless = _rejections(offer, offer.target_probs)
    mass = float((offer.draft_probs.double() - offer.target_probs.double()).clamp(min=0.0).sum())
    asked = lossless / mass if mass > 0.0 else 0.0
    rejected = max(0.0, 1.0 - float(offer.target_probs[token]) / float(offer.draft_probs[token]))
    spent = asked * rejected * overrules
    return Point(lossless - spent, spent)


def _rejections(offer: Offer, written: Tensor) -> float:
    """The least rejections of proposals that are verified losslessly against `written` `[vocab_size]`."""
    covered = torch.minimum(written.double(), offer.draft_probs.double())
    covered[list(offer.fixed)] = written.double()[list(offer.fixed)]
    return max(0.0, 1.0 - float(covered.sum()))
