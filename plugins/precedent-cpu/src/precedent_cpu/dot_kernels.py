"""Machine code of the innermost loops of a layer on a CPU: dot products and root-mean-square norms.

The order of every sum is fixed (`kernel_code`), so a row is bit-identical however many rows are computed with it.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, cast

from llvmlite import ir
from numba.core import cgutils, types
from numba.extending import intrinsic

from precedent_cpu.kernel_code import FLOAT, LANES, LONG, Ahead, Code, kernel

Places = tuple[int, int, int, int, int, int, int, int]
"""Addresses and strides in bytes: weights, stride of their rows; inputs, stride of their rows; numbers per row (a
multiple of `LANES`); float32 biases (0: none); outputs, stride of their rows."""

Fetched = tuple[int, int, int, int]
"""What a kernel prefetches into the L1 cache, then what into the L2 cache: an address, and the bytes by which it moves
on with every `LANES` numbers."""


def dot_block(outs: int, rows: int, *, wide: bool) -> Callable[[Places, Fetched], None]:
    """A kernel for `outs` rows of weights and `rows` rows of inputs, called from compiled code.

    Weights and outputs are float32 if `wide`, else bfloat16; inputs are float32. Bias and rounding are applied once, at
    the end.
    """

    @intrinsic
    def block(typing: Any, places: Any, ahead: Any) -> Any:
        def generate(context: Any, builder: ir.IRBuilder, signature: Any, arguments: Any) -> Any:
            code = Code(builder)
            weights, w_bytes, inputs, x_bytes, length, biases, outputs, y_bytes = cgutils.unpack_tuple(
                builder, arguments[0]
            )
            near, near_step, far, far_step = cgutils.unpack_tuple(builder, arguments[1])
            fetched = (Ahead(near, near_step, nearest=True), Ahead(far, far_step, nearest=False))
            w_rows = [code.offset(weights, w_bytes, out) for out in range(outs)]
            x_rows = [code.offset(inputs, x_bytes, row) for row in range(rows)]
            sums = code.dots(w_rows, x_rows, length, wide, fetched)
            together = max(1, LANES // outs)  # rows whose sums fill a register
            for first in range(0, rows, together):
                count = min(together, rows - first)
                totals = code.totals(sums[first * outs : (first + count) * outs])
                stored = code.with_biases(totals, biases, outs)
                stored = stored if wide else code.halves(stored)
                for row in range(count):
                    code.store_some(stored, row * outs, outs, code.offset(outputs, y_bytes, first + row))
            return context.get_dummy_value()

        return types.void(types.UniTuple(types.intp, 8), types.UniTuple(types.intp, 4)), generate

    return cast(Callable[[Places, Fetched], None], block)


def norm_kernel(*, wide: bool, wide_outputs: bool | None = None) -> Callable[..., None]:
    """A kernel for one row of a root-mean-square norm, `(inputs, weights, length, epsilon, offset, outputs)`.

    It computes in float32 as transformers' models do. With an `offset` of 0 (Llama), bfloat16 is rounded before and
    after the multiplication by the weight. Any other (1 for Gemma) is added to the weight, and bfloat16 is rounded
    once, at the end. With `wide_outputs`, the rounded result is still written as float32.
    """

    @intrinsic
    def norm(typing: Any, inputs: Any, weights: Any, length: Any, epsilon: Any, offset: Any, outputs: Any) -> Any:
        def generate(context: Any, builder: ir.IRBuilder, signature: Any, arguments: Any) -> Any:
            inputs, weights, length, epsilon, offset, outputs = arguments
            code = Code(builder)
            scale = code.spread(code.inverse_root(code.squares(inputs, length, wide), length, epsilon))
            added = code.spread(builder.fptrunc(offset, FLOAT))
            rounded_twice = builder.fcmp_ordered("==", offset, ir.Constant(offset.type, 0.0))
            with code.steps(length, ()) as (k, _, _):
                scaled = builder.fmul(code.load(inputs, k, wide=wide), scale)
                scaled = builder.select(rounded_twice, code.rounded(scaled, wide), scaled)
                weight = builder.fadd(code.load(weights, k, wide=wide), added)
                normed = code.rounded(builder.fmul(scaled, weight), wide)
                code.store_lanes(normed, outputs, k, wide if wide_outputs is None else wide_outputs)
            return context.get_dummy_value()

        return types.void(types.intp, types.intp, types.intp, types.float64, types.float64, types.intp), generate

    return cast(Callable[..., None], norm)


def _copy_kernel(*, wide: bool) -> Callable[..., None]:
    """A kernel `(source, count, target)`: writes `count` numbers (a multiple of `LANES`) as float32."""

    @kernel
    def copy(typing: Any, source: Any, count: Any, target: Any) -> Any:
        def generate(context: Any, builder: ir.IRBuilder, signature: Any, arguments: Any) -> Any:
            source, count, target = arguments
            code = Code(builder)
            with code.steps(count, ()) as (k, _, _):
                code.store_lanes(code.load(source, k, wide=wide), target, k, wide=True)
            return context.get_dummy_value()

        return types.void(types.intp, types.intp, types.intp), generate

    return copy


@kernel
def take_ticket(typing: Any, counter: Any) -> Any:
    """Add one atomically to the 64-bit integer at `counter`; returns its previous value."""

    def generate(context: Any, builder: ir.IRBuilder, signature: Any, arguments: Any) -> Any:
        place = builder.inttoptr(arguments[0], LONG.as_pointer())
        return builder.atomic_rmw("add", place, ir.Constant(LONG, 1), "monotonic")

    return types.intp(types.intp), generate


widen, copy_floats = (_copy_kernel(wide=wide) for wide in (False, True))
"""Write bfloat16 (`widen`) or float32 (`copy_floats`) numbers as float32."""
