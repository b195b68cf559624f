"""Samples a token from a draft model's row of probabilities, with the distribution it was sampled from."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from precedent.errors import GenerationError
from precedent.runtime.placing import placed
from precedent.sampling.rng import KeyedRng, Rng, categorical_rows
from precedent.tree import Distribution, Sampled, TreeBuilder

LEAST_LEFT = 1e-6
"""Smallest remaining probability for which siblings are excluded."""


class DraftedToken(NamedTuple):
    """A token and the distribution it was sampled from; `Fixed` if the token is a function of its row."""

    token_id: int
    distribution: Distribution

    def add_to(self, builder: TreeBuilder, parent: int, source: str) -> int:
        """Add the token below `parent`; returns its node."""
        if isinstance(self.distribution, Sampled):
            return builder.add_sampled(parent, self.token_id, self.distribution, source)
        return builder.add_fixed(parent, self.token_id, source)


def sample_beside(row: Tensor, siblings: tuple[int, ...], rng: Rng, node: int, purpose: str) -> DraftedToken:
    """Sample from a row `[vocab_size]` without the siblings, or with them if they hold nearly all the probability.

    On a device, with random numbers known in advance, this reads back only once. Raises GenerationError if the row
    holds NaN.
    """
    if not row.is_cpu and isinstance(rng, KeyedRng):
        return sample_with_one_read(row, siblings, rng, node, purpose)
    _check(float(row.sum()))
    distribution = _distribution(row, siblings, float(_left(row, siblings)) if siblings else 1.0)
    return DraftedToken(rng.categorical(distribution.probs(), node, purpose), distribution)


def sample_with_one_read(
    row: Tensor, siblings: tuple[int, ...], rng: KeyedRng, node: int, purpose: str
) -> DraftedToken:
    """The same sample, computed on the device for either distribution before the single read."""
    left = _left(row, siblings)
    probs = torch.where(left > LEAST_LEFT, Sampled(row, siblings).probs(), row) if siblings else row
    token = categorical_rows(probs[None], placed(rng.uniforms([node], purpose), row.device))
    mass, remaining, token_id = torch.cat([row.sum()[None].double(), left[None], token.double()]).tolist()
    _check(mass)
    return DraftedToken(int(token_id), _distribution(row, siblings, remaining))


def _left(row: Tensor, siblings: tuple[int, ...]) -> Tensor:
    """The row's probability outside the siblings: a float64 scalar on its device."""
    if not siblings:
        return torch.ones((), dtype=torch.float64, device=row.device)
    return 1.0 - row[placed(np.array(siblings, dtype=np.int64), row.device)].sum().double()


def _distribution(row: Tensor, siblings: tuple[int, ...], left: float) -> Sampled:
    return Sampled(row, siblings) if siblings and left > LEAST_LEFT else Sampled(row)


def _check(mass: float) -> None:
    """Refuse a distribution with NaN, which would bias the answer unnoticed."""
    if not mass > 0.0:
        raise GenerationError("the draft model's probabilities hold NaN: load it in another dtype, or go without it")
