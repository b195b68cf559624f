"""Samples a token from a draft model's row of probabilities, with the distribution it was sampled from."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
from torch import Tensor

from precedent.errors import GenerationError
from precedent.runtime.placing import placed
from precedent.sampling.rng import Rng
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

    Raises GenerationError if the row holds NaN, which would bias the answer unnoticed.
    """
    if not float(row.sum()) > 0.0:
        raise GenerationError("the draft model's probabilities hold NaN: load it in another dtype, or go without it")
    taken = placed(np.array(siblings, dtype=np.int64), row.device)
    excludes = bool(siblings) and 1.0 - float(row[taken].sum()) > LEAST_LEFT
    distribution = Sampled(row, siblings) if excludes else Sampled(row)
    return DraftedToken(rng.categorical(distribution.probs(), node, purpose), distribution)
