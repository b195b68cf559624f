"""Products of rows with a packed weight of 4 to 8 bits: bands of outputs, which threads take in turn.

Up to `TOGETHER` rows at a time are multiplied with the codes as they lie in memory. For more than some of these a
matrix unit, if there is one, reads the codes unpacked, a byte each, from the second cache.
"""

from __future__ import annotations

from functools import cache
from typing import Any, NamedTuple

from llvmlite import ir
from numba.core import types

from precedent.runtime.compiled import compiled, compiled_callback
from precedent_cpu.kernel_code import CACHE_LINE, Code, kernel, read_long
from precedent_cpu.quantised_kernels import (
    BLOCK,
    CHUNK,
    KINDS,
    OUTS,
    RECORD,
    SUMS_BYTES,
    TILE_ROWS,
    TILES,
    TOGETHER,
    Kind,
    add_floats,
    add_minima,
    copy_float,
    open_int8_tiles,
    product_by_tiles,
    product_rows,
    quantise,
    rest_of,
    unpack_codes,
    widen_scales,
)

FIELDS = (
    "entry", "base", "band_bytes", "outs", "blocks", "form", "scales", "minima", "scale_bytes",
    "super_scales", "super_minima", "blocks_of_scale", "codes", "code_bytes", "groups", "table", "offset",
    "bias", "tiles",
)  # fmt: skip
"""What a packed weight's int64 numbers say: where its bands are and how they lie.

`entry` is the function of `band_entry`, `base` the address of the first band. `scales`, `minima`, `super_scales`,
`super_minima` and `codes` are offsets within a band (`minima` 0: none). `form` numbers `SCALE_FORMATS`; there is one
scale for `blocks_of_scale` blocks, or `groups` for each block. `table` and `bias` are addresses (0: none).
"""

(
    _ENTRY, _BASE, _BAND_BYTES, _OUTS, _BLOCKS, _FORM, _SCALES, _MINIMA, _SCALE_BYTES,
    _SUPERS, _SUPER_MINIMA, _SHARED, _CODES, _CODE_BYTES, _GROUPS, _TABLE, _OFFSET, _BIAS, _TILES,
) = (8 * number for number in range(len(FIELDS)))  # fmt: skip


class Rows(NamedTuple):
    """Quantised rows and where their outputs go: addresses, and the bytes between two rows of each."""

    records: int
    record_stride: int
    num_rows: int
    outputs: int
    output_stride: int


FEW_ROWS = 64
"""Up to so many rows a thread computes one band at a time, and their records stay in the second cache."""

MOST_BANDS = 8 if TILES else 4
"""Bands of a piece for more rows, at most."""

_PANEL_BYTES = CHUNK * 2 * 4 * OUTS
"""Bytes of a chunk's scales as float32, at most."""

_BAND_ROOM = 2 * _PANEL_BYTES + (CHUNK + 1) * OUTS * BLOCK
"""Bytes of a chunk of a band: scales, minima, and levels with one block too many, which is read but not used."""

_OUTPUT_BYTES = 4 * OUTS * TILE_ROWS


def record_stride(inputs: int) -> int:
    """Bytes between two rows of records: the kernels read one record too many."""
    return (inputs // BLOCK + 1) * RECORD


def records_bytes(rows: int, inputs: int) -> int:
    """Bytes of the records of some rows, with those beyond the last that the kernels read."""
    return -(-rows // TILE_ROWS) * TILE_ROWS * record_stride(inputs)


def quantised_room(inputs: int) -> int:
    """Bytes that a thread needs for a weight of so many inputs: integer sums, a few outputs, scales, levels."""
    return max(4 * inputs, SUMS_BYTES + _OUTPUT_BYTES + MOST_BANDS * _BAND_ROOM + CACHE_LINE)


@compiled
def quantise_row(numbers: int, count: int, records: int) -> None:
    """Quantise `count` float32 numbers (whole blocks) to records."""
    quantise(numbers, count // BLOCK, records)


@compiled
def quantise_rest(numbers: int, count: int, records: int, others: int, room: int) -> None:
    """Quantise what `records` leave of `count` float32 numbers to `others`; `room` takes that many numbers."""
    rest_of(numbers, count // BLOCK, records, room)
    quantise(room, count // BLOCK, others)


@compiled
def bands_of(weight: int) -> int:
    """How many bands a weight has."""
    bands: int = (read_long(weight + _OUTS) + OUTS - 1) // OUTS
    return bands


@compiled
def band_place(weight: int, band: int) -> int:
    """The address of a band."""
    place: int = read_long(weight + _BASE) + band * read_long(weight + _BAND_BYTES)
    return place


@kernel(*[types.intp] * 11)
def _call_entry(code: Code, entry: Any, *arguments: Any) -> None:
    function = ir.FunctionType(ir.VoidType(), [argument.type for argument in arguments])
    code.builder.call(code.builder.inttoptr(entry, function.as_pointer()), arguments)


@compiled
def piece_bands(weight: int, num_rows: int) -> int:
    """How many bands a thread computes at a time: several for many rows, which are read once for all of them."""
    if num_rows <= FEW_ROWS:
        return 1
    bands: int = max(1, min(MOST_BANDS, bands_of(weight) // 8))
    return bands


@compiled
def pieces_of(weight: int, num_rows: int) -> int:
    """How many pieces of so many bands a product has."""
    together = piece_bands(weight, num_rows)
    pieces: int = (bands_of(weight) + together - 1) // together
    return pieces


@compiled
def piece_place(weight: int, piece: int, num_rows: int) -> int:
    """The address of the first band of a piece; 0 beyond the last."""
    return band_place(weight, piece * piece_bands(weight, num_rows)) if piece < pieces_of(weight, num_rows) else 0


@compiled
def piece_product(weight: int, piece: int, ahead: int, rows: Rows, room: int) -> None:
    """The outputs of one piece for every row; meanwhile prefetch the bands at `ahead` (0: none).

    `weight` is the address of its `FIELDS`. Rows of records beyond `num_rows`, up to a multiple of `TILE_ROWS`, are
    read, and one record after each row; `room` has `quantised_room` bytes and is not shared.
    """
    together = piece_bands(weight, rows.num_rows)
    band = piece * together
    _call_entry(
        read_long(weight + _ENTRY), weight, band, min(together, bands_of(weight) - band),
        ahead if ahead else band_place(weight, band), rows.records, rows.record_stride, rows.num_rows, rows.outputs,
        rows.output_stride, room,
    )  # fmt: skip


@cache
def band_entry(kind: Kind) -> int:
    """The address of a function that computes a band of this kind: compiled (or read from disk) at first use.

    Each kind has a function of its own, called by address: a model needs few of them, and whatever calls them is not
    compiled together with them.
    """
    entry = _entry_of(KINDS.index(kind))
    _entries.append(entry)
    address: int = entry.address
    return address


_entries: list[Any] = []


def _entry_of(number: int) -> Any:
    def bands_of_kind(weight, band, bands, ahead, records, record_stride, count, outputs, output_stride, room):  # type: ignore[no-untyped-def]
        rows = Rows(records, record_stride, count, outputs, output_stride)
        blocks, table, offset = read_long(weight + _BLOCKS), read_long(weight + _TABLE), read_long(weight + _OFFSET)
        form, size, shared = read_long(weight + _FORM), read_long(weight + _SCALE_BYTES), read_long(weight + _SHARED)
        minima, per_block = read_long(weight + _MINIMA), read_long(weight + _GROUPS)
        tiles = read_long(weight + _TILES) != 0 and count > 2 * TOGETHER // per_block
        block_bytes = read_long(weight + _CODE_BYTES) // blocks
        first_room = (room + SUMS_BYTES + _OUTPUT_BYTES + CACHE_LINE - 1) // CACHE_LINE * CACHE_LINE
        together = TILE_ROWS if tiles else TOGETHER
        share = read_long(weight + _BAND_BYTES) // ((count + together - 1) // together * blocks)
        following, scale_step = ahead, size * per_block // shared
        if tiles:
            open_int8_tiles(number)
        for start in range(0, blocks, CHUNK):
            some = min(CHUNK, blocks - start)
            first_scale = start * per_block if per_block > 1 else start // shared
            num_scales = some * per_block if per_block > 1 else (some + shared - 1) // shared
            for each in range(bands):
                here, panel = band_place(weight, band + each), first_room + each * _BAND_ROOM
                for part in range(2 if minima else 1):
                    source = here + (minima if part else read_long(weight + _SCALES)) + first_scale * size
                    supers = here + read_long(weight + (_SUPER_MINIMA if part else _SUPERS)) + start // 8 * 2 * OUTS
                    place = panel + part * _PANEL_BYTES
                    widen_scales(number, form, source, size, supers, num_scales, shared, place)
                if tiles:
                    codes = here + read_long(weight + _CODES) + start * block_bytes
                    unpack_codes(number, codes, some, table, offset, panel + 2 * _PANEL_BYTES)
            row = 0
            while row < count:
                width = min(together, count - row)
                by_tiles = tiles and width > TOGETHER
                inputs = records + row * record_stride + start * RECORD
                for each in range(bands):
                    panel = first_room + each * _BAND_ROOM
                    narrow = by_tiles and width < TILE_ROWS
                    target, stride = _target(weight, band + each, rows, row, width, start, narrow, room)
                    for other in range(0, width if minima else 0, TOGETHER):
                        add_minima(
                            number,
                            min(TOGETHER, width - other),
                            (panel + _PANEL_BYTES, some, inputs + other * record_stride, record_stride,
                             target + other * stride, stride, start),
                        )  # fmt: skip
                    begun = start + minima
                    if by_tiles:
                        levels = panel + 2 * _PANEL_BYTES
                        of_tiles = (
                            levels, some, panel, inputs, record_stride, target, stride, begun, room, ahead, share,
                        )  # fmt: skip
                        product_by_tiles(number, of_tiles)
                    else:
                        here, last = band_place(weight, band + each), start + some == blocks
                        beyond = band_place(weight, band + each + 1) if each + 1 < bands else following
                        codes, scales = read_long(weight + _CODES), read_long(weight + _SCALES)
                        next_scales = beyond + scales if last else here + scales + (start + some) * scale_step
                        places = (
                            here + codes + start * block_bytes, some, panel, inputs, record_stride, target, stride,
                            begun, table, offset, here + codes + blocks * block_bytes, beyond + codes, next_scales,
                            scale_step, minima - scales,
                        )  # fmt: skip
                        product_rows(number, width, places)
                    _finish(weight, band + each, rows, row, width, target, stride, start + some == blocks)
                    ahead += some * share
                row += width

    return compiled_callback(bands_of_kind, types.void(*[types.intp] * 10))


@compiled
def _target(
    weight: int, band: int, rows: Rows, first: int, count: int, begun: int, narrow: bool, room: int
) -> tuple[int, int]:
    """Where 32 outputs of some rows are written first: in place, unless there are fewer outputs, or rows (`narrow`).

    Sums that have `begun` are there.
    """
    place = rows.outputs + first * rows.output_stride + 4 * OUTS * band
    outs = min(OUTS, read_long(weight + _OUTS) - band * OUTS)
    if outs == OUTS and not narrow:
        return place, rows.output_stride
    target = room + SUMS_BYTES
    if begun:
        for row in range(count):
            for out in range(outs):
                copy_float(place + row * rows.output_stride + 4 * out, target + 4 * (OUTS * row + out))
    return target, 4 * OUTS


@compiled
def _finish(
    weight: int, band: int, rows: Rows, first: int, count: int, target: int, stride: int, complete: bool
) -> None:
    """Add the biases to complete sums, and move outputs in place."""
    bias = read_long(weight + _BIAS) if complete else 0
    if bias:
        for row in range(count):
            add_floats(target + row * stride, bias + 4 * OUTS * band, OUTS)
    place = rows.outputs + first * rows.output_stride + 4 * OUTS * band
    if target == place:
        return
    outs = min(OUTS, read_long(weight + _OUTS) - band * OUTS)
    for row in range(count):
        for out in range(outs):
            copy_float(target + row * stride + 4 * out, place + row * rows.output_stride + 4 * out)
