"""Attention of few rows over a shared prefix and over each other, on torch's own threads.

A row of a candidate tree must be bit-identical to the same row in plain decoding. So a row's keys are processed in
order, the prefix first and then its ancestors, wherever those are among the tree's rows, and the order of every sum
depends only on the keys that the row sees. A window hides the first of them: a hidden key's weight is 0, and every
other key keeps its lane in the sums, which its position alone decides.

Keys are transposed, `LANES` at a time; values are widened to float32.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np
import torch
from llvmlite import ir
from numba.core import types
from numpy.typing import NDArray
from torch import Tensor

from precedent.runtime.compiled import Int64s, compiled
from precedent_cpu.kernel_code import (
    FLOAT,
    FLOATS,
    INTS,
    LANES,
    LONG,
    Code,
    by_width,
    kernel,
    read_long,
    same,
    turn,
    widen,
    write_float,
)
from precedent_cpu.row_products import team

EXP_TERMS = (1.9875691500e-4, 1.3981999507e-3, 8.3334519073e-3, 4.1665795894e-2, 1.6666665459e-1, 5.0000001201e-1)
"""Coefficients of exp on [-ln 2 / 2, ln 2 / 2], highest power first (Cephes, `expf`)."""

LN2_HIGH, LN2_LOW, LOG2_E = 0.693359375, -2.12194440e-4, 1.44269504088896341

TO_WHOLE = 1.5 * 2**23
"""Adding it to a number below 2^22 rounds to a whole number, which then sits in the lowest bits of the sum."""

LOWEST = -87.0
"""exp of anything lower counts as 0 here: float32 has no normal number for it."""


def score_kernel(queries: int) -> Callable[..., None]:
    """A kernel for the scores of `queries` queries with `LANES` keys, which are stored as columns.

    Called as `(columns, dim, queries, query_stride, scores, score_stride)`. Each score is summed from its first term to
    its last.
    """

    @kernel(types.UniTuple(types.intp, 6))
    def score(code: Code, places: Any) -> None:
        (columns, dim, asked, q_stride, scores, s_stride), builder = places, code.builder
        with code.steps(dim, (same(FLOATS, 0.0),) * queries, by=1) as (d, sums, following):
            column = builder.add(columns, builder.mul(d, ir.Constant(LONG, 4 * LANES)))
            keys = code.load(column, ir.Constant(LONG, 0), wide=True)
            for query in range(queries):
                place = code.vector(code.offset(asked, q_stride, query), d, 4, FLOAT)
                following.append(code.fused(code.spread(builder.load(place, align=4)), keys, sums[query]))
        for query, total in enumerate(following):
            code.store_lanes(total, code.offset(scores, s_stride, query), ir.Constant(LONG, 0), wide=True)

    return score


@kernel(types.intp, types.intp, types.intp)
def softmax(code: Code, scores: Any, count: Any, total: Any) -> None:
    """Replace `count` float32 scores (a multiple of `LANES`) by exp(score - maximum); writes their sum to `total`."""
    builder = code.builder
    largest = code.spread(_largest(code, builder, scores, count))
    with code.steps(count, (same(FLOATS, 0.0),)) as (k, sums, following):
        weights = exponential(code, builder, builder.fsub(code.load(scores, k, wide=True), largest))
        code.store_lanes(weights, scores, k, wide=True)
        following.append(builder.fadd(sums[0], weights))
    code.store(code.across(following[0]), total)


@kernel(types.intp, types.intp, types.float64)
def cap(code: Code, scores: Any, count: Any, limit: Any) -> None:
    """Replace `count` float32 scores (a multiple of `LANES`) by limit * tanh(score / limit), as Gemma 2 does."""
    builder, one = code.builder, same(FLOATS, 1.0)
    limits = code.spread(builder.fptrunc(limit, FLOAT))
    twice = builder.fdiv(same(FLOATS, 2.0), limits)
    with code.steps(count, ()) as (k, _, _):
        score = code.load(scores, k, wide=True)
        negative = builder.fcmp_ordered("<", score, same(FLOATS, 0.0))
        lowered = builder.select(negative, score, builder.fneg(score))
        power = exponential(code, builder, builder.fmul(lowered, twice))
        size = builder.fdiv(builder.fsub(one, power), builder.fadd(one, power))
        capped = builder.fmul(limits, builder.select(negative, builder.fneg(size), size))
        code.store_lanes(capped, scores, k, wide=True)


def blend_kernel(queries: int, vectors: int) -> Callable[..., None]:
    """A kernel that adds weighted values to `queries` rows of `vectors * LANES` float32 numbers.

    Called as `(values, value_stride, count, weights, weight_stride, sums, sum_stride)`; strides in bytes.
    """

    @kernel(types.UniTuple(types.intp, 7))
    def blend(code: Code, places: Any) -> None:
        (values, v_stride, count, weights, w_stride, sums, s_stride), builder = places, code.builder
        spots = [
            code.vector(code.offset(sums, s_stride, query), ir.Constant(LONG, v * LANES), 4, FLOATS)
            for query in range(queries)
            for v in range(vectors)
        ]
        starts = tuple(builder.load(spot, align=4) for spot in spots)
        with code.steps(count, starts, by=1) as (j, carried, following):
            row, spread = builder.add(values, builder.mul(j, v_stride)), []
            for query in range(queries):
                place = code.vector(code.offset(weights, w_stride, query), j, 4, FLOAT)
                spread.append(code.spread(builder.load(place, align=4)))
            added = list(carried)
            for v in range(vectors):
                loaded = code.load(row, ir.Constant(LONG, v * LANES), wide=True)
                for number, weight in enumerate(spread):
                    at = number * vectors + v
                    added[at] = code.fused(weight, loaded, carried[at])
            following.extend(added)
        for spot, total in zip(spots, following, strict=True):
            builder.store(total, spot, align=4)

    return blend


@by_width(*[types.intp] * 4)
def finish(code: Code, sums: Any, count: Any, total: Any, outputs: Any, *, wide: bool) -> None:
    """`count` sums over the number at `total`, rounded to the model's dtype and written as float32."""
    builder = code.builder
    divisor = builder.load(builder.inttoptr(total, FLOAT.as_pointer()), align=4)
    scale = code.spread(builder.fdiv(ir.Constant(FLOAT, 1.0), divisor))
    with code.steps(count, ()) as (k, _, _):
        code.store_lanes(code.rounded(builder.fmul(code.load(sums, k, wide=True), scale), wide), outputs, k, wide=True)


def _largest(code: Code, builder: ir.IRBuilder, scores: Any, count: Any) -> Any:
    """The largest of all scores; NaN is skipped, because it shows in the weights."""
    with code.steps(count, (same(FLOATS, float("-inf")),)) as (k, carried, following):
        loaded = code.load(scores, k, wide=True)
        following.append(builder.select(builder.fcmp_ordered(">", loaded, carried[0]), loaded, carried[0]))
    return code.largest(following[0])


def exponential(code: Code, builder: ir.IRBuilder, x: Any) -> Any:
    """The exponential of numbers up to 0, to about one unit in the last place; 0 below `LOWEST`, NaN for NaN."""
    lowest = same(FLOATS, LOWEST)
    too_low = builder.fcmp_ordered("<", x, lowest)
    x = builder.select(too_low, lowest, x)
    shifted = code.fused(x, same(FLOATS, LOG2_E), same(FLOATS, TO_WHOLE))
    power = builder.fsub(shifted, same(FLOATS, TO_WHOLE))
    rest = code.fused(power, same(FLOATS, -LN2_HIGH), x)
    rest = code.fused(power, same(FLOATS, -LN2_LOW), rest)
    series = same(FLOATS, EXP_TERMS[0])
    for term in EXP_TERMS[1:]:
        series = code.fused(series, rest, same(FLOATS, term))
    series = builder.fadd(code.fused(series, builder.fmul(rest, rest), rest), same(FLOATS, 1.0))
    exponent = builder.shl(builder.bitcast(shifted, INTS), same(INTS, 23))  # only the bits of the power remain
    scale = builder.bitcast(builder.add(exponent, same(INTS, 127 << 23)), FLOATS)
    return builder.select(too_low, same(FLOATS, 0.0), builder.fmul(series, scale))


VALUES = 2 * LANES
"""Values that are widened together, and added to a query's sums while those are in registers."""


class Piece(NamedTuple):
    """Some queries of one key/value head: addresses, strides in bytes, and counts.

    `scores` `[num_queries, width]`, `sums` `[num_queries, dim]` and `totals` `[num_queries]` are float32 and belong to
    this thread, as does `block`, room for twice `LANES` widened rows. Query i belongs to row `first + i // groups`.
    `starts`, `columns` and `hidden` are the arrays of the rows' `Sight`; `keys`, `values` and `prefix` begin after the
    keys that it skips. `prefix` counts the first `shared` of the sequence's own rows, which all these queries see.
    `softcap` limits the scores (0: it does not).
    """

    queries: int
    first: int
    num_queries: int
    groups: int
    dim: int
    keys: int
    key_stride: int
    values: int
    value_stride: int
    prefix: int
    shared: int
    wide: bool
    width: int
    scores: int
    sums: int
    totals: int
    block: int
    starts: int
    columns: int
    hidden: int
    softcap: float


@compiled
def own(piece: Piece, query: int) -> tuple[int, int]:
    """Start and end, in the list of columns, of the new keys that a query sees."""
    place = piece.starts + 8 * (piece.first + query // piece.groups)
    return read_long(place) + piece.shared, read_long(place + 8)


@compiled
def widened(piece: Piece, first: int, count: int) -> tuple[int, int]:
    """Address and stride of some rows of values as float32: in place, or copied to `block`."""
    source, stride = piece.values + first * piece.value_stride, piece.value_stride
    if piece.wide:
        return source, stride
    for row in range(count):
        widen(False, source + row * stride, piece.dim, piece.block + 4 * row * piece.dim)
    return piece.block, 4 * piece.dim


@compiled
def columns(piece: Piece, first: int, count: int) -> int:
    """Transpose `count` keys from `first` on into columns in `block`; returns its address."""
    size = 4 if piece.wide else 2
    for d in range(0, piece.dim, LANES):
        rows = piece.keys + first * piece.key_stride + d * size
        turn(piece.wide, (rows, piece.key_stride, count, piece.block + 4 * d * LANES, 4 * LANES))
    return piece.block


@compiled
def gather(piece: Piece, rows: int, stride: int, start: int, count: int, target: int) -> None:
    """Copy the new keys or values named by `count` columns from `start` on, as float32."""
    before = piece.prefix - piece.shared
    for number in range(count):
        row = rows + (before + read_long(piece.columns + 8 * (start + number))) * stride
        widen(piece.wide, row, piece.dim, target + 4 * number * piece.dim)


@compiled
def own_columns(piece: Piece, start: int, count: int) -> int:
    """Transpose the new keys named by `count` columns from `start` on; returns the address of the result."""
    gathered = piece.block + 4 * LANES * piece.dim
    gather(piece, piece.keys, piece.key_stride, start, count, gathered)
    for d in range(0, piece.dim, LANES):
        turn(True, (gathered + 4 * d, 4 * piece.dim, count, piece.block + 4 * d * LANES, 4 * LANES))
    return piece.block


VECTORS = 4
"""Registers in one blend: a head's numbers must fill a multiple of them."""

QUERIES = 24
"""Queries computed together, approximately: their scores and sums stay in the processor's cache."""

_MOST = 4 if LANES == 16 else 3
"""Queries whose sums fill the registers in a blend, beside their weights and one value."""

_blend1, _blend2, _blend_most = (blend_kernel(queries, VECTORS) for queries in (1, 2, _MOST))
_score1, _score3, _score4, _score8 = (score_kernel(queries) for queries in (1, 3, 4, 8))


class Sight:
    """Which keys some rows see: the prefix, then `columns[starts[r]:starts[r + 1]]` for row r, in increasing order.

    No row sees the first `skipped` keys of the prefix, a multiple of `LANES`; row r does not see the next `hidden[r]`
    of its keys either. The rows are a `path` if each sees all before it.
    """

    def __init__(
        self, allowed: NDArray[np.bool_] | None, num_rows: int, skipped: int = 0, hidden: Int64s | None = None
    ) -> None:
        rows, columns = np.nonzero(np.eye(1, dtype=np.bool_) if allowed is None else allowed)
        self.starts: Int64s = np.searchsorted(rows, np.arange(num_rows + 1)).astype(np.int64)
        self.columns: Int64s = np.ascontiguousarray(columns, dtype=np.int64)
        self.most = int(np.diff(self.starts).max())
        self.path = len(self.columns) == num_rows * (num_rows + 1) // 2
        self.skipped = skipped
        self.hidden: Int64s = np.zeros(num_rows, dtype=np.int64) if hidden is None else hidden


def fits(query: Tensor, key: Tensor, value: Tensor) -> bool:
    """Whether `row_layer.row_attention` supports these on this machine."""
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
