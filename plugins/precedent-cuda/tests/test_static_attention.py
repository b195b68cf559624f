"""Attention over an arena: equal to plain attention, and a row has the same bits in a tree and committed."""

from __future__ import annotations

import importlib.util
import os
import subprocess
import sys
from dataclasses import fields, replace
from functools import partial
from typing import Any

import numpy as np
import pytest
import torch
from helpers.static_targets import reversed_lineage
from torch import Tensor

from precedent.errors import UnsupportedError
from precedent_cuda.attention import StaticRows, attend, ordered

NEEDS_TRITON = pytest.mark.skipif(importlib.util.find_spec("triton") is None, reason="triton is not installed")
TRITON_RUNS_ON = torch.device("cuda" if torch.cuda.is_available() else "cpu")
PREFIXES, TREES = (37, 0, 1, 150), (5, 3, 1, 8)
"""Of four sequences: committed keys (one has none) and new rows."""


def layout(prefixes: tuple[int, ...], trees: tuple[int, ...], *, spare: int = 1) -> tuple[StaticRows, int]:
    """Random trees in an arena with gaps between them, `spare` places for sequences and rows that are not there."""
    width, sequences, generator = max(trees) + spare, len(trees) + spare, torch.Generator().manual_seed(0)
    field = {name: torch.zeros(sequences, dtype=torch.long) for name in ("first_rows", "counts", "starts", "lengths")}
    ancestors, slot_of = (
        torch.eye(width, dtype=torch.bool).repeat(sequences, 1, 1),
        torch.full((sum(trees) + spare,), -1),
    )
    first, start = 0, 3
    for index, (prefix, count) in enumerate(zip(prefixes, trees, strict=True)):
        for row in range(1, count):
            ancestors[index, row] |= ancestors[index, int(torch.randint(row, (1,), generator=generator))]
        slot_of[first : first + count] = index * width + torch.arange(count)
        for name, number in (("first_rows", first), ("counts", count), ("starts", start), ("lengths", prefix)):
            field[name][index] = number
        first, start = first + count, start + prefix + count + 5
    longest = max(map(sum, zip(prefixes, trees, strict=True))) + 9
    return StaticRows(slot_of=slot_of, ancestors=ancestors, longest=longest, **field), start


def tensors(
    rows: StaticRows, arena: int, heads: int, kv_heads: int, dim: int, dtype: torch.dtype, value_dim: int | None = None
) -> tuple[Tensor, Tensor, Tensor]:
    """Random queries, keys and values; NaN wherever the arena holds nothing of these sequences."""
    generator = torch.Generator().manual_seed(1)
    query = torch.randn(1, heads, len(rows.slot_of), dim, generator=generator)
    stored = [torch.full((kv_heads, arena, size), torch.nan) for size in (dim, value_dim or dim)]
    for each in stored:
        each[:, 0] = 0.0  # the row of those that are nobody
        for start, length, count in zip(rows.starts, rows.lengths, rows.counts, strict=True):
            there = slice(int(start), int(start + length + count))
            each[:, there] = torch.randn(each[:, there].shape, generator=generator)
    return query.to(dtype), stored[0].to(dtype), stored[1].to(dtype)


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


def by_kernels(query: Tensor, keys: Tensor, values: Tensor, rows: StaticRows, scale: float) -> Tensor:
    from precedent_cuda.triton_kernels import attend_in_order

    on = TRITON_RUNS_ON
    return attend_in_order(query.to(on), keys.to(on), values.to(on), moved(rows, on), scale).cpu()


@pytest.mark.parametrize("heads", [(4, 4), (6, 2), (8, 1)], ids=str)
def test_the_reference_equals_plain_attention_in_float64_and_a_wrong_length_is_noticed(heads: tuple[int, int]) -> None:
    """Pieces before, within and behind a tree, ragged sequences, poisoned memory; one key too few is no rounding."""
    rows, arena = layout((*PREFIXES[:3], 500), TREES)
    query, keys, values = tensors(rows, arena, *heads, 16, torch.float64)
    expected, found = (each(query, keys, values, rows, 0.3) for each in (plainly, ordered))
    assert distance(found, expected, rows) < 1e-12
    assert found.isfinite().all(), "rows that stand for nobody are finite"
    half = ordered(query.bfloat16(), keys.bfloat16(), values.bfloat16(), rows, 0.3)
    assert half.dtype == torch.bfloat16
    assert distance(half, expected, rows) < 2e-2, "rounded once or twice, not more"
    wrong = replace(rows, lengths=(rows.lengths - 1).clamp(min=0))
    assert distance(ordered(query, keys, values, wrong, 0.3), expected, rows) > 1e-3


@NEEDS_TRITON
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16], ids=str)  # the interpreter multiplies no bfloat16
@pytest.mark.parametrize(
    ("heads", "dim", "value_dim", "trees"),
    [((6, 2), 16, 16, TREES), ((4, 4), 24, 24, TREES), ((8, 1), 64, 64, TREES), ((8, 2), 16, 8, (40, 2, 1, 3))],
    ids=str,
)
def test_the_kernels_equal_plain_attention(
    heads: tuple[int, int], dim: int, value_dim: int, trees: tuple[int, ...], dtype: torch.dtype
) -> None:
    """Heads whose size is no power of two, values of another size, more rows than a tile, poisoned memory."""
    rows, arena = layout(PREFIXES, trees)
    query, keys, values = tensors(rows, arena, *heads, dim, dtype, value_dim)
    found = by_kernels(query, keys, values, rows, 0.2)
    assert distance(found, plainly(query, keys, values, rows, 0.2), rows) < (1e-5 if dtype == torch.float32 else 1e-2)
    assert found[:, rows.slot_of < 0].eq(0).all(), "rows that stand for nobody are 0"


@NEEDS_TRITON
@pytest.mark.parametrize(
    ("heads", "dtype", "says"),
    [((4, 2), torch.float64, "float64"), ((65, 1), torch.float32, "65 query heads share one KV head")],
    ids=str,
)
def test_the_kernels_refuse_what_they_do_not_multiply(heads: tuple[int, int], dtype: torch.dtype, says: str) -> None:
    rows, arena = layout(PREFIXES, TREES)
    with pytest.raises(UnsupportedError, match=says):
        by_kernels(*tensors(rows, arena, *heads, 16, dtype), rows, 1.0)


def last_row(compute, prefix: int, tree: list[int], length: int) -> Tensor:
    """Attention after the last token of a text of so many, of which `tree` are rows in the tree, others committed."""
    rows, _ = layout((prefix,), (max(tree) + 2,), spare=2)
    for depth, node in enumerate(tree):
        rows.ancestors[0, node] = False
        rows.ancestors[0, node, tree[: depth + 1]] = True
    places = torch.tensor([*range(prefix), *(prefix + node for node in tree)]) + int(rows.starts[0])
    generator = torch.Generator().manual_seed(3)
    given = tensors(rows, 500, 6, 2, 16, torch.float32)
    for stored in given[1:]:
        stored[:, places] = torch.randn(2, length, 16, generator=generator)
    given[0][0, :, tree[-1]] = torch.randn(6, 16, generator=generator)
    return compute(*given, rows, 0.3)[0, tree[-1]]


def row_by_row(matmul: Any, left: Any, right: Any, **settings: Any) -> Any:
    """A product whose rows do not depend on each other: BLAS sums a row by its place in the matrix."""
    return np.concatenate([matmul(row[None], right, **settings) for row in left])


@pytest.mark.parametrize("prefix", [250, 255, 256, 40], ids=str)
@pytest.mark.parametrize("compute", [ordered, pytest.param(by_kernels, marks=NEEDS_TRITON)])
def test_a_row_is_the_same_bits_in_a_tree_and_alone(compute, prefix: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Where pieces begin, end, and are left behind between the two; a tree summed in another order is seen."""
    path, length = [3 * depth for depth in range(20)], prefix + 20
    monkeypatch.setattr(np, "matmul", partial(row_by_row, np.matmul))  # Triton's interpreter multiplies by numpy
    alone = last_row(compute, prefix + 19, [0], length)
    assert torch.equal(last_row(compute, prefix, path, length), alone)
    monkeypatch.setattr(StaticRows, "lineage", property(reversed_lineage))
    assert not torch.equal(last_row(compute, prefix, path, length), alone)


@NEEDS_TRITON
@pytest.mark.slow
def test_the_kernels_compile_for_a_hopper_gpu_where_there_is_none() -> None:
    """Triton brings an assembler: products on the matrix units. This process only interprets.

    Shared keys and a row's own are multiplied by the same instructions: others would sum in another order.
    """
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    command = [sys.executable, "-W", "ignore", "-c", COMPILED]
    shared, own = subprocess.run(command, env=environment, capture_output=True, text=True, check=True).stdout.split()
    assert shared == own
    assert "wgmma.mma_async" in shared


COMPILED = """
import re
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource, compile
from precedent_cuda.triton_kernels import attend_piece

sizes = dict.fromkeys(("DIM", "VALUE_DIM", "DIM_BLOCK", "VALUE_BLOCK"), 128)
sizes |= dict(GROUP=4, WIDTH=16, TILE=64, KEYS=64, PIECE=256)
kinds = dict.fromkeys(("query", "keys", "values"), "*bf16") | dict.fromkeys(("outputs", "lses"), "*fp32")
integers = ("slot_of", "first_rows", "counts", "starts", "lengths", "seen", "lineage")
kinds |= dict.fromkeys(integers, "*i64") | {"scale": "fp32"}
names = attend_piece.arg_names
for shared in (True, False):
    constants = sizes | {"SHARED": shared}
    signature = {name: "constexpr" if name in constants else kinds.get(name, "i32") for name in names}
    aligned = [i for i, name in enumerate(names) if signature[name] not in ("constexpr", "fp32") and name != "pieces"]
    attributes = {(i,): [["tt.divisibility", 16]] for i in aligned}
    source = ASTSource(attend_piece, signature, constexprs=constants, attrs=attributes)
    made = compile(source, target=GPUTarget("cuda", 90, 32), options=dict(num_warps=4, num_stages=2)).asm["ptx"]
    print(*re.findall(r"w?g?mma[.\\w:]+", made), sep=",")
"""


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32, torch.float64], ids=str)
def test_on_cuda_attention_equals_plain_attention(dtype: torch.dtype) -> None:
    """The shape of Llama 3 8B, a long and a short sequence; tf32 is off unless somebody switched it on."""
    rows, arena = layout((1000, 0, 77), (64, 1, 17))
    query, keys, values = tensors(rows, arena, 32, 8, 128, dtype)
    expected, on = plainly(query, keys, values, rows, 128**-0.5), torch.device("cuda")
    found = attend(query.to(on), keys.to(on), values.to(on), moved(rows, on), 128**-0.5)
    assert distance(found, expected, rows) < (1e-4 if dtype.itemsize > 2 else 1e-2)
