"""`attention.ordered` as Triton kernels: one computes pieces of the keys, another merges the pieces.

Lengths are read from device memory, so one CUDA graph serves every length. All query heads that share a KV head are in
one tile: each key is read once per tile. Exponentials are powers of two throughout.

A piece that is entirely committed is computed for all rows of a sequence at once, since they see the same keys. From
the piece in which the tree begins, every row has its own keys, gathered by position, and its own program. Both cases
run the same code on tiles of one size. So a key that was in a tree in one step and is committed in the next gives the
same products at the same place of the same sum. Nothing that affects the order of summation (tiles, blocks, pieces
merged at a time) depends on how many rows, sequences or keys there are.

Imported only if Triton is installed, which comes with torch for CUDA; `TRITON_INTERPRET=1` runs it on CPU tensors for
tests.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from precedent.errors import UnsupportedError
from precedent_cuda.attention import PIECE, StaticRows

LOG2_E = 1.4426950408889634

LEAST_TILE = 16
"""Rows and columns that matrix units need at least."""

KEYS_AT_ONCE = {2: 64, 4: 32}
"""Keys in a block, by bytes of a number: one block of keys and one of values, double-buffered, fit in shared memory."""


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
