"""Instructions for products with weights of 4 to 8 bits: integer sums of 32 inputs, added up in float32.

A weight lies in bands of 32 outputs, a band in blocks of 32 inputs. Within a block four inputs of one output are
neighbours, so that one lane of an integer dot product sums them. Inputs are quantised to int8 with one scale for 32 of
them. Integer sums are exact, and an output's float32 sum takes the blocks from first to last: a row has the same bits
however many rows are computed together and whichever instructions compute them.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from inspect import Parameter, Signature
from typing import Any, NamedTuple, cast

from llvmlite import binding, ir
from numba.core import cgutils, types
from numba.extending import intrinsic

from precedent.runtime.instructions import FEATURES
from precedent_cpu.kernel_code import CACHE_LINE, FLOAT, INT, LONG, Code, Emit, kernel, same
from precedent_cpu.tile_products import configure_tiles, move_tile, tile_call, tile_number

OUTS = BLOCK = 32
"""Outputs of a band, and inputs of a block."""

WIDE = 16
"""Outputs per vector, whatever the processor's registers hold: the compiler splits wider vectors."""

RECORD = 64
"""Bytes of a quantised block of inputs: 32 codes, then the scale, negative sums of codes and sums of numbers."""

SCALE, NEGATIVE, NEGATIVE_HALVES, SUM, SUM_HALVES = 32, 36, 40, 48, 52
"""Where a record holds its float32 scale; the int32 negative sum of its codes, and those of both halves; the scale
times the sum of the codes, float32, and the same for both halves."""

TOGETHER = 4
"""Rows per kernel call at most."""

TILE_ROWS, FEW_TILE_ROWS = 16, 8
"""Rows that one call of the matrix unit's kernel computes: the last rows are computed by a kernel for fewer."""

LARGEST = 127.0
"""The largest code of an input."""

SMALLEST = 0x0DA24260
"""Bits of 1e-30: blocks whose largest number is smaller count as zero, for the reciprocal of the scale overflows."""

_ROUND = 1.5 * 2**23
_ROUND_BITS = 0x4B400000

BYTE, HALF = ir.IntType(8), ir.HalfType()
_FLOATS, _INTS = ir.VectorType(FLOAT, WIDE), ir.VectorType(INT, WIDE)
_BYTES = ir.VectorType(BYTE, 4 * WIDE)


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
    def unpacked(self) -> Kind:
        """The kind of the same weight with a byte for each code."""
        return Kind(8, self.groups, self.minima)

    @property
    def panel_bytes(self) -> int:
        """Bytes of a block's float32 scales and minima."""
        return 4 * OUTS * self.groups * (2 if self.minima else 1)


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


def _spread(code: Code, number: Any, count: int = WIDE) -> Any:
    """The number in every lane."""
    builder, kind = code.builder, ir.VectorType(number.type, count)
    first = builder.insert_element(ir.Constant(kind, ir.Undefined), number, ir.Constant(INT, 0))
    return builder.shuffle_vector(first, first, ir.Constant(ir.VectorType(INT, count), [0] * count))


def _fused(code: Code, left: Any, right: Any, total: Any) -> Any:
    return _call(code, f"llvm.fma.v{WIDE}f32", _FLOATS, (left, right, total))


def _parts(code: Code, lanes: Any, kind: Any) -> list[Any]:
    """A vector of `WIDE` ints cut into vectors of `kind`, which may have narrower lanes."""
    builder = code.builder
    whole = builder.bitcast(lanes, ir.VectorType(kind.element, 64 * 8 // kind.element.width))
    lists = (list(range(start, start + kind.count)) for start in range(0, whole.type.count, kind.count))
    return [builder.shuffle_vector(whole, whole, ir.Constant(ir.VectorType(INT, kind.count), each)) for each in lists]


def _whole(code: Code, parts: list[Any]) -> Any:
    """Vectors put together."""
    builder = code.builder
    while len(parts) > 1:
        count = 2 * parts[0].type.count
        every = ir.Constant(ir.VectorType(INT, count), list(range(count)))
        parts = [builder.shuffle_vector(a, b, every) for a, b in zip(parts[::2], parts[1::2], strict=True)]
    return parts[0]


def _dot(code: Code, total: Any, codes: Any, inputs: Any, *, signed: bool) -> Any:
    """`total` plus the products of codes (or signed levels) and signed inputs, four in each lane."""
    if UNIT == "avx512vnni":
        return _call(code, "llvm.x86.avx512.vpdpbusd.512", _INTS, (total, codes, inputs))
    part = _PART_DOTS[UNIT]
    size = 4 if UNIT == "dotprod" else 8
    kind = ir.VectorType(INT, size)
    cut = (_parts(code, each, kind) for each in (total, codes, inputs))
    return _whole(code, [part(code, *each, signed) for each in zip(*cut, strict=True)])


def _dot_avxvnni(code: Code, total: Any, codes: Any, inputs: Any, signed: bool) -> Any:
    return _call(code, "llvm.x86.avx512.vpdpbusd.256", total.type, (total, codes, inputs))


def _dot_avx2(code: Code, total: Any, codes: Any, inputs: Any, signed: bool) -> Any:
    """Sums of two products have 16 bits, which 7 bits times 8 bits do not exceed; signed levels lend their sign."""
    builder, bytes_, shorts = code.builder, ir.VectorType(BYTE, 32), ir.VectorType(ir.IntType(16), 16)
    codes, inputs = builder.bitcast(codes, bytes_), builder.bitcast(inputs, bytes_)
    if signed:
        inputs = _call(code, "llvm.x86.avx2.psign.b", bytes_, (inputs, codes))
        codes = _call(code, "llvm.abs.v32i8", bytes_, (codes, ir.Constant(ir.IntType(1), 0)))
    pairs = _call(code, "llvm.x86.avx2.pmadd.ub.sw", shorts, (codes, inputs))
    sums = _call(code, "llvm.x86.avx2.pmadd.wd", total.type, (pairs, same(shorts, 1)))
    return builder.add(total, sums)


def _dot_neon(code: Code, total: Any, codes: Any, inputs: Any, signed: bool) -> Any:
    bytes_ = ir.VectorType(BYTE, 16)
    arguments = (total, code.builder.bitcast(codes, bytes_), code.builder.bitcast(inputs, bytes_))
    return _call(code, "llvm.aarch64.neon.sdot.v4i32.v16i8", total.type, arguments)


_PART_DOTS: dict[str, Callable[..., Any]] = {"avxvnni": _dot_avxvnni, "avx2": _dot_avx2, "dotprod": _dot_neon}


def _looked_up(code: Code, indices: Any, table: Any) -> Any:
    """Bytes of a table of 16, by indices of four bits."""
    builder = code.builder
    if UNIT == "avx512vnni":
        arguments = (table, builder.bitcast(indices, _BYTES))
        return builder.bitcast(_call(code, "llvm.x86.avx512.pshuf.b.512", _BYTES, arguments), _INTS)
    if UNIT == "dotprod":
        name, size = "llvm.aarch64.neon.tbl1.v16i8", 16
    else:
        name, size = "llvm.x86.avx2.pshuf.b", 32
    kind = ir.VectorType(BYTE, size)
    cut = zip(_parts(code, table, kind), _parts(code, indices, kind), strict=True)
    return builder.bitcast(_whole(code, [_call(code, name, kind, each) for each in cut]), _INTS)


def _table(code: Code, place: Any) -> Any:
    """A table of 16 bytes, four times."""
    loaded = _load(code, place, 0, ir.VectorType(BYTE, 16))
    every = ir.Constant(ir.VectorType(INT, 64), [*range(16)] * 4)
    return code.builder.shuffle_vector(loaded, loaded, every)


def unpacked(code: Code, kind: Kind, place: Any, table: Any) -> list[Any]:
    """A block's codes, a byte each, in 16 vectors: number 2j + h has inputs 4j to 4j + 3 of outputs 16h to 16h + 15."""
    builder = code.builder
    if kind.bits == 8:
        return [_load(code, place, CACHE_LINE * number, _INTS) for number in range(16)]
    found = []
    for pair in range(8):
        both = _load(code, place, CACHE_LINE * pair, _INTS)
        for half in (both, builder.lshr(both, same(_INTS, 4))):
            found.append(builder.and_(half, same(_INTS, 0x0F0F0F0F)))
    if kind.table:
        return [_looked_up(code, each, table) for each in found]
    if kind.bits > 4:
        high, shared = kind.bits - 4, 8 // (kind.bits - 4)
        mask = {1: 0x10101010, 2: 0x30303030}[high]
        for number in range(16):
            loaded = _load(code, place, 512 + CACHE_LINE * (number // shared), _INTS)
            shift = high * (number % shared)
            moved = (
                builder.shl(loaded, same(_INTS, 4 - shift))
                if shift < 4
                else builder.lshr(loaded, same(_INTS, shift - 4))
            )
            found[number] = builder.or_(found[number], builder.and_(moved, same(_INTS, mask)))
    return found


Places = tuple[int, int, int, int, int, int, int, int, int, int, int]
"""A band's codes, its number of blocks, its scales and minima as float32; records of inputs and the bytes between their
rows; outputs and the bytes between their rows; whether the outputs hold sums of earlier blocks; the table of levels;
the offset of the codes; and the address of what is needed after these codes."""


def _emit_rows(code: Code, kind: Kind, places: Any, rows: int) -> None:
    """Emit the products of one band with `rows` rows."""
    codes, blocks, panel, records, r_stride, outputs, o_stride, begun, table_at, offset, following_at = places
    builder = code.builder
    table = _table(code, table_at) if kind.table else None
    end = builder.add(codes, builder.mul(blocks, ir.Constant(LONG, kind.block_bytes)))
    jump = builder.sub(following_at, end)
    starts = _starts(code, outputs, o_stride, begun, rows)
    rows_at = [code.offset(records, r_stride, row) for row in range(rows)]
    with code.steps(blocks, (codes, panel, *rows_at, *starts), by=1) as (_, carried, following):
        place, scales = carried[:2]
        row_places, sums = carried[2 : 2 + rows], list(carried[2 + rows :])
        near = builder.add(place, ir.Constant(LONG, AHEAD))
        over = builder.icmp_unsigned(">=", near, end)
        code.fetch(builder.select(over, builder.add(near, jump), near), kind.block_bytes)
        weights = unpacked(code, kind, place, table)
        for row, record in enumerate(row_places):
            sums[2 * row : 2 * row + 2] = _block(
                code, kind, weights, scales, record, offset, sums[2 * row : 2 * row + 2]
            )
        following.append(builder.add(place, ir.Constant(LONG, kind.block_bytes)))
        following.append(builder.add(scales, ir.Constant(LONG, kind.panel_bytes)))
        following.extend(builder.add(record, ir.Constant(LONG, RECORD)) for record in row_places)
        following.extend(sums)
    for number, total in enumerate(following[2 + rows :]):
        _store(code, total, code.offset(outputs, o_stride, number // 2), 4 * WIDE * (number % 2))


def _starts(code: Code, outputs: Any, o_stride: Any, begun: Any, rows: int) -> list[Any]:
    """Zeros, or the sums of earlier blocks."""
    there = code.builder.icmp_signed("!=", begun, ir.Constant(LONG, 0))
    stored = [
        _load(code, code.offset(outputs, o_stride, row), 64 * half, _FLOATS) for row in range(rows) for half in (0, 1)
    ]
    return [code.builder.select(there, each, same(_FLOATS, 0.0)) for each in stored]


AHEAD = 4096
"""How many bytes ahead codes are prefetched."""


def _block(
    code: Code, kind: Kind, weights: list[Any], scales: Any, record: Any, offset: Any, sums: list[Any]
) -> list[Any]:
    """Add the products of a block of codes with one row's record to the sums of both halves of its outputs."""
    builder, groups = code.builder, kind.groups
    signed = SIGNED and (kind.bits == 8 or kind.table)
    result = list(sums)
    ints = []
    for group in range(groups):
        if signed:
            ints += [same(_INTS, 0)] * 2
        else:
            negative = _load(code, record, NEGATIVE if groups == 1 else NEGATIVE_HALVES + 4 * group, INT)
            ints += [_spread(code, builder.mul(negative, builder.trunc(offset, INT)))] * 2
    for pair in range(8):
        inputs = _spread(code, _load(code, record, 4 * pair, INT))
        group = pair * groups // 8
        for half in (0, 1):
            at = 2 * group + half
            ints[at] = _dot(code, ints[at], weights[2 * pair + half], inputs, signed=signed)
    return _added(code, kind, ints, scales, record, result)


def _added(code: Code, kind: Kind, ints: list[Any], scales: Any, record: Any, sums: list[Any]) -> list[Any]:
    """Add integer sums, times the scales of weights and inputs, and the minima; always in this order."""
    builder, groups, result = code.builder, kind.groups, list(sums)
    scale = _spread(code, _load(code, record, SCALE, FLOAT))
    for at, number in enumerate(ints):
        of_weights = _load(code, scales, 4 * WIDE * at, _FLOATS)
        scaled = builder.fmul(builder.sitofp(number, _FLOATS), of_weights)
        result[at % 2] = _fused(code, scaled, scale, result[at % 2])
    if kind.minima:
        for at in range(2 * groups):
            total = _spread(code, _load(code, record, SUM if groups == 1 else SUM_HALVES + 4 * (at // 2), FLOAT))
            minima = _load(code, scales, 4 * WIDE * (2 * groups + at), _FLOATS)
            result[at % 2] = _fused(code, minima, total, result[at % 2])
    return result


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


@kind_kernel(types.intp, types.UniTuple(types.intp, 11))
def product_rows(code: Code, kind: Kind, rows: Any, places: Any) -> None:
    """The products of one band of a weight with `rows` rows, at most `TOGETHER`; see `Places`."""
    _emit_few(code, kind, rows, places)


@kind_kernel(types.intp, types.UniTuple(types.intp, 11))
def product_unpacked(code: Code, kind: Kind, rows: Any, places: Any) -> None:
    """`product_rows` of a band that was unpacked."""
    _emit_few(code, kind.unpacked, rows, places)


def _emit_few(code: Code, kind: Kind, rows: Any, places: Any) -> None:
    builder = code.builder
    if not UNIT:
        return
    end = builder.append_basic_block("end")
    chosen = builder.switch(rows, end)
    for count in range(1, TOGETHER + 1):
        case = builder.append_basic_block("case")
        chosen.add_case(ir.Constant(LONG, count), case)
        builder.position_at_end(case)
        _emit_rows(code, kind, places, count)
        builder.branch(end)
    builder.position_at_end(end)


@kind_kernel(*[types.intp] * 5)
def unpack_codes(code: Code, kind: Kind, codes: Any, blocks: Any, table: Any, offset: Any, target: Any) -> None:
    """Write a band's codes to `target`, a byte each, as levels where the matrix unit or the processor reads these."""
    builder = code.builder
    if not UNIT:
        return
    amounts = _spread(code, builder.trunc(offset, BYTE), 4 * WIDE)
    looked = _table(code, table) if kind.table else None
    with code.steps(blocks, (codes, target), by=1) as (_, (place, to), following):
        for vector, found in enumerate(unpacked(code, kind, place, looked)):
            lanes = builder.bitcast(found, _BYTES)
            if TILES or (SIGNED and not (kind.bits == 8 or kind.table)):
                lanes = builder.sub(lanes, amounts)
            _store(code, lanes, to, CACHE_LINE * vector)
        following.append(builder.add(place, ir.Constant(LONG, kind.block_bytes)))
        following.append(builder.add(to, ir.Constant(LONG, OUTS * BLOCK)))


@kernel(*[types.intp] * 3)
def quantise(code: Code, numbers: Any, blocks: Any, records: Any) -> None:
    """Quantise float32 numbers to records, 32 at a time. Infinity and NaN make the block's scale so."""
    builder = code.builder
    with code.steps(blocks, (numbers, records), by=1) as (_, (place, record), following):
        halves = [_load(code, place, 4 * WIDE * half, _FLOATS) for half in (0, 1)]
        sizes = [builder.and_(builder.bitcast(half, _INTS), same(_INTS, 0x7FFFFFFF)) for half in halves]
        larger = builder.select(builder.icmp_signed(">", *sizes), *sizes)
        bits = _call(code, f"llvm.vector.reduce.smax.v{WIDE}i32", INT, (larger,))
        largest, zero = builder.bitcast(bits, FLOAT), ir.Constant(FLOAT, 0.0)
        small = builder.icmp_signed("<", bits, ir.Constant(INT, SMALLEST))
        scale = builder.select(small, zero, builder.fdiv(largest, ir.Constant(FLOAT, LARGEST)))
        inverse = builder.select(small, zero, builder.fdiv(ir.Constant(FLOAT, LARGEST), largest))
        totals = []
        for half, loaded in enumerate(halves):
            moved = builder.fadd(builder.fmul(loaded, _spread(code, inverse)), same(_FLOATS, _ROUND))
            codes = builder.sub(builder.bitcast(moved, _INTS), same(_INTS, _ROUND_BITS))
            narrow = builder.trunc(codes, ir.VectorType(BYTE, WIDE))
            _store(code, narrow, record, WIDE * half)
            totals.append(_call(code, f"llvm.vector.reduce.add.v{WIDE}i32", INT, (builder.sext(narrow, _INTS),)))
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
        scale = _spread(code, _load(code, record, SCALE, FLOAT))
        for half in (0, 1):
            codes = builder.sext(_load(code, record, WIDE * half, ir.VectorType(BYTE, WIDE)), _INTS)
            numbers_there = builder.fmul(builder.sitofp(codes, _FLOATS), scale)
            left = builder.fsub(_load(code, place, 4 * WIDE * half, _FLOATS), numbers_there)
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
        return _load(code, source, 64 * half, _FLOATS)
    if name == "float16":
        return builder.fpext(
            builder.bitcast(_load(code, source, 32 * half, shorts), ir.VectorType(HALF, WIDE)), _FLOATS
        )
    if name == "bfloat16":
        widened = builder.zext(_load(code, source, 32 * half, shorts), _INTS)
        return builder.bitcast(builder.shl(widened, same(_INTS, 16)), _FLOATS)
    steps = _load(code, source, 16 * half, ir.VectorType(BYTE, WIDE))
    widened = builder.sext(steps, _INTS) if name == "int8" else builder.zext(steps, _INTS)
    return builder.fmul(builder.sitofp(widened, _FLOATS), _scales(code, "float16", supers, supers, half))


@kernel(*[types.intp] * 3)
def add_floats(code: Code, numbers: Any, added: Any, count: Any) -> None:
    """Add float32 numbers to others in place, `WIDE` at a time."""
    with code.steps(count, (), by=WIDE) as (k, _, _):
        place, other = (code.vector(base, k, 4, _FLOATS) for base in (numbers, added))
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
"""A band's levels, a byte each; its number of blocks; its scales and minima as float32; records and the bytes between
their rows; outputs and the bytes between their rows; whether these hold sums of earlier blocks; room for `SUMS_BYTES`
of integer sums; an address from which on to prefetch, and how many bytes for each block."""


@kind_kernel(types.UniTuple(types.intp, 11))
def product_by_tiles(code: Code, kind: Kind, places: Any) -> None:
    """The products of one unpacked band with `TILE_ROWS` rows on the matrix unit; see `TilePlaces`."""
    if TILES:
        _emit_tiles(code, kind, places, TILE_ROWS)


@kind_kernel(types.UniTuple(types.intp, 11))
def few_by_tiles(code: Code, kind: Kind, places: Any) -> None:
    """`product_by_tiles` with `FEW_TILE_ROWS` rows."""
    if TILES:
        _emit_tiles(code, kind, places, FEW_TILE_ROWS)


def _emit_tiles(code: Code, kind: Kind, places: Any, rows: int) -> None:
    levels, blocks, panel, records, r_stride, outputs, o_stride, begun, room, far, far_step = places
    builder, step = code.builder, ir.Constant(LONG, OUTS * BLOCK)
    size = 2 * kind.groups * _SUMS
    starts = _starts(code, outputs, o_stride, begun, rows)
    _tile_sums(code, kind, levels, records, r_stride, room)
    carried_from = (builder.add(levels, step), panel, records, room, far, *starts)
    with code.steps(blocks, carried_from, by=1) as (_, carried, following):
        place, scales, record, sums_at, ahead = carried[:5]
        other = builder.xor(builder.sub(sums_at, room), ir.Constant(LONG, size))
        other = builder.add(room, other)
        beyond = builder.add(record, ir.Constant(LONG, RECORD))
        _tile_sums(code, kind, place, beyond, r_stride, other)
        _fetch_some(code, ahead, far_step)
        sums = list(carried[5:])
        for row in range(rows):
            ints = [_load(code, sums_at, _SUMS * at + CACHE_LINE * row, _INTS) for at in range(2 * kind.groups)]
            row_record = code.offset(record, r_stride, row)
            sums[2 * row : 2 * row + 2] = _added(code, kind, ints, scales, row_record, sums[2 * row : 2 * row + 2])
        following.append(builder.add(place, step))
        following.append(builder.add(scales, ir.Constant(LONG, kind.panel_bytes)))
        following.extend((beyond, other, builder.add(ahead, far_step), *sums))
    for number, total in enumerate(following[5:]):
        _store(code, total, code.offset(outputs, o_stride, number // 2), 4 * WIDE * (number % 2))


def _tile_sums(code: Code, kind: Kind, levels: Any, records: Any, r_stride: Any, room: Any) -> None:
    """The integer sums of one block: for each group, then each half of the outputs, `[TILE_ROWS, WIDE]`."""
    builder, line = code.builder, ir.Constant(LONG, CACHE_LINE)
    for group in range(kind.groups):
        move_tile(builder, "load", _INPUTS, builder.add(records, ir.Constant(LONG, group * BLOCK // 2)), r_stride)
        for half in (0, 1):
            total, weights = 2 * group + half, _LEVELS + half
            place = builder.add(levels, ir.Constant(LONG, 512 * group + CACHE_LINE * half))
            move_tile(builder, "load", weights, place, ir.Constant(LONG, 2 * CACHE_LINE))
            tile_call(builder, "tilezero", (tile_number(total),))
            tile_call(builder, "tdpbssd", tuple(map(tile_number, (total, _INPUTS, weights))))
            move_tile(builder, "store", total, builder.add(room, ir.Constant(LONG, _SUMS * total)), line)


_INPUTS, _LEVELS, _SUMS = 4, 5, TILE_ROWS * CACHE_LINE
"""The tile of inputs, the first of levels, and the bytes of one of sums (the first four)."""

SUMS_BYTES = 8 * _SUMS
"""Bytes of the sums of two blocks."""


@kind_kernel(types.intp)
def open_int8_tiles(code: Code, kind: Kind, rows: Any) -> None:
    """Configure the current thread's unit for `TILE_ROWS` rows, or `FEW_TILE_ROWS` if there are no more."""
    builder, width = code.builder, BLOCK // kind.groups
    if not TILES:
        return
    with builder.if_else(builder.icmp_signed(">", rows, ir.Constant(LONG, FEW_TILE_ROWS))) as branches:
        for branch, count in zip(branches, (TILE_ROWS, FEW_TILE_ROWS), strict=True):
            with branch:
                inputs, levels = (count, width), (width // 4, CACHE_LINE)
                configure_tiles(builder, [(count, CACHE_LINE)] * 4 + [inputs, levels, levels, levels])


def _fetch_some(code: Code, place: Any, size: Any) -> None:
    """Prefetch `size` bytes into the second cache, at least one line."""
    with code.steps(size, (), by=CACHE_LINE) as (k, _, _):
        code.fetch(code.builder.add(place, k), CACHE_LINE, nearest=False)
