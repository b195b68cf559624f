"""Machine code for the steps of a decoder layer between its products: rotary embedding, gate, residual sum, barrier.

Every number is rounded where transformers' own modules round it, so a fused layer gives the same result as its modules
do one by one.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from llvmlite import ir
from numba.core import types

from precedent_cpu.attention_kernels import exponential
from precedent_cpu.kernel_code import FLOAT, FLOATS, LONG, Code, kernel, same

MOST_SQUARE = 2.0**60
"""Squares of gates are at most this, far beyond where the sigmoid is 0 or 1."""


def turned_head_kernel(*, wide: bool, as_query: bool) -> Callable[..., None]:
    """A kernel that applies rotary embeddings to one head (Su et al. 2104.09864, halves as in GPT-NeoX).

    Called as `(numbers, cosines, sines, dim, scale, target)`. A query is multiplied by `scale` and written as float32;
    a key is written in the model's dtype.
    """

    @kernel
    def turned(typing: Any, numbers: Any, cosines: Any, sines: Any, dim: Any, scale: Any, target: Any) -> Any:
        def generate(context: Any, builder: ir.IRBuilder, signature: Any, arguments: Any) -> Any:
            numbers, cosines, sines, dim, scale, target = arguments
            code = Code(builder)
            half, spread = builder.lshr(dim, ir.Constant(LONG, 1)), code.spread(builder.fptrunc(scale, FLOAT))
            with code.steps(half, ()) as (k, _, _):
                places = (k, builder.add(k, half))
                left, right = (code.load(numbers, place, wide=wide) for place in places)
                for place, straight, across in ((places[0], left, builder.fneg(right)), (places[1], right, left)):
                    kept = builder.fmul(straight, code.load(cosines, place, wide=wide))
                    turned = builder.fmul(across, code.load(sines, place, wide=wide))
                    total = code.rounded(builder.fadd(code.rounded(kept, wide), code.rounded(turned, wide)), wide)
                    number = builder.fmul(total, spread) if as_query else total
                    code.store_lanes(number, target, place, wide or as_query)
            return context.get_dummy_value()

        return types.void(*[types.intp] * 4, types.float64, types.intp), generate

    return turned


def gated_kernel(*, wide: bool) -> Callable[..., None]:
    """A kernel for a gated linear unit (Shazeer 2002.05202), `(gates, others, count, slope, cubic, outputs)`.

    Writes x * sigmoid(slope * x + cubic * x^3) times the other as float32, x being the gate. A slope of 1 is SiLU.
    """

    @kernel
    def gated(typing: Any, gates: Any, others: Any, count: Any, slope: Any, cubic: Any, outputs: Any) -> Any:
        def generate(context: Any, builder: ir.IRBuilder, signature: Any, arguments: Any) -> Any:
            gates, others, count, slope, cubic, outputs = arguments
            code = Code(builder)
            slopes, cubics = (code.spread(builder.fptrunc(number, FLOAT)) for number in (slope, cubic))
            with code.steps(count, ()) as (k, _, _):
                opened = _opened(code, builder, code.load(gates, k, wide=wide), slopes, cubics)
                opened = code.rounded(opened, wide)
                passed = builder.fmul(opened, code.load(others, k, wide=wide))
                code.store_lanes(code.rounded(passed, wide), outputs, k, wide=True)
            return context.get_dummy_value()

        return types.void(*[types.intp] * 3, *[types.float64] * 2, types.intp), generate

    return gated


def sum_kernel(*, wide: bool) -> Callable[..., None]:
    """A kernel `(left, right, count, outputs)`: their sum, all in the model's dtype."""

    @kernel
    def summed(typing: Any, left: Any, right: Any, count: Any, outputs: Any) -> Any:
        def generate(context: Any, builder: ir.IRBuilder, signature: Any, arguments: Any) -> Any:
            left, right, count, outputs = arguments
            code = Code(builder)
            with code.steps(count, ()) as (k, _, _):
                total = builder.fadd(code.load(left, k, wide=wide), code.load(right, k, wide=wide))
                code.store_lanes(total, outputs, k, wide)
            return context.get_dummy_value()

        return types.void(*[types.intp] * 4), generate

    return summed


@kernel
def wait_for_team(typing: Any, barrier: Any) -> Any:
    """Wait until every thread of the team gets here; `barrier` is the address of OpenMP's own function."""

    def generate(context: Any, builder: ir.IRBuilder, signature: Any, arguments: Any) -> Any:
        function = ir.FunctionType(ir.VoidType(), [])
        builder.call(builder.inttoptr(arguments[0], function.as_pointer()), ())
        return context.get_dummy_value()

    return types.void(types.intp), generate


def _opened(code: Code, builder: ir.IRBuilder, x: Any, slopes: Any, cubics: Any) -> Any:
    """Compute x / (1 + exp(-z)), z = slope * x + cubic * x^3; exp sees only numbers up to 0."""
    zero, one, most = same(FLOATS, 0.0), same(FLOATS, 1.0), same(FLOATS, MOST_SQUARE)
    square = builder.fmul(x, x)
    square = builder.select(builder.fcmp_ordered("<", square, most), square, most)  # 0 times infinity is not a number
    z = builder.fmul(x, code.fused(cubics, square, slopes))
    negative = builder.fcmp_ordered("<", x, zero)
    power = exponential(code, builder, builder.select(negative, z, builder.fneg(z)))
    above = builder.select(negative, builder.fmul(x, power), x)
    return builder.fdiv(above, builder.fadd(one, power))
