"""Products of some rows with a weight in place: machine code, blocked for registers and caches.

Rows are multiplied with a chunk of weights in groups, as many rows as the registers have room for. Meanwhile the
weights that follow are prefetched. The order of every sum is fixed (`kernel_code`) and neither groups nor chunks change
it, so a row is bit-identical however many rows are computed with it.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from numba.core import types

from precedent.runtime.compiled import compiled
from precedent_cpu.kernel_code import LANES, Ahead, Code, by_width

Places = tuple[int, int, int, int, int, int, int, int]
"""Addresses and strides in bytes: weights, stride of their rows; inputs, stride of their rows; numbers per row (a
multiple of `LANES`); float32 biases (0: none); outputs, stride of their rows."""

Fetched = tuple[int, int, int, int]
"""What a kernel prefetches into the L1 cache, then what into the L2 cache: an address, and the bytes by which it moves
on with every `LANES` numbers."""


def dot_block(outs: int, rows: int) -> Callable[[bool, Places, Fetched], None]:
    """A kernel `(wide, places, ahead)` for `outs` rows of weights and `rows` rows of inputs."""

    @by_width(types.UniTuple(types.intp, 8), types.UniTuple(types.intp, 4))
    def block(code: Code, places: Any, ahead: Any, *, wide: bool) -> None:
        _dots(code, places, ahead, outs, rows, wide)

    return block


def _dots(code: Code, places: Any, ahead: Any, outs: int, rows: int, wide: bool) -> None:
    """Emit the products of `outs` rows of weights and `rows` rows of inputs.

    Weights and outputs are float32 if `wide`, else bfloat16; inputs are float32. Bias and rounding are applied once, at
    the end.
    """
    weights, w_bytes, inputs, x_bytes, length, biases, outputs, y_bytes = places
    near, near_step, far, far_step = ahead
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


PIECE = 64 if LANES == 16 else 48
"""Outputs that a thread takes at a time."""

TOGETHER, TOGETHER_IF_LONG, LONG_ROW = (8, 4, 1024) if LANES == 16 else (6, 4, 1024)
"""Rows of inputs per kernel call at most: each weight is widened once for all of them.

Longer rows than `LONG_ROW` go fewer at a time: they must stay in the L1 cache while the weights stream by.
"""

CHUNK = 1 << 14
"""Bytes of weights, approximately, that all groups of rows go through before the next ones are read."""

NEAR = 1 << 13
"""Bytes of a kernel call's weights, at most, that are prefetched into the L1 cache; more would push out the inputs."""

# As many sums as fill the registers (16, or 32 on AVX-512), beside the shorter side of a block and one more vector.
_OUTS = (0, 4, 4, 4, 4, 2, 2, 2, 2) if LANES == 16 else (0, 4, 4, 4, 3, 2, 2, 1, 1)
"""Outputs per kernel call, by its number of input rows."""

_WHOLE = 12
"""Outputs of a chunk are a multiple of this, and so of the outputs of a kernel call."""

_one_by_one = dot_block(1, 1)


@by_width(types.UniTuple(types.intp, 8), types.UniTuple(types.intp, 4), types.intp)
def _dot_blocks(code: Code, places: Any, ahead: Any, rows: Any, *, wide: bool) -> None:
    """`dot_block` of so many `rows`, up to `TOGETHER`, and of `_OUTS[rows]` rows of weights."""
    for count in code.cases(rows, TOGETHER):
        _dots(code, places, ahead, _OUTS[count], count, wide)


@compiled
def product_piece(at: Places, rows: int, first: int, last: int, wide: bool) -> None:
    """Outputs `first` to `last` of every input row."""
    together = TOGETHER if at[4] <= LONG_ROW else TOGETHER_IF_LONG
    groups = (rows + together - 1) // together
    chunk = max(1, last - first) if groups == 1 else max(1, CHUNK // at[1] // _WHOLE) * _WHOLE
    size = 4 if wide else 2
    for start in range(first, last, chunk):
        outs = min(chunk, last - start)
        chunk_at = _right(at, start, size)
        behind = chunk_at[0] + outs * at[1]
        for group in range(groups):
            row = rows * group // groups
            count = rows * (group + 1) // groups - row
            far = behind + group * outs * (at[1] // groups)
            _block(_below(chunk_at, row), count, outs, wide, far, groups)


@compiled
def _block(at: Places, rows: int, outs: int, wide: bool, far: int, groups: int) -> None:
    """Outputs 0 to `outs` of a group of rows; several `groups` share the fetching of as many outputs from `far` on."""
    size, each = 4 if wide else 2, _OUTS[rows]
    share, whole = at[1] // groups, outs // each * each
    near, step = each * at[1] <= NEAR, each * LANES * size
    for out in range(0, whole, each):
        here = _right(at, out, size)
        behind = here[0] + each * at[1]
        if groups == 1:
            ahead = (behind + each * at[1] if near else behind, step)
        else:
            ahead = (far + out * share, each * share * LANES // at[4])
        fetched = (behind if near else here[0], step if near else 0, *ahead)
        _dot_blocks(wide, here, fetched, rows)
    for out in range(whole, outs):
        here = _right(at, out, size)
        for row in range(rows):
            _one_by_one(wide, _below(here, row), (here[0], 0, here[0], 0))


@compiled
def _below(at: Places, rows: int) -> Places:
    """`at`, moved `rows` input rows down."""
    return (at[0], at[1], at[2] + rows * at[3], at[3], at[4], at[5], at[6] + rows * at[7], at[7])


@compiled
def _right(at: Places, out: int, size: int) -> Places:
    """`at`, moved `out` outputs to the right."""
    biases = at[5] + 4 * out if at[5] else 0
    return (at[0] + out * at[1], at[1], at[2], at[3], at[4], biases, at[6] + out * size, at[7])
