"""How attention on a CPU reads the keys and values of a piece: the prefix in its order, new ones by their columns.

Keys are transposed, `LANES` at a time; values are widened to float32.
"""

from __future__ import annotations

from typing import NamedTuple

from precedent.runtime.compiled import compiled
from precedent_cpu.attention_kernels import read_long, turn_kernel
from precedent_cpu.dot_kernels import copy_floats, widen
from precedent_cpu.kernel_code import LANES

VALUES = 2 * LANES
"""Values that are widened together, and added to a query's sums while those are in registers."""

_turn_narrow, _turn_wide = (turn_kernel(whole=True, wide=wide) for wide in (False, True))
_turn_some_narrow, _turn_some_wide = (turn_kernel(whole=False, wide=wide) for wide in (False, True))


class Piece(NamedTuple):
    """Some queries of one key/value head: addresses, strides in bytes, and counts.

    `scores` `[num_queries, width]`, `sums` `[num_queries, dim]` and `totals` `[num_queries]` are float32 and belong to
    this thread, as does `block`, room for twice `LANES` widened rows. Query i belongs to row `first + i // groups`.
    `starts`, `columns` and `hidden` are the arrays of the rows' `Sight`; `keys`, `values` and `prefix` begin after the
    keys that it skips. `softcap` limits the scores (0: it does not).
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
    return read_long(place), read_long(place + 8)


@compiled
def widened(piece: Piece, first: int, count: int) -> tuple[int, int]:
    """Address and stride of some rows of values as float32: in place, or copied to `block`."""
    source, stride = piece.values + first * piece.value_stride, piece.value_stride
    if piece.wide:
        return source, stride
    for row in range(count):
        widen(source + row * stride, piece.dim, piece.block + 4 * row * piece.dim)
    return piece.block, 4 * piece.dim


@compiled
def columns(piece: Piece, first: int, count: int) -> int:
    """Transpose `count` keys from `first` on into columns in `block`; returns its address."""
    size = 4 if piece.wide else 2
    for d in range(0, piece.dim, LANES):
        rows = piece.keys + first * piece.key_stride + d * size
        _turn(piece.wide, (rows, piece.key_stride, count, piece.block + 4 * d * LANES, 4 * LANES))
    return piece.block


@compiled
def _turn(wide: bool, places: tuple[int, int, int, int, int]) -> None:
    """Transpose a square of numbers, whole or with as many rows as there are."""
    if wide and places[2] == LANES:
        _turn_wide(places)
    elif wide:
        _turn_some_wide(places)
    elif places[2] == LANES:
        _turn_narrow(places)
    else:
        _turn_some_narrow(places)


@compiled
def gather(piece: Piece, rows: int, stride: int, start: int, count: int, target: int) -> None:
    """Copy the new keys or values named by `count` columns from `start` on, as float32."""
    for number in range(count):
        row = rows + (piece.prefix + read_long(piece.columns + 8 * (start + number))) * stride
        if piece.wide:
            copy_floats(row, piece.dim, target + 4 * number * piece.dim)
        else:
            widen(row, piece.dim, target + 4 * number * piece.dim)


@compiled
def own_columns(piece: Piece, start: int, count: int) -> int:
    """Transpose the new keys named by `count` columns from `start` on; returns the address of the result."""
    gathered = piece.block + 4 * LANES * piece.dim
    gather(piece, piece.keys, piece.key_stride, start, count, gathered)
    for d in range(0, piece.dim, LANES):
        _turn(True, (gathered + 4 * d, 4 * piece.dim, count, piece.block + 4 * d * LANES, 4 * LANES))
    return piece.block
