"""Attention in pieces equals attention in one: every variant, ragged sequences, empty prefixes, poisoned memory."""

from __future__ import annotations

import importlib.util
import math
import os
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import fields, replace

import pytest
import torch
from torch import Tensor

from precedent.errors import ConfigError, UnsupportedError
from precedent.target.cuda.ordered_attention import ORDERED, ordered, ordered_by_triton, ordered_named
from precedent.target.cuda.split_attention import (
    VARIANTS,
    Partial,
    StaticRows,
    attend,
    merge,
    split,
    variant_named,
)

NEEDS_TRITON = pytest.mark.skipif(importlib.util.find_spec("triton") is None, reason="triton is not installed")
TRITON_RUNS_ON = torch.device("cuda" if torch.cuda.is_available() else "cpu")
EVERY = VARIANTS | ORDERED
ON_ANY_DEVICE = [name for name in EVERY if "triton" not in name]
KERNELS = [name for name in EVERY if "triton" in name]

pytestmark = pytest.mark.filterwarnings("ignore:flex_attention called without torch.compile")  # as it is on a CPU

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


@pytest.mark.parametrize("heads", [(4, 4), (6, 2), (8, 1)], ids=str)
@pytest.mark.parametrize("name", ON_ANY_DEVICE)
def test_every_variant_equals_plain_attention_in_float64(name: str, heads: tuple[int, int]) -> None:
    rows, arena = layout(PREFIXES, TREES)
    query, keys, values = tensors(rows, arena, *heads, 16, torch.float64)
    found = EVERY[name](query, keys, values, rows, 0.3)
    assert distance(found, plainly(query, keys, values, rows, 0.3), rows) < 1e-12
    assert found.isfinite().all(), "rows that stand for nobody are finite"


@pytest.mark.parametrize("name", ON_ANY_DEVICE)
def test_half_precision_is_rounded_once_or_twice_not_more(name: str) -> None:
    rows, arena = layout(PREFIXES, TREES)
    query, keys, values = tensors(rows, arena, 4, 2, 32, torch.bfloat16)
    found = EVERY[name](query, keys, values, rows, 32**-0.5)
    assert found.dtype == torch.bfloat16
    assert distance(found, plainly(query, keys, values, rows, 32**-0.5), rows) < 1e-2


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


@NEEDS_TRITON
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16], ids=str)  # the interpreter multiplies no bfloat16
@pytest.mark.parametrize(("heads", "dim"), [((6, 2), 16), ((4, 4), 24), ((8, 1), 64)], ids=str)
@pytest.mark.parametrize("name", KERNELS)
def test_the_kernels_equal_plain_attention(name: str, heads: tuple[int, int], dim: int, dtype: torch.dtype) -> None:
    """Several parts of the prefix, a tile wider than the rows, heads whose size is no power of two, poisoned memory."""
    rows, arena = layout(PREFIXES, TREES)
    query, keys, values = tensors(rows, arena, *heads, dim, dtype)
    expected = plainly(query, keys, values, rows, 0.2)
    device = TRITON_RUNS_ON
    found = EVERY[name](query.to(device), keys.to(device), values.to(device), moved(rows, device), 0.2)
    assert distance(found, expected, rows) < (1e-5 if dtype == torch.float32 else 1e-2)
    assert found[:, rows.slot_of.to(device) < 0].eq(0).all(), "rows that stand for nobody are 0"


@NEEDS_TRITON
@pytest.mark.parametrize("name", KERNELS)
def test_the_kernels_take_more_rows_than_a_tile_and_values_of_another_size(name: str) -> None:
    rows, arena = layout((300, 20), (40, 2), spare=0)
    query, keys, values = tensors(rows, arena, 8, 2, 16, torch.float32, value_dim=8)
    device = TRITON_RUNS_ON
    found = EVERY[name](query.to(device), keys.to(device), values.to(device), moved(rows, device), 0.5)
    assert distance(found, plainly(query, keys, values, rows, 0.5), rows) < 1e-5


@NEEDS_TRITON
def test_the_kernels_refuse_what_they_do_not_multiply() -> None:
    rows, arena = layout(PREFIXES, TREES)
    for name in KERNELS:
        with pytest.raises(UnsupportedError, match="float64"):
            EVERY[name](*tensors(rows, arena, 4, 2, 16, torch.float64), rows, 1.0)
    with pytest.raises(UnsupportedError, match="65 query heads share one KV head"):
        EVERY["ordered-triton"](*tensors(rows, arena, 65, 1, 16, torch.float32), rows, 1.0)


def in_a_tree_and_committed(prefix: int, length: int) -> Iterator[tuple[StaticRows, Tensor, int]]:
    """A path of so many tokens twice: scored among other branches, and its last row alone behind the committed others.

    With each the arena rows of the path's tokens from the prefix on, and the packed row of its last one.
    """
    rows, _ = layout((prefix,), (3 * length,), spare=2)
    path = torch.arange(length) * 3  # every third node, below one another; the others hang where layout has put them
    for depth, node in enumerate(path.tolist()):
        rows.ancestors[0, node] = False
        rows.ancestors[0, node, path[: depth + 1]] = True
    yield rows, torch.cat([torch.arange(prefix), prefix + path]) + int(rows.starts[0]), int(path[-1])
    rows, _ = layout((prefix + length - 1,), (1,), spare=7)
    yield rows, torch.arange(prefix + length) + int(rows.starts[0]), 0


def last_rows(name: str, dtype: torch.dtype, prefix: int, length: int) -> list[Tensor]:
    """What attention gives after the last token of the same path, either way."""
    generator, found = torch.Generator().manual_seed(3), []
    keys, values = (torch.randn(2, prefix + length, 16, generator=generator).to(dtype) for _ in range(2))
    last = torch.randn(6, 16, generator=generator).to(dtype)
    for rows, places, row in in_a_tree_and_committed(prefix, length):
        query, arena_keys, arena_values = tensors(rows, prefix + 200, 6, 2, 16, dtype)
        arena_keys[:, places], arena_values[:, places], query[0, :, row] = keys, values, last
        on = TRITON_RUNS_ON if name in KERNELS else torch.device("cpu")
        given = (each.to(on) for each in (query, arena_keys, arena_values))
        found.append(EVERY[name](*given, moved(rows, on), 0.3)[0, row])
    return found


@pytest.mark.parametrize("prefix", [250, 255, 256, 40], ids=str)
@pytest.mark.parametrize("name", ["ordered", pytest.param("ordered-triton", marks=NEEDS_TRITON)])
def test_in_the_order_of_positions_a_row_is_the_same_bits_in_a_tree_and_alone(name: str, prefix: int) -> None:
    """Where pieces begin, end, and are left behind between the two; apart from each other they are not the same."""
    scored, alone = last_rows(name, torch.float32, prefix, 9)
    assert torch.equal(scored, alone)
    assert not torch.equal(*last_rows("split", torch.float32, prefix, 9)), "the control"


@NEEDS_TRITON
def test_work_is_cut_so_that_every_multiprocessor_has_some() -> None:
    from precedent.target.cuda.triton_attention import LEAST_KEYS, tiling

    def cut(width: int, longest: int) -> tuple[int, int, int]:
        one = torch.zeros(1, dtype=torch.long)
        rows = StaticRows(torch.zeros(1, width), one, one, one, one, one, one, longest)
        return tuple(tiling(rows, kv_heads=8, group=4, processors=132))

    assert cut(1, 16_384) == (16, 1, 34)
    assert cut(64, 16_384) == (128, 2, 18)
    assert cut(1, LEAST_KEYS) == (16, 1, 2)


@NEEDS_TRITON
@pytest.mark.slow
def test_the_kernels_compile_for_a_hopper_gpu_where_there_is_none() -> None:
    """Triton brings an assembler: products on the matrix units, copies of 16 bytes. This process only interprets."""
    assert compiled(COMPILED) == ["True", "True"]


@NEEDS_TRITON
@pytest.mark.slow
def test_shared_keys_and_a_rows_own_are_multiplied_by_the_same_instructions() -> None:
    """Compiled for a Hopper GPU: other products would sum in another order, and round otherwise."""
    shared, own = compiled(COMPILED_IN_ORDER)
    assert shared == own
    assert "wgmma.mma_async" in shared


def compiled(program: str) -> list[str]:
    """What a program that compiles kernels prints, word by word."""
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    command = [sys.executable, "-W", "ignore", "-c", program]
    return subprocess.run(command, env=environment, capture_output=True, text=True, check=True).stdout.split()


COMPILED = """
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource, compile
from precedent.target.cuda.triton_attention import attend_part

sizes = dict.fromkeys(("DIM", "VALUE_DIM", "DIM_BLOCK", "VALUE_BLOCK"), 128)
sizes |= dict(KV_HEADS=8, GROUP=4, WIDTH=16, TILE=64, KEYS=64)
kinds = dict.fromkeys(("query", "keys", "values"), "*bf16") | dict.fromkeys(("outputs", "lses"), "*fp32")
kinds |= dict.fromkeys(("first_rows", "counts", "starts", "lengths"), "*i64") | {"ancestors": "*u8", "scale": "fp32"}
names = attend_part.arg_names
signature = {name: "constexpr" if name in sizes else kinds.get(name, "i32") for name in names}
integers = [i for i, name in enumerate(names) if signature[name] not in ("constexpr", "fp32")]
aligned = {(i,): [["tt.divisibility", 16]] for i in integers}
source = ASTSource(attend_part, signature, constexprs=sizes, attrs=aligned)
made = compile(source, target=GPUTarget("cuda", 90, 32), options=dict(num_warps=4, num_stages=2)).asm["ptx"]
print("wgmma.mma_async" in made, "cp.async.cg.shared.global" in made and "0x10" in made)
"""

COMPILED_IN_ORDER = """
import re
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource, compile
from precedent.target.cuda.triton_ordered import attend_piece

for shared in (True, False):
    sizes = dict.fromkeys(("DIM", "VALUE_DIM", "DIM_BLOCK", "VALUE_BLOCK"), 128)
    sizes |= dict(SHARED=shared, GROUP=4, WIDTH=16, PIECE=256, TILE=64, KEYS=64)
    kinds = dict.fromkeys(("query", "keys", "values"), "*bf16") | dict.fromkeys(("outputs", "lses"), "*fp32")
    kinds |= dict.fromkeys(("slot_of", "first_rows", "counts", "starts", "lengths", "seen", "lineage"), "*i64")
    kinds["scale"] = "fp32"
    names = attend_piece.arg_names
    signature = {name: "constexpr" if name in sizes else kinds.get(name, "i32") for name in names}
    integers = [i for i, name in enumerate(names) if signature[name] not in ("constexpr", "fp32") and name != "pieces"]
    aligned = {(i,): [["tt.divisibility", 16]] for i in integers}
    source = ASTSource(attend_piece, signature, constexprs=sizes, attrs=aligned)
    made = compile(source, target=GPUTarget("cuda", 90, 32), options=dict(num_warps=4, num_stages=2)).asm["ptx"]
    print(*re.findall(r"w?g?mma[.\\w:]+", made), sep=",")
"""


def test_a_variant_is_chosen_by_device_and_refused_by_name() -> None:
    cpu = torch.device("cpu")
    assert variant_named("auto", cpu, torch.bfloat16) is split
    assert variant_named("auto", torch.device("cuda"), torch.float64) is split
    assert ordered_named("auto", cpu, torch.bfloat16) is ordered
    assert ordered_named("ordered-triton", cpu, torch.float32) is ordered_by_triton
    with pytest.raises(ConfigError, match=r"flashy.*choose auto, split, sdpa"):
        variant_named("flashy", cpu, torch.float32)


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
