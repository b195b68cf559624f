"""Both kinds of `attention` as Triton kernels: one computes parts of the keys, another merges the parts.

Split attention runs one program per sequence, KV head, tile of rows and *part*. A part is a share of the committed
prefix or the tree block with its ancestor mask. A share's length follows from the sequence's length, which is read from
device memory, so one CUDA graph serves every length. All rows of all query heads that share a KV head are in one tile
of up to `MOST_TILE` rows: each key is read once per tile. Exponentials are powers of two throughout.

In the order of positions, a piece that is entirely committed is computed for all rows of a sequence at once, since they
see the same keys. From the piece in which the tree begins, every row has its own keys, gathered by position, and its
own program. Both cases run the same code on tiles of one size. So a key that was in a tree in one step and is committed
in the next gives the same products at the same place of the same sum. Nothing that affects the order of summation
(tiles, blocks, pieces merged at a time) depends on how many rows, sequences or keys there are.

Imported only if Triton is installed, which comes with torch for CUDA; `TRITON_INTERPRET=1` runs it on CPU tensors for
tests.
"""

from __future__ import annotations

from functools import cache
from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from precedent.errors import UnsupportedError
from precedent_cuda.attention import PIECE, StaticRows

LOG2_E = 1.4426950408889634

LEAST_TILE, MOST_TILE = 16, 128
"""Rows of a tile: matrix units need at least 16, and registers hold the sums of 128."""

KEYS_AT_ONCE = {2: 64, 4: 32}
"""Keys in a block, by bytes of a number: one block of keys and one of values, double-buffered, fit in shared memory."""

LEAST_KEYS = 128
"""Least length of a part in the longest sequence: merging shorter parts costs more than they save."""

PROGRAMS_PER_PROCESSOR = 2
"""Programs wanted per multiprocessor; keys are divided into enough parts to reach it."""


@triton.jit
def taken_in(scores, value_places, wanted, highest, total, sums):  # fmt: skip
    """Add a block of keys to the running sums, by the online softmax of FlashAttention (2205.14135).

    Returns each row's highest score, the sum of its weights, and the sums of values by these weights.
    """
    new_highest = tl.maximum(highest, tl.max(scores, 1))
    level = tl.where(new_highest == float("-inf"), 0.0, new_highest)  # a difference to -inf must not be NaN
    weights, faded = tl.exp2(scores - level[:, None]), tl.exp2(highest - level)
    v = tl.load(value_places, mask=wanted, other=0.0)
    sums = sums * faded[:, None] + tl.dot(weights.to(v.dtype), v, input_precision="ieee")
    return new_highest, total * faded + tl.sum(weights, 1), sums


# Sequences begin anywhere in a step's tensors: specialising on alignment or on `parts` would compile more kernels.
@triton.jit(do_not_specialize=["parts"], do_not_specialize_on_alignment=["first_rows", "counts", "starts", "lengths"])
def attend_part(
    query, keys, values, outputs, lses, first_rows, counts, starts, lengths, ancestors, scale,
    query_head, query_row, key_head, key_row, value_head, value_row, parts,
    KV_HEADS: tl.constexpr, GROUP: tl.constexpr, WIDTH: tl.constexpr,
    DIM: tl.constexpr, VALUE_DIM: tl.constexpr, DIM_BLOCK: tl.constexpr, VALUE_BLOCK: tl.constexpr,
    TILE: tl.constexpr, KEYS: tl.constexpr,
):  # fmt: skip
    """One part of one tile: writes its output, float32, and the base-2 logarithm of the sum of its weights.

    `scale` includes log2(e); `*_head` and `*_row` are strides; the last of the `parts` is the tree.
    """
    sequence, kv_head = tl.program_id(0), tl.program_id(1).to(tl.int64)  # an arena may have 2**31 numbers and more
    part, tile = tl.program_id(2) % parts, tl.program_id(2) // parts
    count = tl.load(counts + sequence)
    if count == 0:
        return
    first, start, length = tl.load(first_rows + sequence), tl.load(starts + sequence), tl.load(lengths + sequence)

    place = tile * TILE + tl.arange(0, TILE)  # index of a row among the group's rows: head by head
    row = place % WIDTH
    there = (place < GROUP * WIDTH) & (row < count)
    dims, value_dims = tl.arange(0, DIM_BLOCK), tl.arange(0, VALUE_BLOCK)
    head = kv_head * GROUP + place // WIDTH
    asked = query + head * query_head + (first + row) * query_row
    q = tl.load(asked[:, None] + dims[None, :], mask=there[:, None] & (dims < DIM)[None, :], other=0.0)

    if part == parts - 1:
        begin, end, base, masked = length * 0, count, start + length, count
    else:
        share = tl.cdiv(tl.cdiv(length, parts - 1), KEYS) * KEYS
        begin, end, base, masked = part * share, tl.minimum((part + 1) * share, length), start, length * 0

    highest = tl.full([TILE], float("-inf"), tl.float32)
    total = tl.zeros([TILE], tl.float32)
    sums = tl.zeros([TILE, VALUE_BLOCK], tl.float32)
    for at in range(begin, end, KEYS):
        key = at + tl.arange(0, KEYS)
        exists = key < end
        # load the block of keys as columns, which saves a transposition before the product
        key_places = keys + kv_head * key_head + (base + key) * key_row
        k = tl.load(key_places[None, :] + dims[:, None], mask=exists[None, :] & (dims < DIM)[:, None], other=0.0)
        seen = tl.load(
            ancestors + (sequence * WIDTH + row)[:, None] * WIDTH + key[None, :],
            mask=there[:, None] & (key < masked)[None, :], other=1,
        )  # fmt: skip
        scores = tl.dot(q, k, input_precision="ieee") * scale
        scores = tl.where(exists[None, :] & (seen != 0), scores, float("-inf"))
        value_places = (values + kv_head * value_head + (base + key) * value_row)[:, None] + value_dims[None, :]
        wanted = exists[:, None] & (value_dims < VALUE_DIM)[None, :]
        highest, total, sums = taken_in(scores, value_places, wanted, highest, total, sums)

    some = total > 0.0
    divisor = tl.where(some, total, 1.0)
    lse = tl.where(some, highest + tl.log2(divisor), float("-inf"))
    spot = ((sequence * KV_HEADS + kv_head) * parts + part) * (GROUP * WIDTH) + place
    tl.store(lses + spot, lse, mask=there)
    written = there[:, None] & (value_dims < VALUE_DIM)[None, :]
    tl.store(outputs + spot[:, None] * VALUE_DIM + value_dims[None, :], sums / divisor[:, None], mask=written)


@triton.jit(do_not_specialize=["parts"], do_not_specialize_on_alignment=["slot_of"])
def merge_parts(
    outputs, lses, slot_of, merged, heads, parts,
    KV_HEADS: tl.constexpr, GROUP: tl.constexpr, WIDTH: tl.constexpr,
    PARTS_BLOCK: tl.constexpr, VALUE_DIM: tl.constexpr, VALUE_BLOCK: tl.constexpr,
):  # fmt: skip
    """Merge one row of one query head into `merged` `[rows, heads, VALUE_DIM]`; a padding row becomes 0."""
    row, head = tl.program_id(0), tl.program_id(1)
    slot = tl.load(slot_of + row)
    sequence, within = tl.maximum(slot, 0) // WIDTH, tl.maximum(slot, 0) % WIDTH
    part, dims = tl.arange(0, PARTS_BLOCK), tl.arange(0, VALUE_BLOCK)
    tiles = (sequence * KV_HEADS + head // GROUP) * parts + part
    spots = tiles * (GROUP * WIDTH) + (head % GROUP) * WIDTH + within
    lse = tl.load(lses + spots, mask=part < tl.where(slot >= 0, parts, 0), other=float("-inf"))
    highest = tl.max(lse, 0)
    weights = tl.exp2(lse - tl.where(highest == float("-inf"), 0.0, highest))
    total = tl.sum(weights, 0)
    wanted = (lse > float("-inf"))[:, None] & (dims < VALUE_DIM)[None, :]
    pieces = tl.load(outputs + spots[:, None] * VALUE_DIM + dims[None, :], mask=wanted, other=0.0)
    result = tl.sum(pieces * weights[:, None], 0) / tl.where(total > 0.0, total, 1.0)
    spot = (row * heads + head) * VALUE_DIM + dims
    tl.store(merged + spot, result.to(merged.dtype.element_ty), mask=dims < VALUE_DIM)


class Tiling(NamedTuple):
    """How the work is divided: rows of a tile, tiles of a group's rows, and parts of the keys, the tree's included."""

    tile: int
    tiles: int
    parts: int


def tiling(rows: StaticRows, kv_heads: int, group: int, processors: int) -> Tiling:
    """Enough parts to keep every multiprocessor busy, but none shorter than `LEAST_KEYS` in the longest sequence."""
    tile = min(max(triton.next_power_of_2(group * rows.width), LEAST_TILE), MOST_TILE)
    tiles = triton.cdiv(group * rows.width, tile)
    wanted = triton.cdiv(PROGRAMS_PER_PROCESSOR * processors, rows.sequences * kv_heads * tiles)
    return Tiling(tile, tiles, min(wanted, triton.cdiv(rows.longest, LEAST_KEYS)) + 1)


def attend_by_kernel(query: Tensor, keys: Tensor, values: Tensor, rows: StaticRows, scale: float) -> Tensor:
    """`attention.split`. Raises UnsupportedError for dtypes that the kernels do not support."""
    if query.dtype.itemsize not in KEYS_AT_ONCE:
        raise UnsupportedError(f"the Triton kernels compute in bfloat16, float16 and float32, not in {query.dtype}")
    (_, heads, num_rows, dim), (kv_heads, _, value_dim) = query.shape, values.shape
    group, device = heads // kv_heads, query.device
    tile, tiles, parts = tiling(rows, kv_heads, group, _processors(device))
    pieces = rows.sequences * kv_heads * parts * group * rows.width
    outputs = torch.empty((pieces, value_dim), dtype=torch.float32, device=device)
    lses = torch.empty(pieces, dtype=torch.float32, device=device)
    merged = torch.empty((1, num_rows, heads, value_dim), dtype=query.dtype, device=device)
    if query.stride(3) != 1:
        query = query.contiguous()
    sizes = {"KV_HEADS": kv_heads, "GROUP": group, "WIDTH": rows.width, "VALUE_DIM": value_dim}
    value_block = max(triton.next_power_of_2(value_dim), LEAST_TILE)
    attend_part[rows.sequences, kv_heads, tiles * parts](
        query, keys, values, outputs, lses, rows.first_rows, rows.counts, rows.starts, rows.lengths,
        rows.ancestors.view(torch.uint8), scale * LOG2_E,
        query.stride(1), query.stride(2), keys.stride(0), keys.stride(1), values.stride(0), values.stride(1), parts,
        **sizes, DIM=dim, DIM_BLOCK=max(triton.next_power_of_2(dim), LEAST_TILE), VALUE_BLOCK=value_block,
        TILE=tile, KEYS=KEYS_AT_ONCE[query.dtype.itemsize], num_warps=4 if tile <= 64 else 8, num_stages=2,
    )  # fmt: skip
    merge_parts[num_rows, heads](
        outputs, lses, rows.slot_of, merged, heads, parts,
        **sizes, PARTS_BLOCK=triton.next_power_of_2(parts), VALUE_BLOCK=value_block, num_warps=4,
    )  # fmt: skip
    return merged


@cache
def _processors(device: torch.device) -> int:
    """Multiprocessors of a device; a few on a CPU, where only the interpreter runs."""
    return int(torch.cuda.get_device_properties(device).multi_processor_count) if device.type == "cuda" else 8


TILE = 64
"""Rows of a tile; a single row fills as many of them as its KV head has query heads."""

MERGED_AT_ONCE = 16
"""Pieces merged at a time, whether they exist or not."""


# Compiled code must not depend on the number of pieces, nor on where a sequence begins in a step's tensors.
@triton.jit(
    do_not_specialize=["pieces"],
    do_not_specialize_on_alignment=["slot_of", "first_rows", "counts", "starts", "lengths", "seen", "lineage"],
)
def attend_piece(
    query, keys, values, outputs, lses, slot_of, first_rows, counts, starts, lengths, seen, lineage, scale,
    query_head, query_row, key_head, key_row, value_head, value_row, heads, pieces,
    SHARED: tl.constexpr, GROUP: tl.constexpr, WIDTH: tl.constexpr, PIECE: tl.constexpr,
    DIM: tl.constexpr, VALUE_DIM: tl.constexpr, DIM_BLOCK: tl.constexpr, VALUE_BLOCK: tl.constexpr,
    TILE: tl.constexpr, KEYS: tl.constexpr,
):  # fmt: skip
    """One piece of a tile of a sequence's rows (`SHARED`), or of one row: its output and the log2 of its weights' sum.

    Program ids are sequence or row, KV head, and piece (with its tile). `scale` includes log2(e). The `pieces` of a row
    and head follow each other in `outputs` `[R, heads, pieces, VALUE_DIM]`, float32, and in `lses`.
    """
    kv_head, place = tl.program_id(1).to(tl.int64), tl.arange(0, TILE)
    if SHARED:
        sequence, piece = tl.program_id(0), tl.program_id(2) % pieces
        first_place = tl.program_id(2) // pieces * TILE
        place += first_place
        within, group = place // GROUP, place % GROUP
        count, length = tl.load(counts + sequence), tl.load(lengths + sequence)
        there = within < count
        end = (piece + 1) * PIECE
        if (end > length) | (first_place >= count * GROUP):
            return
    else:
        slot = tl.load(slot_of + tl.program_id(0))
        if slot < 0:
            return
        sequence, group = slot // WIDTH, place
        within, there = place * 0 + slot % WIDTH, place < GROUP
        length = tl.load(lengths + sequence)
        piece = length // PIECE + tl.program_id(2)
        end = tl.minimum((piece + 1) * PIECE, tl.load(seen + slot))
        if piece * PIECE >= end:
            return

    row = tl.load(first_rows + sequence) + within
    head = kv_head * GROUP + group
    dims, value_dims = tl.arange(0, DIM_BLOCK), tl.arange(0, VALUE_BLOCK)
    asked = query + head * query_head + row * query_row
    q = tl.load(asked[:, None] + dims[None, :], mask=there[:, None] & (dims < DIM)[None, :], other=0.0)
    start = tl.load(starts + sequence)

    highest = tl.full([TILE], float("-inf"), tl.float32)
    total = tl.zeros([TILE], tl.float32)
    sums = tl.zeros([TILE, VALUE_BLOCK], tl.float32)
    for at in range(piece * PIECE, end, KEYS):
        position = at + tl.arange(0, KEYS)
        exists = position < end
        key = position
        if not SHARED:
            own = tl.load(lineage + slot * WIDTH + position - length, mask=exists & (position >= length), other=0)
            key = tl.where(position < length, position, length + own)
        key_places = keys + kv_head * key_head + (start + key) * key_row
        k = tl.load(key_places[None, :] + dims[:, None], mask=exists[None, :] & (dims < DIM)[:, None], other=0.0)
        scores = tl.where(exists[None, :], tl.dot(q, k, input_precision="ieee") * scale, float("-inf"))
        value_places = (values + kv_head * value_head + (start + key) * value_row)[:, None] + value_dims[None, :]
        wanted = exists[:, None] & (value_dims < VALUE_DIM)[None, :]
        highest, total, sums = taken_in(scores, value_places, wanted, highest, total, sums)

    spot = (row * heads + head) * pieces + piece
    tl.store(lses + spot, highest + tl.log2(total), mask=there)
    written = there[:, None] & (value_dims < VALUE_DIM)[None, :]
    tl.store(outputs + spot[:, None] * VALUE_DIM + value_dims[None, :], sums / total[:, None], mask=written)


@triton.jit(do_not_specialize=["pieces"], do_not_specialize_on_alignment=["slot_of", "seen"])
def merge_pieces(
    outputs, lses, slot_of, seen, merged, heads, pieces,
    PIECE: tl.constexpr, AT_ONCE: tl.constexpr, VALUE_DIM: tl.constexpr, VALUE_BLOCK: tl.constexpr,
):  # fmt: skip
    """Merge one row of one query head into `merged` `[R, heads, VALUE_DIM]`; a padding row becomes 0."""
    row, head = tl.program_id(0), tl.program_id(1)
    slot = tl.load(slot_of + row)
    count = tl.where(slot < 0, 0, tl.cdiv(tl.load(seen + tl.maximum(slot, 0)), PIECE))
    dims, spot = tl.arange(0, VALUE_BLOCK), row * heads + head
    highest, total = tl.full((), float("-inf"), tl.float32), tl.full((), 0.0, tl.float32)
    result = tl.zeros([VALUE_BLOCK], tl.float32)
    for first in range(0, count, AT_ONCE):
        piece = first + tl.arange(0, AT_ONCE)
        lse = tl.load(lses + spot * pieces + piece, mask=piece < count, other=float("-inf"))
        wanted = (piece < count)[:, None] & (dims < VALUE_DIM)[None, :]
        parts = tl.load(outputs + (spot * pieces + piece)[:, None] * VALUE_DIM + dims[None, :], mask=wanted, other=0.0)
        new_highest = tl.maximum(highest, tl.max(lse, 0))
        weights, faded = tl.exp2(lse - new_highest), tl.exp2(highest - new_highest)
        result = result * faded + tl.sum(parts * weights[:, None], 0)
        total = total * faded + tl.sum(weights, 0)
        highest = new_highest
    result = result / tl.where(total > 0.0, total, 1.0)
    tl.store(merged + spot * VALUE_DIM + dims, result.to(merged.dtype.element_ty), mask=dims < VALUE_DIM)


def attend_in_order(query: Tensor, keys: Tensor, values: Tensor, rows: StaticRows, scale: float) -> Tensor:
    """`attention.ordered`. Raises UnsupportedError for inputs that the kernels do not support."""
    if query.dtype.itemsize not in KEYS_AT_ONCE:
        raise UnsupportedError(f"the Triton kernels compute in bfloat16, float16 and float32, not in {query.dtype}")
    (_, heads, num_rows, dim), (kv_heads, _, value_dim) = query.shape, values.shape
    group, pieces = heads // kv_heads, triton.cdiv(rows.longest, PIECE)
    if group > TILE:
        raise UnsupportedError(f"{group} query heads share one KV head, and a tile of the kernels has {TILE} rows")
    outputs = torch.empty((num_rows, heads, pieces, value_dim), dtype=torch.float32, device=query.device)
    lses = torch.empty((num_rows, heads, pieces), dtype=torch.float32, device=query.device)
    merged = torch.empty((1, num_rows, heads, value_dim), dtype=query.dtype, device=query.device)
    if query.stride(3) != 1:
        query = query.contiguous()
    value_block = max(triton.next_power_of_2(value_dim), LEAST_TILE)
    tiles, own_pieces = triton.cdiv(group * rows.width, TILE), triton.cdiv(PIECE - 1 + rows.width, PIECE)
    grids = {True: (rows.sequences, kv_heads, tiles * pieces), False: (num_rows, kv_heads, own_pieces)}
    for shared, grid in grids.items():
        attend_piece[grid](
            query, keys, values, outputs, lses, rows.slot_of, rows.first_rows, rows.counts, rows.starts, rows.lengths,
            rows.seen, rows.lineage, scale * LOG2_E, query.stride(1), query.stride(2),
            keys.stride(0), keys.stride(1), values.stride(0), values.stride(1), heads, pieces,
            SHARED=shared, GROUP=group, WIDTH=rows.width, PIECE=PIECE, DIM=dim, VALUE_DIM=value_dim,
            DIM_BLOCK=max(triton.next_power_of_2(dim), LEAST_TILE), VALUE_BLOCK=value_block,
            TILE=TILE, KEYS=KEYS_AT_ONCE[query.dtype.itemsize], num_warps=4, num_stages=2,
        )  # fmt: skip
    merge_pieces[num_rows, heads](
        outputs, lses, rows.slot_of, rows.seen, merged, heads, pieces,
        PIECE=PIECE, AT_ONCE=MERGED_AT_ONCE, VALUE_DIM=value_dim, VALUE_BLOCK=value_block, num_warps=4,
    )  # fmt: skip
    return merged
