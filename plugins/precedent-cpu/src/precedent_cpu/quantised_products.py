"""Products of rows with a packed weight of 4 to 8 bits: bands of outputs, which threads take in turn.

Up to `TOGETHER` rows are multiplied with the codes as they lie in memory. For more rows a band's codes are first
unpacked into the second cache, a byte each, and then read by the matrix unit or the vector unit, some rows at a time.
"""

from __future__ import annotations

from typing import NamedTuple

from precedent.runtime.compiled import compiled
from precedent_cpu.kernel_code import CACHE_LINE, read_long
from precedent_cpu.quantised_kernels import (
    BLOCK,
    OUTS,
    RECORD,
    TILE_ROWS,
    TOGETHER,
    Kind,
    add_floats,
    copy_float,
    open_int8_tiles,
    product_rows,
    quantise,
    scales_as_floats,
    tiles_of,
    unpack_codes,
)

FIELDS = (
    "base", "band_bytes", "outs", "blocks", "kind", "unpacked_kind", "form", "scales", "minima", "scale_bytes",
    "super_scales", "super_minima", "blocks_of_scale", "codes", "code_bytes", "groups", "table", "offset",
    "tile_offset", "bias", "tiles",
)  # fmt: skip
"""What a packed weight's int64 numbers say: where its bands are and how they lie.

`base` is the address of the first band. `scales`, `minima`, `super_scales`, `super_minima` and `codes` are offsets
within a band (`minima` 0: none). `form` numbers `SCALE_FORMATS`; there is one scale for `blocks_of_scale` blocks, or
`groups` for each block. `table` and `bias` are addresses (0: none).
"""

(
    _BASE, _BAND_BYTES, _OUTS, _BLOCKS, _KIND, _UNPACKED, _FORM, _SCALES, _MINIMA, _SCALE_BYTES,
    _SUPERS, _SUPER_MINIMA, _SHARED, _CODES, _CODE_BYTES, _GROUPS, _TABLE, _OFFSET, _TILE_OFFSET, _BIAS, _TILES,
) = (8 * number for number in range(len(FIELDS)))  # fmt: skip


class Rows(NamedTuple):
    """Quantised rows and where their outputs go: addresses, and the bytes between two rows of each."""

    records: int
    record_stride: int
    count: int
    outputs: int
    output_stride: int


_tiles_1, _tiles_2 = (tiles_of(Kind(8, groups, minima=False)) for groups in (1, 2))
_tiles_1_minima, _tiles_2_minima = (tiles_of(Kind(8, groups, minima=True)) for groups in (1, 2))

_SUMS_BYTES, _OUTPUT_BYTES = 4096, 4 * OUTS * TILE_ROWS
_FEW = TOGETHER


def quantised_room(inputs: int) -> int:
    """Bytes that a thread needs for a weight of so many inputs: integer sums, a few outputs, scales, levels."""
    blocks = -(-inputs // BLOCK)
    return _SUMS_BYTES + _OUTPUT_BYTES + (blocks + 1) * (16 * OUTS + OUTS * BLOCK) + CACHE_LINE


@compiled
def quantise_row(numbers: int, count: int, records: int) -> None:
    """Quantise `count` float32 numbers (whole blocks) to records."""
    quantise(numbers, count // BLOCK, records)


@compiled
def band_product(weight: int, band: int, following: int, rows: Rows, room: int) -> None:
    """Outputs `OUTS * band` and on of every row; meanwhile prefetch the band `following` (negative: none).

    `weight` is the address of its `FIELDS`. Rows of records beyond `count`, up to a multiple of `TILE_ROWS`, are read,
    and one record after each row; `room` has `quantised_room` bytes and is not shared.
    """
    band_bytes = read_long(weight + _BAND_BYTES)
    here = read_long(weight + _BASE) + band * band_bytes
    ahead = here if following < 0 else here + (following - band) * band_bytes
    panel = room + _SUMS_BYTES + _OUTPUT_BYTES
    blocks = read_long(weight + _BLOCKS)
    _widen_scales(weight, here, panel)
    if rows.count <= _FEW:
        _some_rows(weight, band, read_long(weight + _KIND), here + read_long(weight + _CODES), ahead, panel, rows, 0, rows.count, room)
        return
    levels = (panel + blocks * 16 * OUTS + CACHE_LINE - 1) // CACHE_LINE * CACHE_LINE
    kind, table, offset = read_long(weight + _KIND), read_long(weight + _TABLE), read_long(weight + _TILE_OFFSET)
    unpack_codes(kind, here + read_long(weight + _CODES), blocks, table, offset, levels)
    if read_long(weight + _TILES):
        _by_tiles(weight, band, ahead, panel, levels, rows, room)
        return
    for row in range(0, rows.count, TOGETHER):
        count = min(TOGETHER, rows.count - row)
        near = ahead + row * (band_bytes // rows.count)
        _some_rows(weight, band, read_long(weight + _UNPACKED), levels, near, panel, rows, row, count, room)


@compiled
def _widen_scales(weight: int, here: int, panel: int) -> None:
    """Write a band's scales and minima as float32, those of each block together."""
    blocks, groups, shared = read_long(weight + _BLOCKS), read_long(weight + _GROUPS), read_long(weight + _SHARED)
    form, size = read_long(weight + _FORM), read_long(weight + _SCALE_BYTES)
    scales, minima = here + read_long(weight + _SCALES), read_long(weight + _MINIMA)
    supers, super_minima = here + read_long(weight + _SUPERS), here + read_long(weight + _SUPER_MINIMA)
    for block in range(blocks):
        for group in range(groups):
            number = block * groups + group if groups > 1 else block // shared
            at = block // 8 * 2 * OUTS
            scales_as_floats(form, scales + number * size, supers + at, panel)
            if minima:
                scales_as_floats(form, here + minima + number * size, super_minima + at, panel + 4 * OUTS * groups)
            panel += 4 * OUTS
        if minima:
            panel += 4 * OUTS * groups


@compiled
def _some_rows(
    weight: int, band: int, kind: int, codes: int, ahead: int, panel: int, rows: Rows, first: int, count: int, room: int
) -> None:
    """Up to `TOGETHER` rows from `first` on, on the vector unit."""
    target, stride = _target(weight, band, rows, first, room)
    records = rows.records + first * rows.record_stride
    places = (
        codes, read_long(weight + _BLOCKS), panel, records, rows.record_stride, target, stride,
        read_long(weight + _TABLE), read_long(weight + _OFFSET), ahead,
    )  # fmt: skip
    product_rows(kind, count, places)
    _finish(weight, band, rows, first, count, target, stride)


@compiled
def _by_tiles(weight: int, band: int, ahead: int, panel: int, levels: int, rows: Rows, room: int) -> None:
    """All rows, `TILE_ROWS` at a time, on the matrix unit."""
    blocks, groups, minima = read_long(weight + _BLOCKS), read_long(weight + _GROUPS), read_long(weight + _MINIMA)
    pieces = (rows.count + TILE_ROWS - 1) // TILE_ROWS
    share = read_long(weight + _BAND_BYTES) // (pieces * blocks)
    open_int8_tiles(groups)
    for row in range(0, rows.count, TILE_ROWS):
        target, stride = _target(weight, band, rows, row, room)
        count = min(TILE_ROWS, rows.count - row)
        if count < TILE_ROWS:
            target, stride = room + _SUMS_BYTES, 4 * OUTS
        records = rows.records + row * rows.record_stride
        far = ahead + row // TILE_ROWS * blocks * share
        places = (levels, blocks, panel, records, rows.record_stride, target, stride, room, far, share)
        if groups == 1 and not minima:
            _tiles_1(places)
        elif groups == 1:
            _tiles_1_minima(places)
        elif not minima:
            _tiles_2(places)
        else:
            _tiles_2_minima(places)
        _finish(weight, band, rows, row, count, target, stride)


@compiled
def _target(weight: int, band: int, rows: Rows, first: int, room: int) -> tuple[int, int]:
    """Where 32 outputs of some rows are written first: in place, unless the last band is narrower."""
    if (band + 1) * OUTS <= read_long(weight + _OUTS):
        return rows.outputs + first * rows.output_stride + 4 * OUTS * band, rows.output_stride
    return room + _SUMS_BYTES, 4 * OUTS


@compiled
def _finish(weight: int, band: int, rows: Rows, first: int, count: int, target: int, stride: int) -> None:
    """Add the biases, and move outputs in place."""
    bias = read_long(weight + _BIAS)
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
