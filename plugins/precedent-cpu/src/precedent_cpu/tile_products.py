"""Products of some rows with bfloat16 weights on a processor's matrix unit (Intel AMX).

One instruction multiplies 32 numbers of 16 rows of weights with those of 16 rows of inputs, so for up to some dozens of
rows a product takes as long as reading its weights. Weights are read in place. Inputs are packed: pairs of numbers of
16 rows side by side. Each output is summed in float32, pair after pair from first to last, whatever rows are beside it
(Intel, Architecture Instruction Set Extensions, TDPBF16PS).
"""

from __future__ import annotations

import ctypes
import sys
from collections.abc import Callable
from functools import cache
from typing import Any

from llvmlite import ir
from numba.core import cgutils, types

from precedent.runtime.compiled import compiled
from precedent.runtime.instructions import FEATURES
from precedent_cpu.kernel_code import CACHE_LINE, FLOATS, INT, LANES, LONG, Code, Emit, kernel, turn, turned_lanes
from precedent_cpu.product_kernels import Places, product_piece

TILE = 16
"""Rows in a tile of weights, inputs or outputs."""

DEPTH = 32
"""Numbers of each row that one instruction multiplies."""

TILE_BYTES = 1024
"""Bytes of a full tile."""

BANDS = COLUMNS = 2
"""Tiles of weights and of inputs per kernel call: with their products they fill the unit's eight tiles."""

AHEAD = 4
"""How many instructions ahead weights are prefetched."""

_ARCH_PRCTL, _REQUEST_PERMISSION, _TILE_DATA = 158, 0x1023, 18
"""Linux on x86-64: the system call by which a process requests the matrix unit."""

_PRESENT = bool(FEATURES.get("amx-bf16") and FEATURES.get("amx-tile")) and LANES == TILE

_BYTE = ir.IntType(8)
_POINTER = _BYTE.as_pointer()
_LINE = ir.Constant(LONG, CACHE_LINE)


def tile_kernel(*kinds: Any, present: bool = _PRESENT) -> Callable[[Emit], Callable[..., Any]]:
    """`kernel`; emits no instructions on processors without the unit, for which the compiler does not know them."""
    return lambda emit: kernel(*kinds)(emit if present else lambda code, *arguments: None)


@cache
def tiles_at_hand() -> bool:
    """Whether this processor has the unit and the operating system lets this process use it."""
    if not (_PRESENT and sys.platform == "linux"):
        return False
    return bool(ctypes.CDLL(None).syscall(_ARCH_PRCTL, _REQUEST_PERMISSION, _TILE_DATA) == 0)


@tile_kernel()
def open_tiles(code: Code) -> None:
    """Configure the current thread's unit for full tiles; their contents are lost."""
    configure_tiles(code.builder, [(TILE, CACHE_LINE)] * 8)


@tile_kernel(present=bool(FEATURES.get("amx-tile")))
def close_tiles(code: Code) -> None:
    """Release the unit: other code on this thread configures it for itself."""
    tile_call(code.builder, "tilerelease", ())


def configure_tiles(builder: ir.IRBuilder, shapes: list[tuple[int, int]]) -> None:
    """Give the eight tiles so many rows, and bytes in each; their contents are lost."""
    widths = [byte for _, width in shapes for byte in (width, 0)]
    palette = [1] + 15 * [0] + widths + 16 * [0] + [rows for rows, _ in shapes] + 8 * [0]
    kind = ir.ArrayType(_BYTE, len(palette))
    place = cgutils.alloca_once(builder, kind)
    builder.store(ir.Constant(kind, palette), place)
    tile_call(builder, "ldtilecfg", (builder.bitcast(place, _POINTER),))


@tile_kernel(types.UniTuple(types.intp, 4))
def pack_tile(code: Code, places: Any) -> None:
    """Write `DEPTH` numbers of `count` rows as a tile of inputs, `(rows, row_stride, count, tile)`; strides in bytes.

    The rows are float32 and rounded to bfloat16. The last row is repeated to fill `TILE` rows.
    """
    (rows, stride, count, tile), builder, lanes = places, code.builder, []
    last = builder.sub(count, ir.Constant(LONG, 1))
    for number in range(TILE):
        wanted = ir.Constant(LONG, number)
        row = builder.select(builder.icmp_signed("<", wanted, last), wanted, last)
        lanes.append(_pairs(code, builder, builder.add(rows, builder.mul(row, stride))))
    for number, pairs in enumerate(turned_lanes(builder, lanes)):
        place = builder.add(tile, ir.Constant(LONG, number * CACHE_LINE))
        builder.store(pairs, builder.inttoptr(place, FLOATS.as_pointer()), align=4)


def tile_block(bands: int, columns: int) -> Callable[[tuple[int, int, int, int, int, int]], None]:
    """A kernel for `bands` tiles of outputs and `columns` tiles of inputs, called from compiled code.

    Called as `(weights, w_stride, inputs, inputs_stride, length, sums)`: strides in bytes, between rows of weights and
    between columns of packed inputs. `sums` `[bands, columns, TILE outputs, TILE rows]` are float32.
    """

    @tile_kernel(types.UniTuple(types.intp, 6))
    def block(code: Code, places: Any) -> None:
        (weights, w_stride, inputs, x_stride, length, sums), builder = places, code.builder
        totals = [(band, column, band * columns + column) for band in range(bands) for column in range(columns)]
        of_weights, of_inputs = BANDS * COLUMNS, BANDS * COLUMNS + BANDS
        w_rows = [code.offset(weights, w_stride, TILE * band) for band in range(bands)]
        x_tiles = [code.offset(inputs, x_stride, column) for column in range(columns)]
        for *_, total in totals:
            tile_call(builder, "tilezero", (tile_number(total),))
        with code.steps(length, (), by=DEPTH) as (k, _, _):
            step = builder.mul(k, ir.Constant(LONG, TILE_BYTES // DEPTH))
            _fetch_rows(code, builder, weights, w_stride, TILE * bands, k, length)
            for band, rows in enumerate(w_rows):
                place = builder.add(rows, builder.mul(k, ir.Constant(LONG, 2)))
                move_tile(builder, "load", of_weights + band, place, w_stride)
            for column, tiles in enumerate(x_tiles):
                move_tile(builder, "load", of_inputs + column, builder.add(tiles, step), _LINE)
            for band, column, total in totals:
                operands = tile_number(total), tile_number(of_weights + band), tile_number(of_inputs + column)
                tile_call(builder, "tdpbf16ps", operands)
        for *_, total in totals:
            move_tile(builder, "store", total, builder.add(sums, ir.Constant(LONG, total * TILE_BYTES)), _LINE)

    return block


@tile_kernel(*[types.intp] * 3)
def finish_tile(code: Code, sums: Any, biases: Any, outputs: Any) -> None:
    """Write one row's sums of `TILE` outputs, plus their biases (0: none), rounded to bfloat16."""
    totals = code.with_biases(code.load(sums, ir.Constant(LONG, 0), wide=True), biases, TILE)
    code.store_lanes(totals, outputs, ir.Constant(LONG, 0), wide=False)


def _fetch_rows(code: Code, builder: ir.IRBuilder, rows: Any, stride: Any, count: int, k: Any, length: Any) -> None:
    """Prefetch a line of each of `count` rows, `AHEAD` steps early; near their end, a line of the rows that follow."""
    ahead = builder.add(k, ir.Constant(LONG, AHEAD * DEPTH))
    over = builder.icmp_signed(">=", ahead, length)
    place = builder.mul(builder.select(over, builder.sub(ahead, length), ahead), ir.Constant(LONG, 2))
    start = builder.add(builder.select(over, code.offset(rows, stride, count), rows), place)
    for number in range(count):
        code.fetch(code.offset(start, stride, number), CACHE_LINE)


def _pairs(code: Code, builder: ir.IRBuilder, row: Any) -> Any:
    """`DEPTH` numbers of a row as bfloat16, two in each lane."""
    left, right = (code.halves(code.load(row, ir.Constant(LONG, k), wide=True)) for k in (0, LANES))
    every = ir.Constant(ir.VectorType(INT, DEPTH), list(range(DEPTH)))
    return builder.bitcast(builder.shuffle_vector(left, right, every), FLOATS)


def move_tile(builder: ir.IRBuilder, way: str, tile: int, place: Any, stride: Any) -> None:
    """Load a tile from memory, or store it there (`way`)."""
    name = {"load": "tileloadd64", "store": "tilestored64"}[way]
    tile_call(builder, name, (tile_number(tile), builder.inttoptr(place, _POINTER), stride))


def tile_number(number: int) -> Any:
    """A tile as an argument of an instruction."""
    return ir.Constant(_BYTE, number)


def tile_call(builder: ir.IRBuilder, name: str, arguments: tuple[Any, ...]) -> None:
    """Emit one of the unit's instructions, by the name that LLVM has for it."""
    kind = ir.FunctionType(ir.VoidType(), [argument.type for argument in arguments])
    builder.call(cgutils.get_or_insert_function(builder.module, kind, f"llvm.x86.{name}"), arguments)


SUMS_BYTES = (BANDS * COLUMNS + 1) * TILE_BYTES
"""Bytes that a thread needs beside its packed inputs: the sums of a block, and room to transpose one tile of them."""

_one_by_one, _one_by_two, _two_by_one, _two_by_two = (
    tile_block(bands, columns) for bands in (1, BANDS) for columns in (1, COLUMNS)
)


def tile_room(rows: int, length: int) -> int:
    """Bytes that a thread needs for inputs `[rows, length]` and for sums."""
    return SUMS_BYTES + -(-rows // TILE) * (length // DEPTH) * TILE_BYTES


@compiled
def pack_inputs(inputs: int, stride: int, length: int, rows: int, room: int) -> None:
    """Pack float32 inputs as tiles into a thread's room, sixteen rows at a time."""
    place = room + SUMS_BYTES
    for row in range(0, rows, TILE):
        for k in range(0, length, DEPTH):
            pack_tile((inputs + row * stride + 4 * k, stride, min(TILE, rows - row), place))
            place += TILE_BYTES


@compiled
def piece_by_tiles(at: Places, rows: int, first: int, last: int, room: int) -> None:
    """Outputs `first` to `last` of every input row: whole tiles on the matrix unit, the rest on the vector unit."""
    whole = first + (last - first) // TILE * TILE
    tiles_piece(at, rows, first, whole, room)
    product_piece(at, rows, whole, last, False)


@compiled
def tiles_piece(at: Places, rows: int, first: int, last: int, room: int) -> None:
    """Outputs `first` to `last` (whole tiles) of every input row; the inputs are packed in the thread's `room`."""
    column_bytes = at[4] // DEPTH * TILE_BYTES
    for out in range(first, last, BANDS * TILE):
        bands = min(BANDS, (last - out) // TILE)
        for row in range(0, rows, COLUMNS * TILE):
            columns = min(COLUMNS, (rows - row + TILE - 1) // TILE)
            inputs = room + SUMS_BYTES + row // TILE * column_bytes
            _block(bands, columns, (at[0] + out * at[1], at[1], inputs, column_bytes, at[4], room))
            for number in range(bands * columns):
                _write(at, rows, out + number // columns * TILE, row + number % columns * TILE, room, number)


@compiled
def _block(bands: int, columns: int, places: tuple[int, int, int, int, int, int]) -> None:
    if bands == 1 and columns == 1:
        _one_by_one(places)
    elif bands == 1:
        _one_by_two(places)
    elif columns == 1:
        _two_by_one(places)
    else:
        _two_by_two(places)


@compiled
def _write(at: Places, rows: int, out: int, row: int, sums: int, number: int) -> None:
    """Write one tile of sums to the outputs of its rows."""
    turned = sums + BANDS * COLUMNS * TILE_BYTES
    turn(True, (sums + number * TILE_BYTES, 4 * TILE, TILE, turned, 4 * TILE))
    biases = at[5] + 4 * out if at[5] else 0
    for each in range(min(TILE, rows - row)):
        finish_tile(turned + 4 * TILE * each, biases, at[6] + (row + each) * at[7] + 2 * out)
