"""Tiny models for `bitwise=True`: by rows, as on CPUs, and in forwards of one size, as on GPUs."""

from __future__ import annotations

import random
from typing import Any

import pytest
import torch

from helpers.packages import graph_settings, hide_packages
from precedent.config import SpeculationConfig
from precedent_cpu.kernel_code import LANES
from precedent_cpu.row_attention import VECTORS, fits
from precedent_testing.tiny_models import tiny_causal_lm

DIM = VECTORS * LANES
PLAIN = SpeculationConfig(enabled=False, write_back=False)
SMALL_BUCKET = 256
"""Keys of the smallest bucket, as long as a piece: texts below pass from one into the next."""

by_rows = pytest.mark.skipif(
    not fits(*[torch.zeros(1, 1, 1, DIM)] * 3), reason="torch runs on other threads here, or lacks fused operations"
)


def one_size() -> Any:
    """Settings of forwards of one size, without graphs."""
    return graph_settings(arena_tokens=16 * 1024, capture=False)


def model(dtype: torch.dtype = torch.bfloat16, family: str = "llama", **settings: Any) -> Any:
    """A tiny model that the kernels of few rows take; its logits are near-ties everywhere, as random weights give."""
    sizes = {"hidden_size": 4 * LANES, "num_attention_heads": 2, "head_dim": DIM, "intermediate_size": 8 * LANES}
    made = tiny_causal_lm(family, dtype=dtype, seed=4, **(sizes | settings))
    generator = torch.Generator().manual_seed(5)
    for parameter in made.parameters():
        if parameter.dim() == 1:  # norms are made as ones or zeros, which would hide a mix-up
            parameter.data += (0.3 * torch.randn(parameter.shape, generator=generator)).to(dtype)
    return made


def tokens(number: int, seed: int) -> list[int]:
    """Token ids of a random text."""
    choice = random.Random(seed)
    return [choice.randrange(3, 250) for _ in range(number)]


def go_without_kernels(patch: pytest.MonkeyPatch) -> None:
    """Torch's own products, and a small bucket of keys."""
    hide_packages(patch, "cpu")
    static_forward = pytest.importorskip("precedent_cuda.static_forward")
    patch.setattr(static_forward, "LEAST_KEYS", SMALL_BUCKET)
