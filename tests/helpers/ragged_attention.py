"""Sequences of different lengths whose attention is computed in pieces, plainly, and on any device."""

from __future__ import annotations

import importlib.util
from dataclasses import fields, replace

import pytest
import torch
from torch import Tensor

from precedent_cuda.attention import ORDERED, VARIANTS, StaticRows

NEEDS_TRITON = pytest.mark.skipif(importlib.util.find_spec("triton") is None, reason="triton is not installed")
TRITON_RUNS_ON = torch.device("cuda" if torch.cuda.is_available() else "cpu")
EVERY = VARIANTS | ORDERED
ON_ANY_DEVICE = [name for name in EVERY if "triton" not in name]
KERNELS = [name for name in EVERY if "triton" in name]

PREFIXES, TREES = (37, 0, 1, 150), (5, 3, 1, 8)
"""Of four sequences: committed keys (one has none) and new rows."""


def layout(prefixes: tuple[int, ...], trees: tuple[int, ...], *, spare: int = 1) -> tuple[StaticRows, int]:
    """Sequences in an arena with gaps between them, `spare` places for sequences and rows that are not there."""
    width, total, sequences = max(trees) + spare, sum(trees), len(trees) + spare
    generator = torch.Generator().manual_seed(0)
    ancestors = torch.eye(width, dtype=torch.bool).repeat(sequences, 1, 1)
    row_of, slot_of = torch.zeros(sequences, width, dtype=torch.long), torch.full((total + spare,), -1)
    firsts, starts = [], []
    first, start = 0, 3
    for index, (prefix, count) in enumerate(zip(prefixes, trees, strict=True)):
        for row in range(1, count):
            parent = int(torch.randint(row, (1,), generator=generator))
            ancestors[index, row] |= ancestors[index, parent]
        row_of[index, :count] = torch.arange(first, first + count)
        slot_of[first : first + count] = index * width + torch.arange(count)
        firsts.append(first)
        starts.append(start)
        first, start = first + count, start + prefix + count + 5
    nobody = [0] * spare
    rows = StaticRows(
        row_of=row_of,
        slot_of=slot_of,
        first_rows=torch.tensor([*firsts, *nobody]),
        counts=torch.tensor([*trees, *nobody]),
        starts=torch.tensor([*starts, *nobody]),
        lengths=torch.tensor([*prefixes, *nobody]),
        ancestors=ancestors,
        longest=max(prefix + count for prefix, count in zip(prefixes, trees, strict=True)) + 9,
    )
    return rows, start


def tensors(
    rows: StaticRows, arena: int, heads: int, kv_heads: int, dim: int, dtype: torch.dtype, value_dim: int | None = None
) -> tuple[Tensor, Tensor, Tensor]:
    """Random queries, keys and values; NaN wherever the arena holds nothing of these sequences."""
    generator = torch.Generator().manual_seed(1)
    query = torch.randn(1, heads, len(rows.slot_of), dim, generator=generator)
    keys, values = (
        torch.full((kv_heads, arena, dim), torch.nan),
        torch.full((kv_heads, arena, value_dim or dim), torch.nan),
    )
    keys[:, 0], values[:, 0] = 0.0, 0.0  # the row of those that are nobody
    for start, length, count in zip(rows.starts, rows.lengths, rows.counts, strict=True):
        there = slice(int(start), int(start + length + count))
        keys[:, there] = torch.randn(keys[:, there].shape, generator=generator)
        values[:, there] = torch.randn(values[:, there].shape, generator=generator)
    return query.to(dtype), keys.to(dtype), values.to(dtype)


def plainly(query: Tensor, keys: Tensor, values: Tensor, rows: StaticRows, scale: float) -> Tensor:
    """Row by row and head by head in float64, with nothing but softmax; zeros for rows that stand for nobody."""
    query, keys, values = query.double(), keys.double(), values.double()
    group = query.shape[1] // keys.shape[0]
    result = torch.zeros(query.shape[2], query.shape[1], values.shape[2], dtype=torch.float64)
    for packed_row, slot in enumerate(rows.slot_of.tolist()):
        if slot < 0:
            continue
        sequence, row = divmod(slot, rows.width)
        start, length = int(rows.starts[sequence]), int(rows.lengths[sequence])
        seen = [*range(length), *(length + j for j in range(rows.width) if rows.ancestors[sequence, row, j])]
        places = torch.tensor(seen) + start
        for head in range(query.shape[1]):
            weights = ((keys[head // group, places] @ query[0, head, packed_row]) * scale).softmax(0)
            result[packed_row, head] = weights @ values[head // group, places]
    return result[None]


def moved(rows: StaticRows, device: torch.device) -> StaticRows:
    found = {field.name: getattr(rows, field.name) for field in fields(rows)}
    return replace(rows, **{name: value.to(device) for name, value in found.items() if isinstance(value, Tensor)})


def distance(found: Tensor, expected: Tensor, rows: StaticRows) -> float:
    """Relative error over the rows that are somebody's; NaN never passes."""
    there = rows.slot_of >= 0
    found, expected = found.cpu().double()[:, there], expected[:, there]
    return float((found - expected).norm() / expected.norm())
