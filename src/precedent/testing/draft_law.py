"""The contract of everything that draws: the law that a draw reports is the law that it was sampled from.

Verification trusts the reported law; a drafter that samples from another one (a processor forgotten on one side,
another dtype, a cached sibling excluded but not reported) biases the output. For a small vocabulary every branch of the
drafter's coins is replayed, so nothing is left to chance:

    check_draft_law(lambda builder, coins: drafting.draw(builder, 2, coins))
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable
from dataclasses import dataclass, field

import torch
from torch import Tensor

from precedent.sampling.rng import Rng
from precedent.testing.replay_rng import enumerate_outcomes
from precedent.tree import NULL, CandidateTree, Sampled, TreeBuilder

Drawing = Callable[[TreeBuilder, Rng], None]
"""Adds cached points, then draws, to an empty builder: a function of its coins alone."""

History = tuple[tuple[int, int], ...]
"""The draws made so far, each as (parent, token or `NULL`)."""


@dataclass(slots=True)
class _Observed:
    """What followed one history: the reported laws and the sampled masses, swallowed draws at the end."""

    parent: int
    reported: list[Tensor] = field(default_factory=list)
    sampled: dict[int, float] = field(default_factory=lambda: defaultdict(float))

    def distance(self) -> float:
        """The largest total variation between a law that was reported and the law of what was drawn."""
        size = self.reported[0].numel()
        sampled = torch.zeros(size + 1, dtype=torch.float64)
        for token, mass in self.sampled.items():
            sampled[token if token != NULL else size] = mass
        return max(
            0.5 * float((sampled / sampled.sum() - distribution).abs().sum())
            for distribution in map(_with_rest, self.reported)
        )


def draft_distribution_error(drawing: Drawing) -> float:
    """The largest total variation, over all draws and all that may precede them, between reported and sampled law."""
    observed: dict[tuple[History, int], _Observed] = {}
    for probability, tree in enumerate_outcomes(lambda rng: _tree(drawing, rng)):
        history: History = ()
        for draw in tree.candidates:
            if isinstance(draw.distribution, Sampled):
                token = tree.token_ids[draw.child] if draw.child != NULL else NULL
                here = observed.setdefault((history, draw.parent), _Observed(draw.parent))
                here.reported.append(draw.distribution.probs())
                here.sampled[token] += probability
                history = (*history, (draw.parent, token))
    return max((each.distance() for each in observed.values()), default=0.0)


def check_draft_distribution(drawing: Drawing, tolerance: float = 1e-9) -> None:
    """Raise AssertionError when something is drawn from another law than it reports."""
    error = draft_distribution_error(drawing)
    if not error <= tolerance:
        raise AssertionError(f"a draw reports a law that differs by {error:.3g} (total variation) from the sampled one")


def _tree(drawing: Drawing, rng: Rng) -> CandidateTree:
    builder = TreeBuilder()
    drawing(builder, rng)
    return builder.build()


def _with_rest(distribution: Tensor) -> Tensor:
    """The law with the mass of a swallowed draw as its last entry."""
    distribution = distribution.double()
    return torch.cat([distribution, (1.0 - distribution.sum()).clamp(min=0.0)[None]])
