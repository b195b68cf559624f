"""The product of some rows with bfloat16 weights on a processor's matrix unit, built from `tile_kernels`."""

from __future__ import annotations

from precedent.runtime.compiled import compiled
from precedent_cpu.attention_kernels import turn_kernel
from precedent_cpu.dot_kernels import Places
from precedent_cpu.product_pieces import product_piece
from precedent_cpu.tile_kernels import (
    BANDS,
    COLUMNS,
    DEPTH,
    TILE,
    TILE_BYTES,
    finish_tile,
    pack_tile,
    tile_block,
)

SUMS_BYTES = (BANDS * COLUMNS + 1) * TILE_BYTES
"""Bytes that a thread needs beside its packed inputs: the sums of a block, and room to transpose one tile of them."""

_one_by_one, _one_by_two, _two_by_one, _two_by_two = (
    tile_block(bands, columns) for bands in (1, BANDS) for columns in (1, COLUMNS)
)
_turn = turn_kernel(whole=True, wide=True)


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
    """Sums of some outputs of some rows."""
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
    _turn((sums + number * TILE_BYTES, 4 * TILE, TILE, turned, 4 * TILE))
    biases = at[5] + 4 * out if at[5] else 0
    for each in range(min(TILE, rows - row)):
        finish_tile(turned + 4 * TILE * each, biases, at[6] + (row + each) * at[7] + 2 * out)
