"""Instructions for products with weights of 4 to 8 bits: integer sums of 32 inputs, added up in float32.

A weight lies in bands of 32 outputs, a band in blocks of 32 inputs. Within a block four inputs of one output are
neighbours, so that one lane of an integer dot product sums them. Inputs are quantised to int8 with one scale for 32 of
them. Integer sums are exact. An output's float32 sum takes `CHUNK` blocks after `CHUNK` blocks, of each chunk first the
minima and then the scaled integers, both from first to last: a row has the same bits however many rows are computed
together and whichever instructions compute them.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from inspect import Parameter, Signature
from typing import Any, NamedTuple, cast

from llvmlite import binding, ir
from numba.core import cgutils, types
from numba.extending import intrinsic

from precedent.runtime.instructions import FEATURES
from precedent_cpu.kernel_code import CACHE_LINE, FLOAT, INT, LONG, SHORT, Code, Emit, kernel, same
from precedent_cpu.tile_products import configure_tiles, move_tile, tile_call, tile_number

OUTS = BLOCK = 32
"""Outputs of a band, and inputs of a block."""

CHUNK = 64
"""Blocks whose minima are added before their products."""

WIDE = 16
"""Numbers that are quantised or widened together; the compiler splits vectors that are wider than a register."""

RECORD = 64
"""Bytes of a quantised block of inputs: 32 codes, then the scale, negative sums of codes and sums of numbers."""

SCALE, NEGATIVE, NEGATIVE_HALVES, SUM, SUM_HALVES = 32, 36, 40, 48, 52
"""Where a record holds its float32 scale; the int32 negative sum of its codes, and those of both halves; the scale
times the sum of the codes, float32, and the same for both halves."""

TILE_ROWS = 16
"""Rows that one call of the matrix unit's kernel computes."""

LARGEST = 127.0
"""The largest code of an input."""

SMALLEST = 0x0DA24260
"""Bits of 1e-30: blocks whose largest number is smaller count as zero, for the reciprocal of the scale overflows."""

_ROUND = 1.5 * 2**23
_ROUND_BITS = 0x4B400000

BYTE, HALF = ir.IntType(8), ir.HalfType()


def _unit() -> str:
    """Which dot products the processor has."""
    if FEATURES.get("avx512vnni") and FEATURES.get("avx512f"):
        return "avx512vnni"
    if FEATURES.get("avxvnni"):
        return "avxvnni"
    if FEATURES.get("avx2"):
        return "avx2"
    if FEATURES.get("dotprod") or binding.get_process_triple().startswith("arm64"):
        return "dotprod"
    return ""


UNIT = _unit()
"""The dot products in use: `avx512vnni`, `avxvnni`, `avx2`, `dotprod` (NEON), or empty without any."""

REGISTER, TOGETHER = {"avx512vnni": (16, 8), "avxvnni": (8, 6), "avx2": (8, 4), "dotprod": (4, 8)}.get(UNIT, (8, 1))
"""Outputs in one register, and rows per kernel call at most: their integer sums stay in registers."""

_PARTS = OUTS // REGISTER
_FLOATS, _INTS, _BYTES = (ir.VectorType(kind, REGISTER * size) for kind, size in ((FLOAT, 1), (INT, 1), (BYTE, 4)))
_SHORTS = ir.VectorType(SHORT, 2 * REGISTER)
_WIDE_FLOATS, _WIDE_INTS = ir.VectorType(FLOAT, WIDE), ir.VectorType(INT, WIDE)

SIGNED = UNIT in ("avx2", "dotprod")
"""Whether eight-bit codes lie in memory as signed levels: these units cannot sum unsigned ones exactly."""

TILES = UNIT == "avx512vnni" and bool(FEATURES.get("amx-int8") and FEATURES.get("amx-tile"))
"""Whether the processor's matrix unit multiplies int8; the operating system has to allow it as well."""


class Kind(NamedTuple):
    """How a block's codes lie in memory, and how many scales it has."""

    bits: int
    groups: int
    minima: bool
    table: bool = False

    @property
    def block_bytes(self) -> int:
        """Bytes of a block's codes."""
        return OUTS * BLOCK * self.bits // 8

    @property
    def panel_bytes(self) -> int:
        """Bytes of a block's float32 scales, or minima."""
        return 4 * OUTS * self.groups


KINDS = (
    *(Kind(bits, groups, minima) for bits in (4, 5, 6, 8) for groups in (1, 2) for minima in (False, True)),
    Kind(4, 1, minima=False, table=True),
)
"""All kinds, in the order of their numbers."""

SCALE_FORMATS = ("float16", "bfloat16", "float32", "int8", "uint8")
"""How scales lie in memory; the last two are steps of a float16 for 256 inputs."""


def _load(code: Code, base: Any, offset: int, kind: Any) -> Any:
    place = code.builder.add(base, ir.Constant(LONG, offset))
    return code.builder.load(code.builder.inttoptr(place, kind.as_pointer()), align=1)


def _store(code: Code, value: Any, base: Any, offset: int) -> None:
    place = code.builder.add(base, ir.Constant(LONG, offset))
    code.builder.store(value, code.builder.inttoptr(place, value.type.as_pointer()), align=1)


def _call(code: Code, name: str, result: Any, arguments: Sequence[Any]) -> Any:
    kind = ir.FunctionType(result, [argument.type for argument in arguments])
    return code.builder.call(cgutils.get_or_insert_function(code.builder.module, kind, name), tuple(arguments))


def _spread(code: Code, number: Any, count: int = REGISTER) -> Any:
    """The number in every lane."""
    builder, kind = code.builder, ir.VectorType(number.type, count)
    first = builder.insert_element(ir.Constant(kind, ir.Undefined), number, ir.Constant(INT, 0))
    return builder.shuffle_vector(first, first, ir.Constant(ir.VectorType(INT, count), [0] * count))


def _fused(code: Code, left: Any, right: Any, total: Any) -> Any:
    return _call(code, f"llvm.fma.v{REGISTER}f32", _FLOATS, (left, right, total))


def _dot(code: Code, total: Any, codes: Any, inputs: Any, *, signed: bool) -> Any:
    """`total` plus the products of codes (or signed levels) and signed inputs, four in each lane."""
    if UNIT.endswith("vnni"):
        return _call(code, f"llvm.x86.avx512.vpdpbusd.{32 * REGISTER}", _INTS, (total, codes, inputs))
    if UNIT == "dotprod":
        codes, inputs = code.builder.bitcast(codes, _BYTES), code.builder.bitcast(inputs, _BYTES)
        return _call(code, "llvm.aarch64.neon.sdot.v4i32.v16i8", _INTS, (total, codes, inputs))
    return _with_pairs(code, total, _pairs(code, codes, inputs, signed=signed))


def _pairs(code: Code, codes: Any, inputs: Any, *, signed: bool) -> Any:
    """AVX2: sums of two products in 16 bits, which 7 bits times 8 bits do not exceed; signed levels lend their sign."""
    codes, inputs = code.builder.bitcast(codes, _BYTES), code.builder.bitcast(inputs, _BYTES)
    if signed:
        inputs = _call(code, "llvm.x86.avx2.psign.b", _BYTES, (inputs, codes))
        codes = _call(code, f"llvm.abs.v{4 * REGISTER}i8", _BYTES, (codes, ir.Constant(ir.IntType(1), 0)))
    return _call(code, "llvm.x86.avx2.pmadd.ub.sw", _SHORTS, (codes, inputs))


def _with_pairs(code: Code, total: Any, pairs: Any) -> Any:
    return code.builder.add(total, _call(code, "llvm.x86.avx2.pmadd.wd", _INTS, (pairs, same(_SHORTS, 1))))


_LOOKUPS = {"avx512vnni": "llvm.x86.avx512.pshuf.b.512", "dotprod": "llvm.aarch64.neon.tbl1.v16i8"}


def _looked_up(code: Code, indices: Any, table: Any) -> Any:
    """Bytes of a table of 16, by indices of four bits."""
    name = _LOOKUPS.get(UNIT, "llvm.x86.avx2.pshuf.b")
    return code.builder.bitcast(_call(code, name, _BYTES, (table, code.builder.bitcast(indices, _BYTES))), _INTS)


def _table(code: Code, place: Any) -> Any:
    """A table of 16 bytes, repeated to fill a register."""
    loaded = _load(code, place, 0, ir.VectorType(BYTE, 16))
    every = ir.Constant(ir.VectorType(INT, 4 * REGISTER), [*range(16)] * (REGISTER // 4))
    return code.builder.shuffle_vector(loaded, loaded, every)


def _unpacked(code: Code, kind: Kind, block: Any, table: Any, pair: int, part: int) -> list[Any]:
    """A quarter of 16 bytes: four inputs of outputs `REGISTER` times `part` on, and of the same outputs plus 16."""
    builder, at = code.builder, 4 * REGISTER * part
    if kind.bits == 8:
        return [_load(code, block, CACHE_LINE * (2 * pair + half) + at, _INTS) for half in (0, 1)]
    both, mask = _load(code, block, CACHE_LINE * pair + at, _INTS), same(_INTS, 0x0F0F0F0F)
    found = [builder.and_(both, mask), builder.and_(builder.lshr(both, same(_INTS, 4)), mask)]
    if kind.table:
        return [_looked_up(code, each, table) for each in found]
    if kind.bits > 4:
        high, shared = kind.bits - 4, 8 // (kind.bits - 4)
        mask = same(_INTS, {1: 0x10101010, 2: 0x30303030}[high])
        for half in (0, 1):
            number = 2 * pair + half
            loaded = _load(code, block, 512 + CACHE_LINE * (number // shared) + at, _INTS)
            shift = high * (number % shared) - 4
            move = builder.shl if shift < 0 else builder.lshr
            moved = move(loaded, same(_INTS, abs(shift)))
            found[half] = builder.or_(found[half], builder.and_(moved, mask))
    return found


AHEAD = 8192
"""How many bytes ahead codes are prefetched."""

Places = tuple[int, int, int, int, int, int, int, int, int, int, int, int, int, int, int]
"""A band's codes, its number of blocks, its scales as float32; records of inputs and the bytes between their rows;
outputs and the bytes between their rows; whether the outputs hold earlier sums; the table of levels; the offset of the
codes; where the band's codes end and which are read next; the stored scales that are read next, their bytes for each
block, and how far from them their minima are."""


def _emit_rows(code: Code, kind: Kind, places: Any, rows: int) -> None:
    """Emit the products of one band with `rows` rows."""
    codes, blocks, scales, records, r_stride, outputs, o_stride, begun, table_at, offset = places[:10]
    end, following_codes, following_scales, scale_bytes, apart = places[10:]
    builder = code.builder
    jump, step = builder.sub(following_codes, end), ir.Constant(LONG, kind.block_bytes)
    table = _table(code, table_at) if kind.table else None
    starts = _starts(code, outputs, o_stride, begun, rows)
    rows_at = [code.offset(records, r_stride, row) for row in range(rows)]
    with code.steps(blocks, (codes, scales, following_scales, *rows_at, *starts), by=1) as (_, carried, following):
        place, panel, far_scales = carried[:3]
        row_places, sums = carried[3 : 3 + rows], list(carried[3 + rows :])
        for each in (far_scales, builder.add(far_scales, apart))[: 1 + kind.minima]:
            code.fetch(each, CACHE_LINE, nearest=False)
        far = builder.add(place, ir.Constant(LONG, AHEAD))
        far = builder.select(builder.icmp_unsigned(">=", far, end), builder.add(far, jump), far)
        for part in range(_PARTS // 2):
            for group in range(kind.groups):
                ints = _integer_sums(code, kind, place, row_places, table, offset, group, part, far)
                for number, total in enumerate(ints):
                    row, lanes = number // 2, part + number % 2 * (_PARTS // 2)
                    at = row * _PARTS + lanes
                    sums[at] = _added(code, total, panel, group, lanes, row_places[row], sums[at])
        following.append(builder.add(place, step))
        following.append(builder.add(panel, ir.Constant(LONG, kind.panel_bytes)))
        following.append(builder.add(far_scales, scale_bytes))
        following.extend(builder.add(record, ir.Constant(LONG, RECORD)) for record in row_places)
        following.extend(sums)
    _store_sums(code, following[3 + rows :], outputs, o_stride)


def _starts(code: Code, outputs: Any, o_stride: Any, begun: Any, rows: int) -> list[Any]:
    """Zeros, or earlier sums: of each row, `REGISTER` outputs after `REGISTER` outputs."""
    there = code.builder.icmp_signed("!=", begun, ir.Constant(LONG, 0))
    stored = [
        _load(code, code.offset(outputs, o_stride, row), 4 * REGISTER * part, _FLOATS)
        for row in range(rows)
        for part in range(_PARTS)
    ]
    return [code.builder.select(there, each, same(_FLOATS, 0.0)) for each in stored]


def _store_sums(code: Code, sums: list[Any], outputs: Any, o_stride: Any) -> None:
    for number, total in enumerate(sums):
        _store(code, total, code.offset(outputs, o_stride, number // _PARTS), 4 * REGISTER * (number % _PARTS))


def _integer_sums(
    code: Code, kind: Kind, block: Any, records: Sequence[Any], table: Any, offset: Any, group: int, part: int, far: Any
) -> list[Any]:
    """Products of a block's codes and the records of some rows: for each row those of both halves of the outputs.

    On AVX2 so many as `narrow` sums of two products are added in 16 bits, which they fit. Meanwhile prefetch the block
    at `far`, line by line: many prefetches at once hold up the loads behind them.
    """
    builder, ints = code.builder, []
    signed = SIGNED and (kind.bits == 8 or kind.table)
    for record in records:
        start = same(_INTS, 0)
        if not signed and (kind.bits == 8 or not kind.minima):
            negative = _load(code, record, (NEGATIVE, NEGATIVE_HALVES)[kind.groups - 1] + 4 * group, INT)
            start = _spread(code, builder.mul(negative, builder.trunc(offset, INT)))
        ints += [start] * 2
    narrow = {4: 8 // kind.groups, 5: 4, 6: 2}.get(kind.bits, 0) if UNIT == "avx2" and not signed else 0
    shorts: dict[int, Any] = {}
    for pair in range(8 * group // kind.groups, 8 * (group + 1) // kind.groups):
        halves = _unpacked(code, kind, block, table, pair, part)
        for line in range(*(kind.bits * each * 2 // 8 for each in (pair, pair + 1)) if part == 0 else (0,)):
            code.fetch(builder.add(far, ir.Constant(LONG, CACHE_LINE * line)), CACHE_LINE, nearest=False)
        for row, record in enumerate(records):
            inputs = _spread(code, _load(code, record, 4 * pair, INT))
            for half, codes in enumerate(halves):
                at = 2 * row + half
                if narrow:
                    pairs = _pairs(code, codes, inputs, signed=False)
                    shorts[at] = builder.add(shorts[at], pairs) if at in shorts else pairs
                else:
                    ints[at] = _dot(code, ints[at], codes, inputs, signed=signed)
        if narrow and (pair + 1) % narrow == 0:
            ints = [_with_pairs(code, total, shorts.pop(at)) for at, total in enumerate(ints)]
    return ints


def _added(code: Code, ints: Any, panel: Any, group: int, lanes: int, record: Any, total: Any) -> Any:
    """Add integer sums, times the scales of weights and of inputs."""
    of_weights = _load(code, panel, 4 * (OUTS * group + REGISTER * lanes), _FLOATS)
    scaled = code.builder.fmul(code.builder.sitofp(ints, _FLOATS), of_weights)
    return _fused(code, scaled, _spread(code, _load(code, record, SCALE, FLOAT)), total)


def _emit_minima(code: Code, kind: Kind, places: Any, rows: int) -> None:
    """Emit the products of some blocks' minima with the sums of `rows` rows."""
    minima, blocks, records, r_stride, outputs, o_stride, begun = places
    builder, sums = code.builder, _starts(code, outputs, o_stride, begun, rows)
    rows_at, at_sum = [code.offset(records, r_stride, row) for row in range(rows)], (SUM, SUM_HALVES)[kind.groups - 1]
    with code.steps(blocks, (minima, *rows_at, *sums), by=1) as (_, carried, following):
        panel, row_places, sums = carried[0], carried[1 : 1 + rows], list(carried[1 + rows :])
        for group in range(kind.groups):
            lanes = [_load(code, panel, 4 * (OUTS * group + REGISTER * part), _FLOATS) for part in range(_PARTS)]
            for row, record in enumerate(row_places):
                of_inputs = _spread(code, _load(code, record, at_sum + 4 * group, FLOAT))
                for part, each in enumerate(lanes):
                    at = row * _PARTS + part
                    sums[at] = _fused(code, each, of_inputs, sums[at])
        following.append(builder.add(panel, ir.Constant(LONG, kind.panel_bytes)))
        following.extend(builder.add(record, ir.Constant(LONG, RECORD)) for record in row_places)
        following.extend(sums)
    _store_sums(code, following[1 + rows :], outputs, o_stride)


def kind_kernel(*kinds: Any) -> Callable[[Emit], Callable[..., Any]]:
    """`kernel` with a first argument that is a constant, a number of `KINDS`: only that kind's code is emitted."""

    def made(emit: Emit) -> Callable[..., Any]:
        def typed(typing: Any, number: Any, *given: Any) -> Any:
            if not isinstance(number, types.IntegerLiteral):
                return None

            def generate(context: Any, builder: ir.IRBuilder, signature: Any, arguments: Any) -> Any:
                values = [
                    cgutils.unpack_tuple(builder, value) if isinstance(each, types.UniTuple) else value
                    for each, value in zip(kinds, arguments[1:], strict=True)
                ]
                emit(Code(builder), KINDS[number.literal_value], *values)
                return context.get_dummy_value()

            return types.void(number, *kinds), generate

        typed.__name__ = emit.__name__
        names = ("typing", "number", *(f"argument{each}" for each in range(len(kinds))))
        parameters = [Parameter(name, Parameter.POSITIONAL_OR_KEYWORD) for name in names]
        typed.__signature__ = Signature(parameters)  # type: ignore[attr-defined]  # numba asks for it
        return cast(Callable[..., Any], intrinsic(prefer_literal=True)(typed))

    return made


@kind_kernel(types.intp, types.UniTuple(types.intp, 15))
def product_rows(code: Code, kind: Kind, rows: Any, places: Any) -> None:
    """The products of one band of a weight with `rows` rows, at most `TOGETHER`; see `Places`."""
    for count in code.cases(rows, TOGETHER if UNIT else 0):
        _emit_rows(code, kind, places, count)


@kind_kernel(types.intp, types.UniTuple(types.intp, 7))
def add_minima(code: Code, kind: Kind, rows: Any, places: Any) -> None:
    """The products of a band's minima with the sums of blocks of `rows` rows, at most `TOGETHER`.

    `places` are the minima as float32 and the number of blocks; records, outputs and `begun` as in `Places`.
    """
    for count in code.cases(rows, TOGETHER if UNIT else 0):
        _emit_minima(code, kind, places, count)


@kind_kernel(*[types.intp] * 5)
def unpack_codes(code: Code, kind: Kind, codes: Any, blocks: Any, table: Any, offset: Any, target: Any) -> None:
    """Write the levels of a band's codes to `target`, a byte each, for the matrix unit."""
    builder = code.builder
    if not TILES:
        return
    amounts = _spread(code, builder.trunc(offset, BYTE), 4 * REGISTER)
    looked = _table(code, table) if kind.table else None
    with code.steps(blocks, (codes, target), by=1) as (_, (place, to), following):
        for pair in range(8):
            for half, found in enumerate(_unpacked(code, kind, place, looked, pair, 0)):
                levels = builder.sub(builder.bitcast(found, _BYTES), amounts)
                _store(code, levels, to, CACHE_LINE * (2 * pair + half))
        following.append(builder.add(place, ir.Constant(LONG, kind.block_bytes)))
        following.append(builder.add(to, ir.Constant(LONG, OUTS * BLOCK)))


@kernel(*[types.intp] * 3)
def quantise(code: Code, numbers: Any, blocks: Any, records: Any) -> None:
    """Quantise float32 numbers to records, 32 at a time. Infinity and NaN make the block's scale so."""
    builder = code.builder
    with code.steps(blocks, (numbers, records), by=1) as (_, (place, record), following):
        halves = [_load(code, place, 4 * WIDE * half, _WIDE_FLOATS) for half in (0, 1)]
        sizes = [builder.and_(builder.bitcast(half, _WIDE_INTS), same(_WIDE_INTS, 0x7FFFFFFF)) for half in halves]
        larger = builder.select(builder.icmp_signed(">", *sizes), *sizes)
        bits = _call(code, f"llvm.vector.reduce.smax.v{WIDE}i32", INT, (larger,))
        largest, zero = builder.bitcast(bits, FLOAT), ir.Constant(FLOAT, 0.0)
        small = builder.icmp_signed("<", bits, ir.Constant(INT, SMALLEST))
        scale = builder.select(small, zero, builder.fdiv(largest, ir.Constant(FLOAT, LARGEST)))
        inverse = builder.select(small, zero, builder.fdiv(ir.Constant(FLOAT, LARGEST), largest))
        totals = []
        for half, loaded in enumerate(halves):
            moved = builder.fadd(builder.fmul(loaded, _spread(code, inverse, WIDE)), same(_WIDE_FLOATS, _ROUND))
            codes = builder.sub(builder.bitcast(moved, _WIDE_INTS), same(_WIDE_INTS, _ROUND_BITS))
            narrow = builder.trunc(codes, ir.VectorType(BYTE, WIDE))
            _store(code, narrow, record, WIDE * half)
            totals.append(_call(code, f"llvm.vector.reduce.add.v{WIDE}i32", INT, (builder.sext(narrow, _WIDE_INTS),)))
        _store(code, scale, record, SCALE)
        whole = builder.add(*totals)
        for total, negative, product in zip(
            (whole, *totals),
            (NEGATIVE, NEGATIVE_HALVES, NEGATIVE_HALVES + 4),
            (SUM, SUM_HALVES, SUM_HALVES + 4),
            strict=True,
        ):
            _store(code, builder.neg(total), record, negative)
            _store(code, builder.fmul(scale, builder.sitofp(total, FLOAT)), record, product)
        following.append(builder.add(place, ir.Constant(LONG, 4 * BLOCK)))
        following.append(builder.add(record, ir.Constant(LONG, RECORD)))


@kernel(*[types.intp] * 4)
def rest_of(code: Code, numbers: Any, blocks: Any, records: Any, rest: Any) -> None:
    """Write what records leave of the numbers that they were made from."""
    builder = code.builder
    with code.steps(blocks, (numbers, records, rest), by=1) as (_, (place, record, to), following):
        scale = _spread(code, _load(code, record, SCALE, FLOAT), WIDE)
        for half in (0, 1):
            codes = builder.sext(_load(code, record, WIDE * half, ir.VectorType(BYTE, WIDE)), _WIDE_INTS)
            numbers_there = builder.fmul(builder.sitofp(codes, _WIDE_FLOATS), scale)
            left = builder.fsub(_load(code, place, 4 * WIDE * half, _WIDE_FLOATS), numbers_there)
            _store(code, left, to, 4 * WIDE * half)
        following.append(builder.add(place, ir.Constant(LONG, 4 * BLOCK)))
        following.append(builder.add(record, ir.Constant(LONG, RECORD)))
        following.append(builder.add(to, ir.Constant(LONG, 4 * BLOCK)))


@kind_kernel(*[types.intp] * 7)
def widen_scales(
    code: Code, kind: Kind, form: Any, source: Any, size: Any, supers: Any, count: Any, shared: Any, target: Any
) -> None:
    """Write `count` times 32 scales (or minima) of a band as float32, each for `shared` blocks.

    `form` numbers `SCALE_FORMATS`, `size` is the bytes between two of them, `target` the place of the first block's.
    """
    builder = code.builder
    end = builder.append_basic_block("end")
    chosen = builder.switch(form, end)
    panel, groups = ir.Constant(LONG, kind.panel_bytes), ir.Constant(LONG, kind.groups)
    for number, name in enumerate(SCALE_FORMATS):
        case = builder.append_basic_block("case")
        chosen.add_case(ir.Constant(LONG, number), case)
        builder.position_at_end(case)
        with code.steps(count, (source, target), by=1) as (k, (place, to), following):
            group = builder.urem(k, groups)
            of_super = builder.mul(builder.udiv(k, ir.Constant(LONG, 8 * kind.groups)), ir.Constant(LONG, 2 * OUTS))
            numbers = [_scales(code, name, place, builder.add(supers, of_super), half) for half in (0, 1)]
            at = builder.add(to, builder.mul(group, ir.Constant(LONG, 4 * OUTS)))
            with code.steps(shared, (at,), by=1) as (_, (block,), beyond):
                for half, each in enumerate(numbers):
                    _store(code, each, block, 4 * WIDE * half)
                beyond.append(builder.add(block, panel))
            last = builder.icmp_unsigned("==", builder.add(group, ir.Constant(LONG, 1)), groups)
            step = builder.select(last, builder.mul(panel, shared), ir.Constant(LONG, 0))
            following.extend((builder.add(place, size), builder.add(to, step)))
        builder.branch(end)
    builder.position_at_end(end)


@kernel(*[types.intp] * 4)
def scales_as_floats(code: Code, form: Any, source: Any, supers: Any, target: Any) -> None:
    """Write 32 scales (or minima) of a format of `SCALE_FORMATS` as float32."""
    builder = code.builder
    end = builder.append_basic_block("end")
    chosen = builder.switch(form, end)
    for number, name in enumerate(SCALE_FORMATS):
        case = builder.append_basic_block("case")
        chosen.add_case(ir.Constant(LONG, number), case)
        builder.position_at_end(case)
        for half in (0, 1):
            _store(code, _scales(code, name, source, supers, half), target, 4 * WIDE * half)
        builder.branch(end)
    builder.position_at_end(end)


def _scales(code: Code, name: str, source: Any, supers: Any, half: int) -> Any:
    builder, shorts = code.builder, ir.VectorType(ir.IntType(16), WIDE)
    if name == "float32":
        return _load(code, source, 64 * half, _WIDE_FLOATS)
    if name == "float16":
        return builder.fpext(
            builder.bitcast(_load(code, source, 32 * half, shorts), ir.VectorType(HALF, WIDE)), _WIDE_FLOATS
        )
    if name == "bfloat16":
        widened = builder.zext(_load(code, source, 32 * half, shorts), _WIDE_INTS)
        return builder.bitcast(builder.shl(widened, same(_WIDE_INTS, 16)), _WIDE_FLOATS)
    steps = _load(code, source, 16 * half, ir.VectorType(BYTE, WIDE))
    widened = builder.sext(steps, _WIDE_INTS) if name == "int8" else builder.zext(steps, _WIDE_INTS)
    return builder.fmul(builder.sitofp(widened, _WIDE_FLOATS), _scales(code, "float16", supers, supers, half))


@kernel(*[types.intp] * 3)
def add_floats(code: Code, numbers: Any, added: Any, count: Any) -> None:
    """Add float32 numbers to others in place, `WIDE` at a time."""
    with code.steps(count, (), by=WIDE) as (k, _, _):
        place, other = (code.vector(base, k, 4, _WIDE_FLOATS) for base in (numbers, added))
        code.builder.store(
            code.builder.fadd(*(code.builder.load(each, align=4) for each in (place, other))), place, align=4
        )


@kernel(types.intp, types.intp)
def copy_float(code: Code, source: Any, target: Any) -> None:
    """Copy one float32 number."""
    _store(code, _load(code, source, 0, FLOAT), target, 0)


@kernel(types.intp, returns=types.float32)
def read_float(code: Code, place: Any) -> Any:
    """The float32 number at an address."""
    return _load(code, place, 0, FLOAT)


@kernel(types.intp, returns=types.intp)
def read_byte(code: Code, place: Any) -> Any:
    """The unsigned byte at an address."""
    return code.builder.zext(_load(code, place, 0, BYTE), LONG)


TilePlaces = tuple[int, int, int, int, int, int, int, int, int, int, int]
"""A band's levels, a byte each; its number of blocks and its scales as float32; records and the bytes between their
rows; outputs and the bytes between their rows; whether these hold earlier sums; room for `SUMS_BYTES` of integer sums;
an address from which on to prefetch, and how many bytes for each block."""


@kind_kernel(types.UniTuple(types.intp, 11))
def product_by_tiles(code: Code, kind: Kind, places: Any) -> None:
    """The products of one unpacked band with `TILE_ROWS` rows on the matrix unit; see `TilePlaces`."""
    if not TILES:
        return
    levels, blocks, panel, records, r_stride, outputs, o_stride, begun, room, far, far_step = places
    builder, step = code.builder, ir.Constant(LONG, OUTS * BLOCK)
    starts = _starts(code, outputs, o_stride, begun, TILE_ROWS)
    _multiply_tiles(code, kind, levels, records, r_stride)
    with code.steps(blocks, (levels, panel, records, far, *starts), by=1) as (_, carried, following):
        place, scales, record, ahead = carried[:4]
        for total in range(2 * kind.groups):
            at = builder.add(room, ir.Constant(LONG, _SUMS * total))
            move_tile(builder, "store", total, at, ir.Constant(LONG, CACHE_LINE))
        place, beyond = builder.add(place, step), builder.add(record, ir.Constant(LONG, RECORD))
        _multiply_tiles(code, kind, place, beyond, r_stride)  # meanwhile the vector unit adds the sums just stored
        _fetch_some(code, ahead, far_step)
        sums = list(carried[4:])
        for row in range(TILE_ROWS):
            row_record = code.offset(record, r_stride, row)
            for half, group in ((half, group) for half in (0, 1) for group in range(kind.groups)):
                ints = _load(code, room, _SUMS * (2 * group + half) + CACHE_LINE * row, _INTS)
                at = 2 * row + half
                sums[at] = _added(code, ints, scales, group, half, row_record, sums[at])
        following.extend((place, builder.add(scales, ir.Constant(LONG, kind.panel_bytes)), beyond))
        following.extend((builder.add(ahead, far_step), *sums))
    _store_sums(code, following[4:], outputs, o_stride)


def _multiply_tiles(code: Code, kind: Kind, levels: Any, records: Any, r_stride: Any) -> None:
    """The integer sums of one block as tiles: for each group, then each half of the outputs, `[TILE_ROWS, WIDE]`."""
    builder = code.builder
    for group in range(kind.groups):
        move_tile(builder, "load", _INPUTS, builder.add(records, ir.Constant(LONG, group * BLOCK // 2)), r_stride)
        for half in (0, 1):
            total, weights = 2 * group + half, _LEVELS + half
            place = builder.add(levels, ir.Constant(LONG, 512 * group + CACHE_LINE * half))
            move_tile(builder, "load", weights, place, ir.Constant(LONG, 2 * CACHE_LINE))
            tile_call(builder, "tilezero", (tile_number(total),))
            tile_call(builder, "tdpbssd", tuple(map(tile_number, (total, _INPUTS, weights))))


_INPUTS, _LEVELS, _SUMS = 4, 5, TILE_ROWS * CACHE_LINE
"""The tile of inputs, the first of levels, and the bytes of one of sums (the first four)."""

SUMS_BYTES = 4 * _SUMS
"""Bytes of the sums of a block."""


@kind_kernel()
def open_int8_tiles(code: Code, kind: Kind) -> None:
    """Configure the current thread's unit."""
    if TILES:
        inputs, levels = (TILE_ROWS, BLOCK // kind.groups), (BLOCK // kind.groups // 4, CACHE_LINE)
        configure_tiles(code.builder, [(TILE_ROWS, CACHE_LINE)] * 4 + [inputs, levels, levels, levels])


def _fetch_some(code: Code, place: Any, size: Any) -> None:
    """Prefetch `size` bytes into the second cache, at least one line."""
    with code.steps(size, (), by=CACHE_LINE) as (k, _, _):
        code.fetch(code.builder.add(place, k), CACHE_LINE, nearest=False)
