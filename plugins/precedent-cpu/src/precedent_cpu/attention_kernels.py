"""Machine code of the innermost loops of attention on a CPU: scores, the softmax of a row, and the weighted values.

As in `dot_kernels`, the order of every sum is fixed. It depends only on the keys that a row sees, so a row is
bit-identical whether its keys are in the KV cache or beside it, in a tree or alone.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from llvmlite import ir
from numba.core import cgutils, types

from precedent_cpu.kernel_code import FLOAT, FLOATS, INTS, LANES, LONG, Code, kernel, same

EXP_TERMS = (1.9875691500e-4, 1.3981999507e-3, 8.3334519073e-3, 4.1665795894e-2, 1.6666665459e-1, 5.0000001201e-1)
"""Coefficients of exp on [-ln 2 / 2, ln 2 / 2], highest power first (Cephes, `expf`)."""

LN2_HIGH, LN2_LOW, LOG2_E = 0.693359375, -2.12194440e-4, 1.44269504088896341

TO_WHOLE = 1.5 * 2**23
"""Adding it to a number below 2^22 rounds to a whole number, which then sits in the lowest bits of the sum."""

LOWEST = -87.0
"""exp of anything lower counts as 0 here: float32 has no normal number for it."""


def turn_kernel(*, whole: bool, wide: bool) -> Callable[..., None]:
    """A kernel that transposes `LANES` by `LANES` numbers: rows of float32 (`wide`) or bfloat16 into float32 columns.

    Called as `(rows, row_stride, count, columns, column_stride)`; unless `whole`, rows from `count` on become zeros.
    """

    @kernel
    def turn(typing: Any, places: Any) -> Any:
        def generate(context: Any, builder: ir.IRBuilder, signature: Any, arguments: Any) -> Any:
            rows, r_stride, count, columns, c_stride = cgutils.unpack_tuple(builder, arguments[0])
            code = Code(builder)
            zero, lanes = ir.Constant(LONG, 0), []
            for number in range(LANES):
                base = code.offset(rows, r_stride, number)
                lanes.append(
                    code.load(base, zero, wide=wide) if whole else _if_there(code, builder, base, number, count, wide)
                )
            for number, column in enumerate(turned_lanes(builder, lanes)):
                builder.store(column, code.vector(code.offset(columns, c_stride, number), zero, 4, FLOATS), align=4)
            return context.get_dummy_value()

        return types.void(types.UniTuple(types.intp, 5)), generate

    return turn


def score_kernel(queries: int) -> Callable[..., None]:
    """A kernel for the scores of `queries` queries with `LANES` keys, which are stored as columns.

    Called as `(columns, dim, queries, query_stride, scores, score_stride)`. Each score is summed from its first term to
    its last.
    """

    @kernel
    def score(typing: Any, places: Any) -> Any:
        def generate(context: Any, builder: ir.IRBuilder, signature: Any, arguments: Any) -> Any:
            columns, dim, asked, q_stride, scores, s_stride = cgutils.unpack_tuple(builder, arguments[0])
            code = Code(builder)
            with code.steps(dim, (same(FLOATS, 0.0),) * queries, by=1) as (d, sums, following):
                column = builder.add(columns, builder.mul(d, ir.Constant(LONG, 4 * LANES)))
                keys = code.load(column, ir.Constant(LONG, 0), wide=True)
                for query in range(queries):
                    place = code.vector(code.offset(asked, q_stride, query), d, 4, FLOAT)
                    following.append(code.fused(code.spread(builder.load(place, align=4)), keys, sums[query]))
            for query, total in enumerate(following):
                spot = code.vector(code.offset(scores, s_stride, query), ir.Constant(LONG, 0), 4, FLOATS)
                builder.store(total, spot, align=4)
            return context.get_dummy_value()

        return types.void(types.UniTuple(types.intp, 6)), generate

    return score


@kernel
def softmax(typing: Any, scores: Any, count: Any, total: Any) -> Any:
    """Replace `count` float32 scores (a multiple of `LANES`) by exp(score - maximum); writes their sum to `total`."""

    def generate(context: Any, builder: ir.IRBuilder, signature: Any, arguments: Any) -> Any:
        scores, count, total = arguments
        code = Code(builder)
        largest = code.spread(_largest(code, builder, scores, count))
        with code.steps(count, (same(FLOATS, 0.0),)) as (k, sums, following):
            weights = exponential(code, builder, builder.fsub(code.load(scores, k, wide=True), largest))
            builder.store(weights, code.vector(scores, k, 4, FLOATS), align=4)
            following.append(builder.fadd(sums[0], weights))
        code.store(code.across(following[0]), total)
        return context.get_dummy_value()

    return types.void(types.intp, types.intp, types.intp), generate


@kernel
def cap(typing: Any, scores: Any, count: Any, limit: Any) -> Any:
    """Replace `count` float32 scores (a multiple of `LANES`) by limit * tanh(score / limit), as Gemma 2 does."""

    def generate(context: Any, builder: ir.IRBuilder, signature: Any, arguments: Any) -> Any:
        scores, count, limit = arguments
        code, one = Code(builder), same(FLOATS, 1.0)
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
        return context.get_dummy_value()

    return types.void(types.intp, types.intp, types.float64), generate


def blend_kernel(queries: int, vectors: int) -> Callable[..., None]:
    """A kernel that adds weighted values to `queries` rows of `vectors * LANES` float32 numbers.

    Called as `(values, value_stride, count, weights, weight_stride, sums, sum_stride)`; strides in bytes.
    """

    @kernel
    def blend(typing: Any, places: Any) -> Any:
        def generate(context: Any, builder: ir.IRBuilder, signature: Any, arguments: Any) -> Any:
            values, v_stride, count, weights, w_stride, sums, s_stride = cgutils.unpack_tuple(builder, arguments[0])
            code = Code(builder)
            spots = [
                code.vector(code.offset(sums, s_stride, query), ir.Constant(LONG, v * LANES), 4, FLOATS)
                for query in range(queries)
                for v in range(vectors)
            ]
            starts = tuple(builder.load(spot, align=4) for spot in spots)
            with code.steps(count, starts, by=1) as (j, carried, following):
                row = builder.add(values, builder.mul(j, v_stride))
                spread = []
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
            return context.get_dummy_value()

        return types.void(types.UniTuple(types.intp, 7)), generate

    return blend


def finish_kernel(*, wide: bool, wide_outputs: bool | None = None) -> Callable[..., None]:
    """A kernel `(sums, count, total, outputs)`: `count` sums over the number at `total`, as float32 or bfloat16.

    With `wide_outputs`, values are still rounded to the model's dtype but written as float32.
    """

    @kernel
    def finish(typing: Any, sums: Any, count: Any, total: Any, outputs: Any) -> Any:
        def generate(context: Any, builder: ir.IRBuilder, signature: Any, arguments: Any) -> Any:
            sums, count, total, outputs = arguments
            code = Code(builder)
            divisor = builder.load(builder.inttoptr(total, FLOAT.as_pointer()), align=4)
            scale = code.spread(builder.fdiv(ir.Constant(FLOAT, 1.0), divisor))
            with code.steps(count, ()) as (k, _, _):
                scaled = code.rounded(builder.fmul(code.load(sums, k, wide=True), scale), wide)
                code.store_lanes(scaled, outputs, k, wide if wide_outputs is None else wide_outputs)
            return context.get_dummy_value()

        return types.void(*[types.intp] * 4), generate

    return finish


@kernel
def read_long(typing: Any, place: Any) -> Any:
    """The 64-bit integer at an address."""

    def generate(context: Any, builder: ir.IRBuilder, signature: Any, arguments: Any) -> Any:
        return builder.load(builder.inttoptr(arguments[0], LONG.as_pointer()), align=2)

    return types.intp(types.intp), generate


@kernel
def write_long(typing: Any, place: Any, number: Any) -> Any:
    """Write a 64-bit integer to an address."""

    def generate(context: Any, builder: ir.IRBuilder, signature: Any, arguments: Any) -> Any:
        builder.store(arguments[1], builder.inttoptr(arguments[0], LONG.as_pointer()), align=2)
        return context.get_dummy_value()

    return types.void(types.intp, types.intp), generate


@kernel
def write_float(typing: Any, place: Any, number: Any) -> Any:
    """Write a float32 to an address."""

    def generate(context: Any, builder: ir.IRBuilder, signature: Any, arguments: Any) -> Any:
        builder.store(arguments[1], builder.inttoptr(arguments[0], FLOAT.as_pointer()), align=4)
        return context.get_dummy_value()

    return types.void(types.intp, types.float32), generate


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


def _if_there(code: Code, builder: ir.IRBuilder, base: Any, number: int, count: Any, wide: bool) -> Any:
    """The numbers at `base`, or zeros if row `number` does not exist."""
    before = builder.block
    there, end = builder.append_basic_block("there"), builder.append_basic_block("end")
    builder.cbranch(builder.icmp_signed("<", ir.Constant(LONG, number), count), there, end)
    builder.position_at_end(there)
    found = code.load(base, ir.Constant(LONG, 0), wide=wide)
    builder.branch(end)
    builder.position_at_end(end)
    row = builder.phi(FLOATS)
    row.add_incoming(same(FLOATS, 0.0), before)
    row.add_incoming(found, there)
    return row


def turned_lanes(builder: ir.IRBuilder, lanes: list[Any]) -> list[Any]:
    """A transposed square of lanes: swaps off-diagonal blocks of halving size (Eklundh 1972)."""
    half = LANES // 2
    while half:
        for number in range(LANES):
            if not number & half:
                lanes[number], lanes[number + half] = _swapped(builder, lanes[number], lanes[number + half], half)
        half //= 2
    return lanes


def _swapped(builder: ir.IRBuilder, upper: Any, lower: Any, half: int) -> tuple[Any, Any]:
    """Two rows, with their off-diagonal blocks of `half` lanes swapped."""
    kind = ir.VectorType(ir.IntType(32), LANES)
    above = [lane if not lane & half else LANES + lane - half for lane in range(LANES)]
    below = [lane + half if not lane & half else LANES + lane for lane in range(LANES)]
    return (
        builder.shuffle_vector(upper, lower, ir.Constant(kind, above)),
        builder.shuffle_vector(upper, lower, ir.Constant(kind, below)),
    )
