"""Tiny drafts that read their target's hidden states, with opinions of their own."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor
from transformers import PreTrainedModel

from precedent_drafts.heads import HEAD_TOKENS
from precedent_drafts.trained import FUSION, conditioned_beside, fusion_of, initial_weights


def random_conditioned(
    target: PreTrainedModel, layers: Sequence[int], fusion: str, weights: Mapping[str, Tensor]
) -> PreTrainedModel:
    """A draft from its weights, in the target's dtype."""
    given = {name: tensor if name == HEAD_TOKENS else tensor.to(target.dtype) for name, tensor in weights.items()}
    return conditioned_beside(target, layers, fusion, given).requires_grad_(False)


def opinionated_weights(
    target: PreTrainedModel, layer: int, fusion: str, head: Sequence[int], scale: float = 0.4, seed: int = 0
) -> dict[str, Tensor]:
    """One layer of the target behind a random fusion, and a head for these tokens."""
    generator = torch.Generator().manual_seed(seed)
    fused = fusion_of(fusion, target.config.hidden_size).state_dict()
    found = dict(initial_weights(target, (layer,)))
    for name, weight in fused.items():
        noise = torch.randn(weight.shape, generator=generator, dtype=torch.float64) * scale
        found[f"{FUSION}{name}"] = weight.double() + (0.0 if "norm" in name else 1.0) * noise
    return {**found, HEAD_TOKENS: torch.tensor(head)}
