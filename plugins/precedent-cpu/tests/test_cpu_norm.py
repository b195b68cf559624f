"""Root-mean-square norms in one call: what transformers computes, row by row, and nothing else is touched."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from transformers.models.gemma3.modeling_gemma3 import Gemma3RMSNorm
from transformers.models.llama.modeling_llama import LlamaRMSNorm

from precedent_cpu.kernel_code import FUSED, LANES
from precedent_cpu.norm import fuse_norms

pytestmark = pytest.mark.skipif(not FUSED, reason="the processor lacks fused operations")

DTYPES = [torch.bfloat16, torch.float32]


def norm_and_fused(dtype: torch.dtype, kind: Any = LlamaRMSNorm) -> tuple[nn.Module, nn.Module]:
    """A norm with random weights, and a copy that was offered to `fuse_norms`."""
    norm = kind(6 * LANES, eps=1e-3).to(dtype)
    norm.weight.data.normal_(generator=torch.Generator().manual_seed(1))
    fused = nn.Sequential(copy.deepcopy(norm))
    assert fuse_norms(fused) == 1
    return norm, fused[0]


def random_input(*shape: int, dtype: torch.dtype) -> Tensor:
    """Numbers of very different size from row to row."""
    numbers = torch.randn(*shape, generator=torch.Generator().manual_seed(2))
    return (numbers * torch.logspace(-4, 4, shape[-2])[:, None]).to(dtype)


@pytest.mark.parametrize("kind", [LlamaRMSNorm, Gemma3RMSNorm])
@pytest.mark.parametrize("dtype", DTYPES)
def test_it_computes_what_the_layer_did(dtype: torch.dtype, kind: Any) -> None:
    """Every shape of input, also one that does not lie in one piece."""
    norm, fused = norm_and_fused(dtype, kind)
    inputs = random_input(2, 9, 12 * LANES, dtype=dtype)
    tolerance = {"rtol": 2**-7, "atol": 0.0} if dtype == torch.bfloat16 else {"rtol": 1e-6, "atol": 1e-9}
    special = torch.zeros(3, 6 * LANES, dtype=dtype)  # epsilon keeps the first row finite; the second spoils itself
    special[1, 5], special[2] = float("nan"), 1.0
    with torch.inference_mode():
        for piece in (inputs[..., : 6 * LANES], inputs[0, :1, ::2], inputs[:, :0, ::2], special):
            torch.testing.assert_close(fused(piece), norm(piece), equal_nan=True, **tolerance)


def test_a_norm_that_computes_otherwise_is_left_alone() -> None:
    """Its name would not tell."""

    class DoubledRMSNorm(LlamaRMSNorm):
        def forward(self, hidden_states: Tensor) -> Tensor:
            return 2.0 * super().forward(hidden_states)

    doubled = DoubledRMSNorm(2 * LANES)
    doubled.weight.data.normal_(generator=torch.Generator().manual_seed(3))
    others = nn.LayerNorm(2 * LANES), LlamaRMSNorm(LANES + 1), LlamaRMSNorm(LANES).double()
    model = nn.Sequential(doubled, *others)
    assert fuse_norms(model) == 0
    assert type(model[0]) is DoubledRMSNorm
