"""Attention of few rows over a shared prefix and over each other, on torch's own threads.

A row of a candidate tree must be bit-identical to the same row in plain decoding. So a row's keys are processed in
order, the prefix first and then its ancestors, wherever those are among the tree's rows. A window hides the first of
them: a hidden key's weight is 0, and every other key keeps its lane in the sums, which its position alone decides.
"""

from __future__ import annotations

import ctypes

import numpy as np
import torch
from numba.np.numpy_support import carray
from numpy.typing import NDArray
from torch import Tensor

from precedent.runtime.compiled import Int64s, compiled
from precedent_cpu.attention_kernels import (
    blend_kernel,
    cap,
    finish_kernel,
    read_long,
    score_kernel,
    softmax,
    write_float,
)
from precedent_cpu.attention_piece import VALUES, Piece, columns, gather, own, own_columns, widened
from precedent_cpu.dot_kernels import take_ticket
from precedent_cpu.kernel_code import LANES
from precedent_cpu.row_products import run_on_team, team

VECTORS = 4
"""Registers in one blend: a head's numbers must fill a multiple of them."""

QUERIES = 24
"""Queries computed together, approximately: their scores and sums stay in the processor's cache."""

_MOST = 4 if LANES == 16 else 3
"""Queries whose sums fill the registers in a blend, beside their weights and one value."""

_finish, _finish_wide = (finish_kernel(wide=wide) for wide in (False, True))
_blend1, _blend2, _blend_most = (blend_kernel(queries, VECTORS) for queries in (1, 2, _MOST))
_score1, _score3, _score4, _score8 = (score_kernel(queries) for queries in (1, 3, 4, 8))


class Sight:
    """Which keys some rows see: the prefix, then `columns[starts[r]:starts[r + 1]]` for row r, in increasing order.

    No row sees the first `skipped` keys of the prefix, a multiple of `LANES`; row r does not see the next `hidden[r]`
    of its keys either.
    """

    def __init__(
        self, allowed: NDArray[np.bool_] | None, num_rows: int, skipped: int = 0, hidden: Int64s | None = None
    ) -> None:
        rows, columns = np.nonzero(np.eye(1, dtype=np.bool_) if allowed is None else allowed)
        self.starts: Int64s = np.searchsorted(rows, np.arange(num_rows + 1)).astype(np.int64)
        self.columns: Int64s = np.ascontiguousarray(columns, dtype=np.int64)
        self.most = int(np.diff(self.starts).max())
        self.skipped = skipped
        self.hidden: Int64s = np.zeros(num_rows, dtype=np.int64) if hidden is None else hidden


def fits(query: Tensor, key: Tensor, value: Tensor) -> bool:
    """Whether `row_attention` supports these on this machine."""
    dim = query.shape[3]
    return (
        query.is_cpu
        and query.dtype in (torch.bfloat16, torch.float32)
        and query.dtype == key.dtype == value.dtype
        and dim == key.shape[3] == value.shape[3]
        and dim % (VECTORS * LANES) == 0
        and key.stride(3) == value.stride(3) == 1
        and team() is not None
    )


def row_attention(query: Tensor, key: Tensor, value: Tensor, sight: Sight, scaling: float | None) -> Tensor:
    """Attention of `query [1, heads, rows, dim]` over `key/value [1, kv_heads, prefix + rows, dim]`.

    Returns `[1, rows, heads, dim]`. `sight` says which of the last `rows` keys each row sees, and from where on it sees
    the prefix. Scores and sums are float32.
    """
    _, heads, rows, dim = query.shape
    key, value = key[:, :, sight.skipped :], value[:, :, sight.skipped :]
    kv_heads, keys = key.shape[1], key.shape[2]
    wide, threads = query.dtype == torch.float32, torch.get_num_threads()
    groups, scale = heads // kv_heads, dim**-0.5 if scaling is None else scaling
    queries = (query.float() * scale).view(kv_heads, groups, rows, dim).transpose(1, 2).contiguous()
    outputs = torch.empty((1, rows, heads, dim), dtype=query.dtype)
    width = -(-(keys - rows) // LANES) * LANES + (sight.most // LANES + 2) * LANES
    together = max(1, QUERIES // groups)
    room = together * groups * (width + dim + 1) + LANES + 2 * LANES * dim
    scratch = torch.empty(threads * room)
    job = (ctypes.c_int64 * 23)(
        0, 0, rows, groups, kv_heads, dim, keys - rows, wide, width, 4 * room,
        queries.data_ptr(), key.data_ptr(), key.stride(1) * key.element_size(), key.stride(2) * key.element_size(),
        value.data_ptr(), value.stride(1) * value.element_size(), value.stride(2) * value.element_size(),
        outputs.data_ptr(), scratch.data_ptr(), sight.starts.ctypes.data, sight.columns.ctypes.data, together,
        sight.hidden.ctypes.data,
    )  # fmt: skip
    run_on_team(_work, job, threads)
    return outputs


@compiled
def attend(piece: Piece) -> None:
    """Weighted values of all queries, still to be divided by their totals."""
    for first in range(0, piece.prefix, LANES):
        turned = columns(piece, first, min(LANES, piece.prefix - first))
        _score(piece, turned, first, 0, piece.num_queries)
    for query in range(0, piece.num_queries, piece.groups):
        _score_own(piece, query)
    for value in range(piece.num_queries * piece.dim):
        write_float(piece.sums + 4 * value, 0.0)
    for first in range(0, piece.prefix, VALUES):
        count = min(VALUES, piece.prefix - first)
        source, stride = widened(piece, first, count)
        _blend(piece, source, stride, first, count, 0, piece.num_queries)
    for query in range(0, piece.num_queries, piece.groups):
        start, end = own(piece, query)
        for number in range(start, end, VALUES):
            count = min(VALUES, end - number)
            gather(piece, piece.values, piece.value_stride, number, count, piece.block)
            first = piece.prefix + number - start
            _blend(piece, piece.block, 4 * piece.dim, first, count, query, query + piece.groups)


@compiled
def _score(piece: Piece, columns: int, key: int, query: int, end: int) -> None:
    """Scores of queries `query` to `end` with `LANES` keys, stored from column `key` on."""
    while query + 8 <= end:
        _score8(_scored(piece, columns, key, query))
        query += 8
    while query + 4 <= end:
        _score4(_scored(piece, columns, key, query))
        query += 4
    while query + 3 <= end:
        _score3(_scored(piece, columns, key, query))
        query += 3
    while query < end:
        _score1(_scored(piece, columns, key, query))
        query += 1


@compiled
def _scored(piece: Piece, columns: int, key: int, query: int) -> tuple[int, int, int, int, int, int]:
    """Arguments of a score kernel, starting at `query` and `key`."""
    queries, scores = piece.queries + 4 * query * piece.dim, piece.scores + 4 * (query * piece.width + key)
    return (columns, piece.dim, queries, 4 * piece.dim, scores, 4 * piece.width)


@compiled
def _score_own(piece: Piece, query: int) -> None:
    """Scores of a row's queries with the new keys that it sees; then turns all their scores into weights."""
    start, end = own(piece, query)
    for number in range(0, end - start, LANES):
        turned = own_columns(piece, start + number, min(LANES, end - start - number))
        _score(piece, turned, piece.prefix + number, query, query + piece.groups)
    seen, hidden = piece.prefix + end - start, read_long(piece.hidden + 8 * (piece.first + query // piece.groups))
    count = (seen + LANES - 1) // LANES * LANES
    for each in range(query, query + piece.groups):
        scores = piece.scores + 4 * each * piece.width
        if piece.softcap:
            cap(scores, count, piece.softcap)
        for key in range(hidden):
            write_float(scores + 4 * key, -np.inf)
        for key in range(seen, count):
            write_float(scores + 4 * key, -np.inf)
        softmax(scores, count, piece.totals + 4 * each)


@compiled
def _blend(piece: Piece, values: int, stride: int, first: int, count: int, query: int, end: int) -> None:
    """Add `count` values, weighted, from key `first` on to the sums of queries `query` to `end`."""
    for column in range(0, piece.dim, VECTORS * LANES):
        now = query
        while now + _MOST <= end:
            _blend_most(_blended(piece, values, stride, first, count, now, column))
            now += _MOST
        if now + 2 <= end:
            _blend2(_blended(piece, values, stride, first, count, now, column))
            now += 2
        if now < end:
            _blend1(_blended(piece, values, stride, first, count, now, column))


@compiled
def _blended(
    piece: Piece, values: int, stride: int, first: int, count: int, query: int, column: int
) -> tuple[int, int, int, int, int, int, int]:
    """Arguments of a blend kernel, starting at `query` and `column`."""
    weights = piece.scores + 4 * (query * piece.width + first)
    sums = piece.sums + 4 * (query * piece.dim + column)
    return (values + 4 * column, stride, count, weights, 4 * piece.width, sums, 4 * piece.dim)


def _work(job):  # type: ignore[no-untyped-def]  # numba takes its types from the signature
    """What each thread of the team runs until no piece is left; see `row_attention` for the fields."""
    base = carray(job, 2).ctypes.data
    rows, groups, kv_heads, dim, width, size = job[2], job[3], job[4], job[5], job[8], 4 if job[7] else 2
    together = job[21]
    scores = job[18] + take_ticket(base) * job[9]
    sums = scores + 4 * together * groups * width
    totals = sums + 4 * together * groups * dim
    block = totals + 4 * (together * groups + LANES)
    pieces = (rows + together - 1) // together
    while True:
        number = take_ticket(base + 8)
        if number >= kv_heads * pieces:
            return
        head, first = number // pieces, number % pieces * together
        piece = Piece(
            job[10] + (head * rows + first) * groups * dim * 4, first, min(together, rows - first) * groups, groups,
            dim, job[11] + head * job[12], job[13], job[14] + head * job[15], job[16], job[6], job[7] != 0, width,
            scores, sums, totals, block, job[19], job[20], job[22], 0.0,
        )  # fmt: skip
        attend(piece)
        for query in range(piece.num_queries):
            row, group = first + query // groups, query % groups
            place = job[17] + size * dim * ((row * kv_heads + head) * groups + group)
            if piece.wide:
                _finish_wide(sums + 4 * query * dim, dim, totals + 4 * query, place)
            else:
                _finish(sums + 4 * query * dim, dim, totals + 4 * query, place)
