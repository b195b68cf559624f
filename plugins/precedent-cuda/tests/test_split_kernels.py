"""Triton's kernels of split attention: interpreted, cut into work, ordered by position, and compiled."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator

import pytest
import torch
from helpers.ragged_attention import (
    EVERY,
    KERNELS,
    NEEDS_TRITON,
    PREFIXES,
    TREES,
    TRITON_RUNS_ON,
    distance,
    layout,
    moved,
    plainly,
    tensors,
)
from torch import Tensor

from precedent.errors import UnsupportedError
from precedent_cuda.attention import StaticRows


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
    from precedent_cuda.triton_kernels import LEAST_KEYS, tiling

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
    """Triton brings an assembler: products on the matrix units, copies of 16 bytes. This process only interprets.

    Shared keys and a row's own are multiplied by the same instructions: others would sum in another order.
    """
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    command = [sys.executable, "-W", "ignore", "-c", COMPILED]
    ran = subprocess.run(command, env=environment, capture_output=True, text=True, check=True)
    on_matrix_units, in_wide_copies, shared, own = ran.stdout.split()
    assert (on_matrix_units, in_wide_copies) == ("True", "True")
    assert shared == own
    assert "wgmma.mma_async" in shared


COMPILED = """
import re
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource, compile
from precedent_cuda.triton_kernels import attend_part, attend_piece

def ptx(kernel, unaligned=(), **own):
    sizes = dict.fromkeys(("DIM", "VALUE_DIM", "DIM_BLOCK", "VALUE_BLOCK"), 128)
    sizes |= dict(GROUP=4, WIDTH=16, TILE=64, KEYS=64, **own)
    kinds = dict.fromkeys(("query", "keys", "values"), "*bf16") | dict.fromkeys(("outputs", "lses"), "*fp32")
    integers = ("slot_of", "first_rows", "counts", "starts", "lengths", "seen", "lineage")
    kinds |= dict.fromkeys(integers, "*i64") | {"ancestors": "*u8", "scale": "fp32"}
    names = kernel.arg_names
    signature = {name: "constexpr" if name in sizes else kinds.get(name, "i32") for name in names}
    plain = ("constexpr", "fp32")
    aligned = [i for i, name in enumerate(names) if signature[name] not in plain and name not in unaligned]
    attributes = {(i,): [["tt.divisibility", 16]] for i in aligned}
    source = ASTSource(kernel, signature, constexprs=sizes, attrs=attributes)
    return compile(source, target=GPUTarget("cuda", 90, 32), options=dict(num_warps=4, num_stages=2)).asm["ptx"]

made = ptx(attend_part, KV_HEADS=8)
print("wgmma.mma_async" in made, "cp.async.cg.shared.global" in made and "0x10" in made)
for shared in (True, False):
    print(*re.findall(r"w?g?mma[.\\w:]+", ptx(attend_piece, ("pieces",), SHARED=shared, PIECE=256)), sep=",")
"""
