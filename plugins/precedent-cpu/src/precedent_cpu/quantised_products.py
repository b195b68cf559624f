"""Products of rows with a packed weight of 4 to 8 bits: bands of outputs, which threads take in turn.

Up to `TOGETHER` rows are multiplied with the codes as they lie in memory. For more rows a band's codes are first
unpacked into the second cache, a byte each, and then read by the matrix unit or the vector unit, some rows at a time.
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
    KINDS,
    OUTS,
    RECORD,
    TILE_ROWS,
    TOGETHER,
    Kind,
    add_floats,
    copy_float,
    open_int8_tiles,
    product_by_tiles,
    product_rows,
    product_unpacked,
    quantise,
    scales_as_floats,
    unpack_codes,
)

FIELDS = (
    "entry", "base", "band_bytes", "outs", "blocks", "form", "scales", "minima", "scale_bytes",
    "super_scales", "super_minima", "blocks_of_scale", "codes", "code_bytes", "groups", "table", "offset",
    "tile_offset", "bias", "tiles",
)  # fmt: skip
"""What a packed weight's int64 numbers say: where its bands are and how they lie.

`entry` is the function of `band_entry`, `base` the address of the first band. `scales`, `minima`, `super_scales`,
`super_minima` and `codes` are offsets within a band (`minima` 0: none). `form` numbers `SCALE_FORMATS`; there is one
scale for `blocks_of_scale` blocks, or `groups` for each block. `table` and `bias` are addresses (0: none).
"""

(
    _ENTRY, _BASE, _BAND_BYTES, _OUTS, _BLOCKS, _FORM, _SCALES, _MINIMA, _SCALE_BYTES,
    _SUPERS, _SUPER_MINIMA, _SHARED, _CODES, _CODE_BYTES, _GROUPS, _TABLE, _OFFSET, _TILE_OFFSET, _BIAS, _TILES,
) = (8 * number for number in range(len(FIELDS)))  # fmt: skip


class Rows(NamedTuple):
    """Quantised rows and where their outputs go: addresses, and the bytes between two rows of each."""

    records: int
    record_stride: int
    num_rows: int
    outputs: int
    output_stride: int


_SUMS_BYTES, _OUTPUT_BYTES = 4096, 4 * OUTS * TILE_ROWS


def record_stride(inputs: int) -> int:
    """Bytes between two rows of records: the kernels read one record too many."""
    return (inputs // BLOCK + 1) * RECORD


def records_bytes(rows: int, inputs: int) -> int:
    """Bytes of the records of some rows, with those beyond the last that the kernels read."""
    return -(-rows // TILE_ROWS) * TILE_ROWS * record_stride(inputs)


def quantised_room(inputs: int) -> int:
    """Bytes that a thread needs for a weight of so many inputs: integer sums, a few outputs, scales, levels."""
    blocks = -(-inputs // BLOCK)
    return _SUMS_BYTES + _OUTPUT_BYTES + (blocks + 1) * (16 * OUTS + OUTS * BLOCK) + CACHE_LINE


@compiled
def quantise_row(numbers: int, count: int, records: int) -> None:
    """Quantise `count` float32 numbers (whole blocks) to records."""
    quantise(numbers, count // BLOCK, records)


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


@kernel(*[types.intp] * 10)
def _call_entry(code: Code, entry: Any, *arguments: Any) -> None:
    function = ir.FunctionType(ir.VoidType(), [argument.type for argument in arguments])
    code.builder.call(code.builder.inttoptr(entry, function.as_pointer()), arguments)


@compiled
def band_product(weight: int, band: int, ahead: int, rows: Rows, room: int) -> None:
    """Outputs `OUTS * band` and on of every row; meanwhile prefetch the band at `ahead` (0: none).

    `weight` is the address of its `FIELDS`. Records of rows beyond `num_rows`, up to a multiple of `TILE_ROWS`, are
    read too, and one record after each row; `room` has `quantised_room` bytes and is not shared.
    """
    _call_entry(
        read_long(weight + _ENTRY), weight, band, ahead if ahead else band_place(weight, band), rows.records,
        rows.record_stride, rows.num_rows, rows.outputs, rows.output_stride, room,
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
    def band_of_kind(weight, band, ahead, records, record_stride, count, outputs, output_stride, room):  # type: ignore[no-untyped-def]
        rows = Rows(records, record_stride, count, outputs, output_stride)
        codes, blocks = band_place(weight, band) + read_long(weight + _CODES), read_long(weight + _BLOCKS)
        table, offset = read_long(weight + _TABLE), read_long(weight + _OFFSET)
        panel = room + _SUMS_BYTES + _OUTPUT_BYTES
        _widen_scales(weight, band_place(weight, band), panel)
        if count <= TOGETHER:
            target, stride = _target(weight, band, rows, 0, room)
            product_rows(
                number, count, (codes, blocks, panel, records, record_stride, target, stride, table, offset, ahead)
            )
            _finish(weight, band, rows, 0, count, target, stride)
            return
        levels = (panel + blocks * 16 * OUTS + CACHE_LINE - 1) // CACHE_LINE * CACHE_LINE
        unpack_codes(number, codes, blocks, table, read_long(weight + _TILE_OFFSET), levels)
        tiles = read_long(weight + _TILES) != 0
        together = TILE_ROWS if tiles else TOGETHER
        if tiles:
            open_int8_tiles(read_long(weight + _GROUPS))
        groups = (count + together - 1) // together
        share = read_long(weight + _BAND_BYTES) // (groups * blocks)
        for row in range(0, count, together):
            some = min(together, count - row)
            target, stride = _target(weight, band, rows, row, room)
            here, far = records + row * record_stride, ahead + row // together * blocks * share
            if tiles:
                if some < TILE_ROWS:
                    target, stride = room + _SUMS_BYTES, 4 * OUTS
                product_by_tiles(number, (levels, blocks, panel, here, record_stride, target, stride, room, far, share))
            else:
                product_unpacked(
                    number, some, (levels, blocks, panel, here, record_stride, target, stride, 0, offset, far)
                )
            _finish(weight, band, rows, row, some, target, stride)

    return compiled_callback(band_of_kind, types.void(*[types.intp] * 9))


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
