"""Attention by rows: right, and the same to the last bit whether a row stands in a tree or alone."""

from __future__ import annotations

import pytest
import torch
from helpers.hybrids import random_tree
from torch import Tensor

from precedent_cpu.kernel_code import LANES
from precedent_cpu.row_attention import QUERIES, VECTORS, Sight, fits
from precedent_cpu.row_layer import row_attention

DIM = VECTORS * LANES
DTYPES = [torch.bfloat16, torch.float32]
SHAPES = [(9, 3), (2, 2), (8, 1), (2 * QUERIES, 1)]
PREFIXES = [0, 1, LANES - 1, LANES, 5 * LANES + 3]

pytestmark = pytest.mark.skipif(
    not fits(*[torch.zeros(1, 1, 1, DIM)] * 3), reason="torch runs on other threads here, or lacks fused operations"
)


def case(
    shape: tuple[int, int], prefix: int, rows: int, dtype: torch.dtype, dim: int = DIM
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Queries, keys, values as a model hands them over (views, some scores far apart), and who sees whom."""
    heads, kv_heads = shape
    generator = torch.Generator().manual_seed(prefix + rows)
    query = 3 * torch.randn(1, rows, heads, dim, generator=generator)
    key, value = torch.randn(2, 1, kv_heads, prefix + rows + 5, dim, generator=generator)
    allowed = torch.ones(rows, rows, dtype=torch.bool).tril()
    if rows > 2:
        allowed[1:, 1:] = torch.from_numpy(random_tree(0, rows - 1).ancestors)
    last = prefix + rows
    return query.to(dtype).transpose(1, 2), key.to(dtype)[:, :, :last], value.to(dtype)[:, :, :last], allowed


def reference(query: Tensor, key: Tensor, value: Tensor, allowed: Tensor) -> Tensor:
    """The definition, in float64."""
    groups, rows = query.shape[1] // key.shape[1], query.shape[2]
    key, value = (each.double().repeat_interleave(groups, 1) for each in (key, value))
    scores = query.double() @ key.transpose(2, 3) * query.shape[3] ** -0.5
    mask = torch.ones(rows, key.shape[2], dtype=torch.bool)
    mask[:, -rows:] = allowed
    return (scores.masked_fill(~mask, float("-inf")).softmax(-1) @ value).transpose(1, 2)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("prefix", PREFIXES)
@pytest.mark.parametrize("rows", [1, 2, 5, LANES + 3])
@pytest.mark.sampled(5)
def test_it_is_attention(dtype: torch.dtype, shape: tuple[int, int], prefix: int, rows: int) -> None:
    """Against float64, for prompts and trees of every size, grouped heads or not."""
    query, key, value, allowed = case(shape, prefix, rows, dtype)
    found = row_attention(query, key, value, Sight(allowed.numpy(), rows), None)
    tolerance = 2e-2 if dtype == torch.bfloat16 else 1e-5
    expected = reference(query, key, value, allowed)
    torch.testing.assert_close(found.double(), expected, rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("prefix", PREFIXES)
@pytest.mark.parametrize("threads", [1, 2])
def test_a_row_does_not_depend_on_where_its_keys_stand(dtype: torch.dtype, prefix: int, threads: int) -> None:
    """Each row of a tree alone, its ancestors committed to the prefix as plain decoding would: equal bits."""
    rows, before = LANES + 5, torch.get_num_threads()
    query, key, value, allowed = case((9, 3), prefix, rows, dtype, 2 * DIM)
    try:
        torch.set_num_threads(threads)
        together = row_attention(query, key, value, Sight(allowed.numpy(), rows), 0.2)
        for row in range(rows):
            seen = [*range(prefix), *(prefix + int(column) for column in allowed[row].nonzero())]
            alone = row_attention(query[:, :, row : row + 1], key[:, :, seen], value[:, :, seen], Sight(None, 1), 0.2)
            assert torch.equal(alone[0, 0], together[0, row])
    finally:
        torch.set_num_threads(before)


def test_nan_stays_with_those_who_see_it() -> None:
    """A key that is not a number spoils the rows that see it, and no other."""
    query, key, value, allowed = case((2, 2), 7, 6, torch.float32)
    key[0, 0, 7 + 3, 1] = float("nan")
    found = row_attention(query, key, value, Sight(allowed.numpy(), 6), None)
    assert torch.equal(found[0, :, 0].isnan().any(-1), allowed[:, 3])
    assert not found[0, :, 1].isnan().any()
