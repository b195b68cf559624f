"""How many float32 numbers one thread can multiply and add in a second if all are in registers: the peak."""

from __future__ import annotations

from time import perf_counter
from typing import Any

import numpy as np
from llvmlite import ir
from numba import njit, types

from precedent.target.cpu.kernel_code import FLOATS, LANES, LONG, Code, kernel, same

CHAINS = 12
"""Independent sums: enough to hide an instruction's latency, few enough for 16 registers."""

ROUNDS, STEPS = 50, 20_000
"""The fastest of so many rounds of some tens of microseconds: most of them are not interrupted."""


@kernel
def multiply_and_add(typing: Any, steps: Any, place: Any) -> Any:
    """Run `steps` times `CHAINS` fused multiply-adds on the two vectors at `place`; writes their sum behind them."""

    def generate(context: Any, builder: ir.IRBuilder, signature: Any, arguments: Any) -> Any:
        steps, place = arguments
        code = Code(builder)
        left, right = (code.load(place, ir.Constant(LONG, k), wide=True) for k in (0, LANES))
        starts = tuple(builder.fadd(left, same(FLOATS, float(number))) for number in range(CHAINS))
        with code.steps(steps, starts, by=1) as (_, sums, following):
            following.extend(code.fused(left, right, total) for total in sums)
        total = following[0]
        for other in following[1:]:
            total = builder.fadd(total, other)
        code.store_lanes(total, place, ir.Constant(LONG, 2 * LANES), wide=True)
        return context.get_dummy_value()

    return types.void(types.intp, types.intp), generate


@njit(nogil=True)
def run(steps: int, place: int) -> None:
    """Compiled code around the kernel."""
    multiply_and_add(steps, place)


def peak() -> float:
    """Multiplications (each with its addition) per second, of one thread."""
    memory = np.ones(3 * LANES, dtype=np.float32)
    run(1, memory.ctypes.data)
    times = []
    for _ in range(ROUNDS):
        started = perf_counter()
        run(STEPS, memory.ctypes.data)
        times.append(perf_counter() - started)
    return STEPS * CHAINS * LANES / min(times)


if __name__ == "__main__":
    print(f"{peak() / 1e9:.1f} billion multiplications a second and thread, in vectors of {LANES}")
