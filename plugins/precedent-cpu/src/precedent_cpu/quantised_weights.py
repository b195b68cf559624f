"""Lays a quantised weight out for `quantised_products`: once, when a model is loaded; codes and scales stay the file's.

Bands of 32 outputs follow one another. A band has its scales (in their smallest exact form), its minima, then its
codes, block after block of 32 inputs.
"""

from __future__ import annotations

import mmap
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from precedent.runtime.compiled import Int64s, compiled
from precedent.target.quantised import QuantisedWeight
from precedent_cpu.codes import Band, Layout, PackedCodes, codes_of, layout_of
from precedent_cpu.kernel_code import CACHE_LINE, read_long, write_long
from precedent_cpu.quantised_kernels import (
    BLOCK,
    KINDS,
    OUTS,
    SCALE_FORMATS,
    SIGNED,
    TILES,
    UNIT,
    Kind,
    read_byte,
    read_float,
    scales_as_floats,
)
from precedent_cpu.quantised_products import FIELDS, band_entry
from precedent_cpu.row_products import team
from precedent_cpu.tile_products import tiles_at_hand

Bytes = NDArray[np.uint8]

LARGE = 1 << 22
"""Bytes from which on the system is asked for large pages."""

AT_ONCE = 1 << 19
"""Codes that are laid out at a time, approximately: they stay in the second cache."""

_SUPER = 256
"""Inputs that share a float16 where scales are products."""

_OFFSET_OF_BYTES = 128
"""What is added to levels of a table, and to eight-bit levels, where the unit takes unsigned codes."""


class PackedWeight:
    """A weight in memory as the kernels read it; `numbers` are its `FIELDS`."""

    def __init__(self, weight: QuantisedWeight) -> None:
        layout, self.shape = layout_of(weight), weight.shape
        assert layout is not None
        self._layout, self._kind = layout, _kind_of(layout)
        blocks, bands = weight.in_features // BLOCK, -(-weight.out_features // OUTS)
        offset = _OFFSET_OF_BYTES if layout.table is not None else layout.offset
        signed = SIGNED and (layout.bits == 8 or layout.table is not None)
        self._table = np.zeros(16, np.uint8)
        if layout.table is not None:
            levels = np.array(layout.table, np.int64) + (0 if signed else _OFFSET_OF_BYTES)
            self._table[: len(levels)] = levels.astype(np.uint8)
        tiles = TILES and tiles_at_hand() and not (layout.bits == 8 and not layout.offset)
        self._flipped = signed and layout.table is None
        self.fields = dict.fromkeys(FIELDS, 0) | self._places(weight.in_features)
        self.fields |= {
            "entry": band_entry(self._kind), "outs": weight.out_features, "blocks": blocks, "groups": self._kind.groups,
            "table": 0 if layout.table is None else self._table.ctypes.data, "offset": offset, "tiles": tiles,
        }  # fmt: skip
        self.nbytes = bands * self.fields["band_bytes"]
        self._memory = _memory(self.nbytes + CACHE_LINE)
        self._bands = self._memory[-self._memory.ctypes.data % CACHE_LINE :][: self.nbytes].reshape(bands, -1)
        self.fields["base"] = self._bands.ctypes.data
        self.numbers: Int64s = np.array([self.fields[name] for name in FIELDS], np.int64)
        self._fill(weight)

    def _places(self, inputs: int) -> dict[str, int]:
        """Where the parts of a band begin."""
        layout, place, found = self._layout, 0, dict[str, int]()
        size = OUTS * (1 if layout.factors else {"float32": 4}.get(layout.scale_dtype, 2))
        found |= {"scale_bytes": size, "blocks_of_scale": max(1, layout.group // BLOCK)}
        if layout.factors:
            found["super_scales"], place = 0, -(-inputs // _SUPER) * 2 * OUTS
            if layout.minima:
                found["super_minima"], place = place, 2 * place
        found["scales"], place = place, place + inputs // layout.group * size
        if layout.minima:
            found["minima"], place = place, place + inputs // layout.group * size
        found["codes"] = place = -(-place // CACHE_LINE) * CACHE_LINE
        found["code_bytes"] = inputs // BLOCK * self._kind.block_bytes
        found["band_bytes"] = place + found["code_bytes"]
        return found

    def _fill(self, weight: QuantisedWeight) -> None:
        """Read the weight, some bands at a time; then its stored pages are not needed."""
        outs, step = weight.out_features, max(OUTS, AT_ONCE // weight.in_features // OUTS * OUTS)
        for first in range(0, outs, step):
            self._fill_bands(first // OUTS, codes_of(weight, slice(first, min(first + step, outs))))
        weight.release()

    def _fill_bands(self, band: int, read: Band) -> None:
        count, inputs = len(read.scales), self.shape[1]
        bands = -(-count // OUTS)
        codes = np.zeros((bands * OUTS, inputs), np.uint8)
        if isinstance(read.stored, PackedCodes):
            blocks, size, bits, added = read.stored
            _unpack(np.ascontiguousarray(blocks), size, np.array(bits, np.int64), added, codes)
        else:
            codes[:count] = read.stored
        fields, target = self.fields, self._bands[band : band + bands]
        layout, factors = self._layout, read.factors
        if layout.factors:
            assert factors is not None
            self._put(target, "scales", factors.steps)
            self._put(target, "super_scales", factors.super_scales)
            if layout.minima:
                assert factors.super_minima is not None
                assert factors.minimum_steps is not None
                self._put(target, "minima", factors.minimum_steps)
                self._put(target, "super_minima", -factors.super_minima)
            signed = factors.steps.dtype == np.int8
            form = SCALE_FORMATS.index("int8" if signed else "uint8")
        else:
            form = SCALE_FORMATS.index(layout.scale_dtype)
            self._put(target, "scales", _stored(read.scales, layout.scale_dtype))
            if read.minima is not None:
                self._put(target, "minima", _stored(read.minima, layout.scale_dtype))
        self.numbers[FIELDS.index("form")] = self.fields["form"] = form
        words = target[:, fields["codes"] :].view(np.uint32)
        _pack_codes(codes.view(np.uint32), layout.bits, 0x80808080 if self._flipped else 0, words)

    def _put(self, target: Bytes, name: str, numbers: NDArray[Any]) -> None:
        """Write `[outputs, groups]` numbers as `[bands, groups, OUTS]`, with zeros for outputs that there are not."""
        count, groups = numbers.shape
        whole = np.zeros((len(target) * OUTS, groups), numbers.dtype)
        whole[:count] = numbers
        turned = np.ascontiguousarray(whole.reshape(-1, OUTS, groups).transpose(0, 2, 1))
        flat = turned.view(np.uint8).reshape(len(target), -1)
        target[:, self.fields[name] : self.fields[name] + flat.shape[1]] = flat

    def with_bias(self, bias: Tensor | None) -> tuple[Int64s, Tensor | None]:
        """The `FIELDS` of this weight with a bias, and the padded bias that has to be kept."""
        numbers = self.numbers.copy()
        if bias is None:
            return numbers, None
        kept = torch.zeros(len(self._bands) * OUTS)
        kept[: self.shape[0]] = bias.detach().float()
        numbers[FIELDS.index("bias")] = kept.data_ptr()
        return numbers, kept

    def rows(self, ids: Tensor) -> Tensor:
        """Rows of the weight as float32, `[*ids.shape, in_features]`."""
        found = torch.empty((*ids.shape, self.shape[1]))
        flat = ids.reshape(-1).numpy()
        if flat.size and not 0 <= flat.min() <= flat.max() < self.shape[0]:
            raise IndexError(f"index out of range: ids must be below {self.shape[0]}")
        scratch = np.empty(2 * OUTS, np.float32)
        _write_rows(self.numbers, self._layout.bits, flat, scratch, found.view(-1, self.shape[1]).numpy())
        return found


def packable(weight: QuantisedWeight) -> bool:
    """Whether the kernels compute with such a weight on this machine."""
    layout = layout_of(weight)
    return (
        layout is not None
        and bool(UNIT)
        and team() is not None
        and weight.in_features % max(BLOCK, layout.group) == 0
        and layout.group in (16, 32, 64, 128)
        and (not layout.factors or (weight.in_features % _SUPER == 0 and layout.group <= BLOCK))
        and _kind_of(layout) in KINDS
        and not (layout.minima and layout.bits < 8 and layout.offset)
        and (layout.bits < 8 or layout.offset in ((_OFFSET_OF_BYTES,) if SIGNED else (0, _OFFSET_OF_BYTES)))
    )


def _kind_of(layout: Layout) -> Kind:
    return Kind(layout.bits, 2 if layout.group < BLOCK else 1, layout.minima, layout.table is not None)


def _stored(scales: NDArray[np.float32], dtype: str) -> NDArray[Any]:
    """Scales in their smallest exact form; bfloat16 as the upper halves of float32."""
    if dtype == "bfloat16":
        return (np.ascontiguousarray(scales).view(np.uint32) >> 16).astype(np.uint16)
    return scales.astype(dtype)


def _memory(size: int) -> Bytes:
    if size < LARGE or not hasattr(mmap, "MADV_HUGEPAGE"):
        return np.empty(size, np.uint8)
    area = mmap.mmap(-1, size, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)  # shared memory gets no huge pages
    area.madvise(mmap.MADV_HUGEPAGE)
    return np.frombuffer(area, np.uint8)


_ONES, _LOW, _HIGH, _DIAGONAL = map(
    np.uint64, (0x0101010101010101, 0x7F7F7F7F7F7F7F7F, 0x8080808080808080, 0x8040201008040201)
)


@compiled
def _unpack(blocks: Bytes, size: int, bits: Int64s, added: int, codes: Bytes) -> None:
    """Write `PackedCodes` a byte each, eight at a time."""
    rows, count, nbytes = blocks.shape
    for number in range(len(bits)):
        place, each, width, shift = bits[number]
        mask, up, more = np.uint64((1 << each) - 1) * _ONES, np.uint64(shift), np.uint64(added) * _ONES
        for block in range(rows * count):
            source, target = blocks.ctypes.data + block * nbytes + place, codes.ctypes.data + block * size
            end = target + size
            while target < end and width == 1:  # eight bits of a byte
                found = (np.uint64(read_byte(source)) * _ONES & _DIAGONAL) + _LOW >> np.uint64(7) & _ONES
                _add_codes(target, found << up, number == 0, more)
                source, target = source + 1, target + 8
            while target < end:
                for down in range(0, 8, each):
                    for k in range(0, width, 8):
                        found = np.uint64(read_long(source + k)) >> np.uint64(down) & mask
                        _add_codes(target + k, found << up, number == 0, more)
                    target += width
                source += width


@compiled
def _add_codes(place: int, codes: np.uint64, first: bool, more: np.uint64) -> None:
    """Add eight bytes to those at an address, or to `more` if they are the first there."""
    before = more if first else np.uint64(read_long(place))
    write_long(place, np.int64((codes & _LOW) + (before & _LOW) ^ (codes ^ before) & _HIGH))


@compiled
def _pack_codes(words: NDArray[np.uint32], bits: int, flip: int, target: NDArray[np.uint32]) -> None:
    """Lay codes `[outputs, inputs / 4]` out, four to a word; `target` is `[bands, words]`."""
    low, high = np.uint32(0x0F0F0F0F), bits - 4
    mask, shared = np.uint32(0x01010101 if high == 1 else 0x03030303), 8 // high if high else 1
    size, flipped = OUTS * BLOCK * bits // 32, np.uint32(flip)
    for band in range(target.shape[0]):
        for block in range(words.shape[1] // 8):
            at = block * size
            for pair in range(8):
                column = 8 * block + pair
                for out in range(16):
                    first, second = words[band * OUTS + out, column], words[band * OUTS + 16 + out, column]
                    if bits == 8:
                        target[band, at + 32 * pair + out] = first ^ flipped
                        target[band, at + 32 * pair + 16 + out] = second ^ flipped
                        continue
                    target[band, at + 16 * pair + out] = (first & low) | ((second & low) << np.uint32(4))
                    if high:
                        place = at + 128 + 2 * pair // shared * 16 + out
                        shift = 2 * pair % shared * high
                        both = ((first >> np.uint32(4)) & mask) << np.uint32(shift)
                        both |= ((second >> np.uint32(4)) & mask) << np.uint32(shift + high)
                        if shift == 0:
                            target[band, place] = both
                        else:
                            target[band, place] |= both


(
    _BASE, _BAND_BYTES, _BLOCKS, _FORM, _SCALES, _MINIMA, _SCALE_BYTES, _SUPERS, _SUPER_MINIMA, _SHARED, _CODES,
    _GROUPS, _TABLE, _OFFSET,
) = (
    FIELDS.index(name) for name in (
        "base", "band_bytes", "blocks", "form", "scales", "minima", "scale_bytes", "super_scales", "super_minima",
        "blocks_of_scale", "codes", "groups", "table", "offset",
    )
)  # fmt: skip


@compiled
def _write_rows(
    numbers: Int64s, bits: int, ids: Int64s, scratch: NDArray[np.float32], found: NDArray[np.float32]
) -> None:
    """Dequantise some outputs."""
    groups, scales, minima = numbers[_GROUPS], scratch.ctypes.data, scratch.ctypes.data + 4 * OUTS
    for row in range(len(ids)):
        here, out = numbers[_BASE] + ids[row] // OUTS * numbers[_BAND_BYTES], ids[row] % OUTS
        for block in range(numbers[_BLOCKS]):
            supers = block // 8 * 2 * OUTS
            for group in range(groups):
                number = block * groups + group if groups > 1 else block // numbers[_SHARED]
                place = here + number * numbers[_SCALE_BYTES]
                scales_as_floats(numbers[_FORM], place + numbers[_SCALES], here + numbers[_SUPERS] + supers, scales)
                if numbers[_MINIMA]:
                    super_minima = here + numbers[_SUPER_MINIMA] + supers
                    scales_as_floats(numbers[_FORM], place + numbers[_MINIMA], super_minima, minima)
                scale = read_float(scales + 4 * out)
                for k in range(group * BLOCK // groups, (group + 1) * BLOCK // groups):
                    level = _level(numbers, bits, here + numbers[_CODES], block, out, k)
                    result = np.float32(level) * scale
                    if numbers[_MINIMA]:
                        result += read_float(minima + 4 * out)
                    found[row, BLOCK * block + k] = result


@compiled
def _level(numbers: Int64s, bits: int, codes: int, block: int, out: int, k: int) -> int:
    """The level of input `k` of a block."""
    place, half, pair, byte = codes + block * OUTS * BLOCK * bits // 8, out // 16, k // 4, out % 16 * 4 + k % 4
    if bits == 8:
        code = read_byte(place + CACHE_LINE * (2 * pair + half) + byte)
        return int((code ^ 128) - 128 if SIGNED else code - numbers[_OFFSET])
    code = read_byte(place + CACHE_LINE * pair + byte) >> 4 * half & 15
    if bits > 4:
        high = bits - 4
        vector, shared = 2 * pair + half, 8 // high
        plane = read_byte(place + 512 + CACHE_LINE * (vector // shared) + byte)
        code |= (plane >> high * (vector % shared) & (1 << high) - 1) << 4
    elif numbers[_TABLE]:
        level = read_byte(numbers[_TABLE] + code)
        return int((level ^ 128) - 128 if SIGNED else level - numbers[_OFFSET])
    return int(code - numbers[_OFFSET])
