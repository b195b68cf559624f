"""The contract of everything that samples: a candidate carries the distribution it was sampled from.

Verification trusts that distribution. A drafter that samples from another one (a processor missing on one side,
another dtype, a cached sibling excluded but not reported) biases the output. With a small vocabulary, the check replays
every branch of the drafter's random numbers, so the result is exact:

    check_draft_distribution(lambda builder, rng: session.draw(builder, 2, rng))
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable
from dataclasses import dataclass, field

import torch
from torch import Tensor

from precedent.sampling.rng import Rng
from precedent.tree import NULL, CandidateTree, Sampled, TreeBuilder
from precedent_testing.replay_rng import enumerate_outcomes

Drawing = Callable[[TreeBuilder, Rng], None]
"""Adds fixed candidates, then samples, to an empty builder; must be a function of its `rng` alone."""

History = tuple[tuple[int, int], ...]
"""The samples so far, each as (parent, token or `NULL`)."""


@dataclass(slots=True)
class _Observed:
    """The samples that followed one history: reported distributions and sampled masses; dropped samples are `NULL`."""

    parent: int
    reported: list[Tensor] = field(default_factory=list)
    sampled: dict[int, float] = field(default_factory=lambda: defaultdict(float))

    def distance(self) -> float:
        """The largest total variation between a reported distribution and the sampled one."""
        size = self.reported[0].numel()
        sampled = torch.zeros(size + 1, dtype=torch.float64)
        for token, mass in self.sampled.items():
            sampled[token if token != NULL else size] = mass
        sampled /= sampled.sum()
        return max(0.5 * float((sampled - reported).abs().sum()) for reported in map(_with_rest, self.reported))


def draft_distribution_error(drawing: Drawing) -> float:
    """The largest total variation between a reported and the sampled distribution, over all possible histories."""
    observed: dict[tuple[History, int], _Observed] = {}
    for probability, tree in enumerate_outcomes(lambda rng: _tree(drawing, rng)):
        history: History = ()
        for candidate in tree.candidates:
            if isinstance(candidate.distribution, Sampled):
                token = tree.token_ids[candidate.child] if candidate.child != NULL else NULL
                here = observed.setdefault((history, candidate.parent), _Observed(candidate.parent))
                here.reported.append(candidate.distribution.probs())
                here.sampled[token] += probability
                history = (*history, (candidate.parent, token))
    return max((each.distance() for each in observed.values()), default=0.0)


def check_draft_distribution(drawing: Drawing, tolerance: float = 1e-9) -> None:
    """Raise AssertionError if a candidate carries a distribution other than the one it was sampled from."""
    error = draft_distribution_error(drawing)
    if not error <= tolerance:
        raise AssertionError(
            f"a candidate carries a distribution that differs by {error:.3g} (total variation) from the sampled one"
        )


def _tree(drawing: Drawing, rng: Rng) -> CandidateTree:
    builder = TreeBuilder()
    drawing(builder, rng)
    return builder.build()


def _with_rest(distribution: Tensor) -> Tensor:
    """Append the mass of a dropped sample to the distribution."""
    distribution = distribution.double()
    return torch.cat([distribution, (1.0 - distribution.sum()).clamp(min=0.0)[None]])
