"""Attention in pieces equals attention in one: every variant, ragged sequences, empty prefixes, poisoned memory."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
import torch
from helpers.ragged_attention import EVERY, ON_ANY_DEVICE, PREFIXES, TREES, distance, layout, moved, plainly, tensors

from precedent.errors import ConfigError
from precedent_cuda.attention import (
    ORDERED,
    VARIANTS,
    Partial,
    attend,
    merge,
    ordered,
    ordered_by_triton,
    split,
    variant_named,
)


@pytest.mark.parametrize("heads", [(4, 4), (6, 2), (8, 1)], ids=str)
@pytest.mark.parametrize("name", ON_ANY_DEVICE)
def test_every_variant_equals_plain_attention_in_float64(name: str, heads: tuple[int, int]) -> None:
    rows, arena = layout(PREFIXES, TREES)
    query, keys, values = tensors(rows, arena, *heads, 16, torch.float64)
    expected = plainly(query, keys, values, rows, 0.3)
    found = EVERY[name](query, keys, values, rows, 0.3)
    assert distance(found, expected, rows) < 1e-12
    assert found.isfinite().all(), "rows that stand for nobody are finite"
    half = EVERY[name](query.bfloat16(), keys.bfloat16(), values.bfloat16(), rows, 0.3)
    assert half.dtype == torch.bfloat16
    assert distance(half, expected, rows) < 2e-2, "rounded once or twice, not more"


def test_pieces_of_keys_in_any_cut_merge_to_the_whole() -> None:
    """An empty piece, also on both sides, changes nothing."""
    generator = torch.Generator().manual_seed(2)
    query, keys, values = (torch.randn(1, 1, n, 8, generator=generator, dtype=torch.float64) for n in (3, 20, 20))
    seen = torch.ones(1, 1, 1, 20, dtype=torch.bool)
    whole = attend(query, keys, values, seen, 1.0)
    for cut in (0, 1, 13, 20):
        left, right = seen.clone(), seen.clone()
        left[..., cut:], right[..., :cut] = False, False
        both = merge(attend(query, keys, values, left, 1.0), attend(query, keys, values, right, 1.0))
        torch.testing.assert_close(both, whole, rtol=0, atol=1e-12)
    nothing = attend(query, keys, values, ~seen, 1.0)
    assert merge(nothing, nothing).output.eq(0).all()
    assert merge(nothing, nothing).lse.eq(float("-inf")).all()


def test_shares_are_those_of_the_weights_and_a_wrong_length_is_noticed() -> None:
    """A negative control: one key too few is no rounding."""
    rows, arena = layout(PREFIXES, TREES)
    query, keys, values = tensors(rows, arena, 4, 2, 16, torch.float64)
    right = split(query, keys, values, rows, 1.0)
    merged = merge(Partial(torch.ones(2, 1), torch.tensor([0.0, 5.0])), Partial(torch.zeros(2, 1), torch.zeros(2)))
    assert merged.output.flatten().tolist() == pytest.approx([0.5, 1 / (1 + math.exp(-5.0))])
    wrong = replace(rows, lengths=(rows.lengths - 1).clamp(min=0))
    assert distance(split(query, keys, values, wrong, 1.0), right, rows) > 1e-3


def test_a_variant_is_chosen_by_device_and_refused_by_name() -> None:
    cpu = torch.device("cpu")
    assert variant_named("auto", VARIANTS, cpu, torch.bfloat16) is split
    assert variant_named("auto", VARIANTS, torch.device("cuda"), torch.float64) is split
    assert variant_named("auto", ORDERED, cpu, torch.bfloat16) is ordered
    assert variant_named("ordered-triton", ORDERED, cpu, torch.float32) is ordered_by_triton
    with pytest.raises(ConfigError, match=r"flashy.*choose auto, split, triton"):
        variant_named("flashy", VARIANTS, cpu, torch.float32)


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32], ids=str)
@pytest.mark.parametrize("name", list(EVERY))
def test_on_cuda_every_variant_equals_plain_attention(name: str, dtype: torch.dtype) -> None:
    """The shape of Llama 3 8B, a long and a short sequence; tf32 is off unless somebody switched it on."""
    rows, arena = layout((1000, 0, 77), (64, 1, 17))
    query, keys, values = tensors(rows, arena, 32, 8, 128, dtype)
    expected = plainly(query, keys, values, rows, 128**-0.5)
    device = torch.device("cuda")
    found = EVERY[name](query.to(device), keys.to(device), values.to(device), moved(rows, device), 128**-0.5)
    assert distance(found, expected, rows) < (1e-4 if dtype == torch.float32 else 1e-2)
