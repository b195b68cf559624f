"""Generates the instructions of the CPU kernels: vector lanes, and sums in a fixed order.

A compiler may regroup a sum, and differently for each number of rows. Here element k goes to lane k modulo `LANES`,
each lane sums from first to last with fused multiply-adds, and the lanes are added pairwise at the end.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from inspect import Parameter, Signature
from typing import Any, NamedTuple, cast

from llvmlite import binding, ir
from numba.core import cgutils, types
from numba.extending import intrinsic

from precedent.runtime.instructions import FEATURES, limit_compiler

limit_compiler()

LANES = 16 if FEATURES.get("avx512f") else 8
"""float32 numbers in one vector register (AVX2 and wider), or in two (NEON)."""

FUSED = bool(FEATURES.get("fma")) or binding.get_process_triple().startswith(("aarch64", "arm64"))
"""Whether this processor has fused multiply-add instructions; emulating them would be far too slow."""

CACHE_LINE = 64
"""Bytes."""

SHORT, INT, LONG, FLOAT = ir.IntType(16), ir.IntType(32), ir.IntType(64), ir.FloatType()
SHORTS, INTS, FLOATS = (ir.VectorType(each, LANES) for each in (SHORT, INT, FLOAT))


Emit = Callable[..., Any]
"""Emits the instructions of a kernel: gets a `Code`, then the arguments, of which a tuple comes as a list."""


def kernel(*kinds: Any, returns: Any = types.void) -> Callable[[Emit], Callable[..., Any]]:
    """Make a kernel of a function that emits it; compiled code calls it with arguments of these numba types."""

    def made(emit: Emit) -> Callable[..., Any]:
        def typed(typing: Any, *given: Any) -> Any:
            def generate(context: Any, builder: ir.IRBuilder, signature: Any, arguments: Any) -> Any:
                values = [
                    cgutils.unpack_tuple(builder, value) if isinstance(kind, types.UniTuple) else value
                    for kind, value in zip(kinds, arguments, strict=True)
                ]
                found = emit(Code(builder), *values)
                return context.get_dummy_value() if returns is types.void else found

            return returns(*kinds), generate

        typed.__name__ = emit.__name__
        names = ("typing", *(f"argument{number}" for number in range(len(kinds))))
        parameters = [Parameter(name, Parameter.POSITIONAL_OR_KEYWORD) for name in names]
        typed.__signature__ = Signature(parameters)  # type: ignore[attr-defined]  # numba asks for it
        return cast(Callable[..., Any], intrinsic(typed))

    return made


def by_width(*kinds: Any) -> Callable[[Emit], Callable[..., Any]]:
    """Make a kernel that is called with `wide` before its other arguments: for float32 numbers, or else for bfloat16.

    `wide` is an argument of `emit`, too, which is called once for either.
    """

    def made(emit: Emit) -> Callable[..., Any]:
        def both(code: Code, wide: Any, *arguments: Any) -> None:
            with code.builder.if_else(wide) as branches:
                for branch, is_wide in zip(branches, (True, False), strict=True):
                    with branch:
                        emit(code, *arguments, wide=is_wide)

        both.__name__ = emit.__name__
        return kernel(types.boolean, *kinds)(both)

    return made


class Ahead(NamedTuple):
    """What a kernel prefetches: an address, by how many bytes it moves on with every `LANES` numbers, and how near."""

    place: Any
    step: Any
    nearest: bool


class Code:
    """Emits the instructions of one kernel."""

    def __init__(self, builder: ir.IRBuilder) -> None:
        self.builder = builder

    def offset(self, base: Any, stride: Any, index: int) -> Any:
        """The address of row `index`."""
        return self.builder.add(base, self.builder.mul(stride, ir.Constant(LONG, index)))

    def vector(self, base: Any, k: Any, size: int, kind: Any) -> Any:
        """Pointer to `LANES` numbers of `size` bytes, starting at element k."""
        place = self.builder.add(base, self.builder.mul(k, ir.Constant(LONG, size)))
        return self.builder.inttoptr(place, kind.as_pointer())

    def load(self, base: Any, k: Any, *, wide: bool) -> Any:
        """`LANES` numbers from element k on, as float32; a bfloat16 is the upper half of a float32."""
        if wide:
            return self.builder.load(self.vector(base, k, 4, FLOATS), align=4)
        return self.widened(self.builder.load(self.vector(base, k, 2, SHORTS), align=2))

    def widened(self, halves: Any) -> Any:
        """bfloat16 lanes as float32."""
        shifted = self.builder.shl(self.builder.zext(halves, INTS), same(INTS, 16))
        return self.builder.bitcast(shifted, FLOATS)

    def halves(self, numbers: Any) -> Any:
        """float32 lanes rounded to the nearest bfloat16, ties to even; NaN stays NaN."""
        builder = self.builder
        ints, shorts = (ir.VectorType(kind, numbers.type.count) for kind in (INT, SHORT))
        bits = builder.bitcast(numbers, ints)
        odd = builder.and_(builder.lshr(bits, same(ints, 16)), same(ints, 1))
        rounded = builder.lshr(builder.add(builder.add(bits, odd), same(ints, 0x7FFF)), same(ints, 16))
        is_nan = builder.fcmp_unordered("uno", numbers, numbers)
        return builder.trunc(builder.select(is_nan, same(ints, 0x7FC0), rounded), shorts)

    def rounded(self, numbers: Any, wide: bool) -> Any:
        """Lanes with the precision they have once stored: float32 unchanged, or rounded to bfloat16."""
        return numbers if wide else self.widened(self.halves(numbers))

    def store_lanes(self, numbers: Any, base: Any, k: Any, wide: bool) -> None:
        """Write `LANES` numbers from element k on, as float32 or as bfloat16."""
        if wide:
            self.builder.store(numbers, self.vector(base, k, 4, FLOATS), align=4)
        else:
            self.builder.store(self.halves(numbers), self.vector(base, k, 2, SHORTS), align=2)

    def squares(self, inputs: Any, length: Any, wide: bool) -> Any:
        """The sum of the squares of a row."""
        with self.steps(length, (same(FLOATS, 0.0),)) as (k, sums, following):
            loaded = self.load(inputs, k, wide=wide)
            following.append(self.fused(loaded, loaded, sums[0]))
        return self.across(following[0])

    def inverse_root(self, total: Any, length: Any, epsilon: Any) -> Any:
        """One over the root of (mean plus epsilon), float32."""
        builder = self.builder
        mean = builder.fdiv(total, builder.sitofp(length, FLOAT))
        kind = ir.FunctionType(FLOAT, [FLOAT])
        root = cgutils.get_or_insert_function(builder.module, kind, "llvm.sqrt.f32")
        padded = builder.fadd(mean, builder.fptrunc(epsilon, FLOAT))
        return builder.fdiv(ir.Constant(FLOAT, 1.0), builder.call(root, (padded,)))

    def spread(self, number: Any) -> Any:
        """The number in every lane."""
        builder = self.builder
        first = builder.insert_element(ir.Constant(FLOATS, ir.Undefined), number, ir.Constant(INT, 0))
        return builder.shuffle_vector(first, first, same(INTS, 0))

    @contextmanager
    def steps(
        self, length: Any, starts: tuple[Any, ...], by: int = LANES
    ) -> Iterator[tuple[Any, list[Any], list[Any]]]:
        """A loop over k from 0 in steps of `by`: yields k, the carried values, and a list to append their next ones to.

        Runs at least once.
        """
        builder, before = self.builder, self.builder.block
        loop, end = builder.append_basic_block("loop"), builder.append_basic_block("end")
        builder.branch(loop)
        builder.position_at_end(loop)
        k, carried, following = builder.phi(LONG), [builder.phi(start.type) for start in starts], list[Any]()
        yield k, carried, following
        beyond = builder.add(k, ir.Constant(LONG, by))
        k.add_incoming(ir.Constant(LONG, 0), before)
        k.add_incoming(beyond, builder.block)
        for value, start, after in zip(carried, starts, following, strict=True):
            value.add_incoming(start, before)
            value.add_incoming(after, builder.block)
        builder.cbranch(builder.icmp_signed("<", beyond, length), loop, end)
        builder.position_at_end(end)

    def cases(self, number: Any, most: int) -> Iterator[int]:
        """Every value from 1 to `most`; what is emitted in its turn runs where `number` is this value."""
        end = self.builder.append_basic_block("end")
        chosen = self.builder.switch(number, end)
        for value in range(1, most + 1):
            case = self.builder.append_basic_block("case")
            chosen.add_case(ir.Constant(LONG, value), case)
            self.builder.position_at_end(case)
            yield value
            self.builder.branch(end)
        self.builder.position_at_end(end)

    def dots(self, weights: list[Any], inputs: list[Any], length: Any, wide: bool, ahead: Sequence[Ahead]) -> list[Any]:
        """Lanes of all dot products: the first row of inputs with every row of weights, then the next row of inputs.

        Meanwhile prefetches what each of `ahead` names.
        """
        zeros, places = (same(FLOATS, 0.0),) * (len(weights) * len(inputs)), tuple(each.place for each in ahead)
        with self.steps(length, (*places, *zeros)) as (k, carried, following):
            for each, place in zip(ahead, carried, strict=False):
                self.fetch(place, len(weights) * LANES * (4 if wide else 2), nearest=each.nearest)
                following.append(self.builder.add(place, each.step))
            following.extend(self._products(weights, inputs, k, wide, carried[len(ahead) :]))
        return following[len(ahead) :]

    def _products(self, weights: list[Any], inputs: list[Any], k: Any, wide: bool, sums: list[Any]) -> list[Any]:
        """`sums`, each with its product added; the shorter side stays in registers while the longer one is loaded."""
        outs, result = len(weights), list(sums)
        if outs > len(inputs):
            held = [self.load(row, k, wide=True) for row in inputs]
            for out, weight in enumerate(weights):
                column = self.load(weight, k, wide=wide)
                for row, loaded in enumerate(held):
                    result[row * outs + out] = self.fused(column, loaded, sums[row * outs + out])
        else:
            columns = [self.load(each, k, wide=wide) for each in weights]
            for number, row in enumerate(inputs):
                loaded = self.load(row, k, wide=True)
                for out, column in enumerate(columns, start=number * outs):
                    result[out] = self.fused(column, loaded, sums[out])
        return result

    def fetch(self, place: Any, size: int, *, nearest: bool = True) -> None:
        """Prefetch the cache lines of `size` bytes without waiting; an invalid address does no harm.

        They come into the nearest cache, or into the one behind it.
        """
        builder, byte = self.builder, ir.IntType(8).as_pointer()
        kind = ir.FunctionType(ir.VoidType(), [byte, INT, INT, INT])
        function = cgutils.get_or_insert_function(builder.module, kind, "llvm.prefetch.p0i8")
        to_read, level, data = (ir.Constant(INT, number) for number in (0, 3 if nearest else 2, 1))
        for offset in range(0, size, CACHE_LINE):
            line = builder.inttoptr(builder.add(place, ir.Constant(LONG, offset)), byte)
            builder.call(function, (line, to_read, level, data))

    def totals(self, sums: list[Any]) -> Any:
        """The sum over the lanes of each vector, all in one register, by repeated halving."""
        sums = [*sums, *[same(FLOATS, 0.0)] * (2 ** (len(sums) - 1).bit_length() - len(sums))]
        size = LANES
        while size > 1:
            if len(sums) > 1:
                sums = [self._halved(left, right, size) for left, right in zip(sums[::2], sums[1::2], strict=True)]
            else:
                sums = [self._halved(sums[0], None, size)]
            size //= 2
        return sums[0]

    def _halved(self, left: Any, right: Any, size: int) -> Any:
        """In runs of `size` lanes, add the upper half to the lower; `right`'s results follow `left`'s."""
        builder, count = self.builder, left.type.count * (1 if right is None else 2)
        lower = [start + lane for start in range(0, count, size) for lane in range(size // 2)]
        kind = ir.VectorType(INT, len(lower))
        halves = (ir.Constant(kind, [lane + shift for lane in lower]) for shift in (0, size // 2))
        return builder.fadd(*(builder.shuffle_vector(left, left if right is None else right, half) for half in halves))

    def with_biases(self, totals: Any, biases: Any, outs: int) -> Any:
        """Sums of `outs` outputs per row, plus the biases of these outputs if there are any."""
        builder = self.builder
        given = builder.icmp_unsigned("!=", biases, ir.Constant(LONG, 0))
        with builder.if_else(given) as (then, otherwise):
            with then:
                kind = ir.VectorType(FLOAT, outs)
                loaded = builder.load(builder.inttoptr(biases, kind.as_pointer()), align=4)
                count = totals.type.count
                every_row = ir.Constant(ir.VectorType(INT, count), [lane % outs for lane in range(count)])
                biased = builder.fadd(totals, builder.shuffle_vector(loaded, loaded, every_row))
                from_then = builder.block
            with otherwise:
                from_otherwise = builder.block
        result = builder.phi(totals.type)
        result.add_incoming(biased, from_then)
        result.add_incoming(totals, from_otherwise)
        return result

    def store_some(self, numbers: Any, first: int, count: int, place: Any) -> None:
        """Write `count` lanes from `first` on, without conversion."""
        builder, kind = self.builder, ir.VectorType(INT, count)
        chosen = builder.shuffle_vector(numbers, numbers, ir.Constant(kind, list(range(first, first + count))))
        builder.store(chosen, builder.inttoptr(place, chosen.type.as_pointer()), align=2)

    def store(self, number: Any, place: Any) -> None:
        """Write one number as float32."""
        self.builder.store(number, self.builder.inttoptr(place, FLOAT.as_pointer()), align=4)

    def fused(self, left: Any, right: Any, total: Any) -> Any:
        """`left * right + total`, rounded once."""
        kind = ir.FunctionType(FLOATS, [FLOATS] * 3)
        name = f"llvm.fma.v{LANES}f32"
        return self.builder.call(cgutils.get_or_insert_function(self.builder.module, kind, name), (left, right, total))

    def across(self, lanes: Any) -> Any:
        """The sum of all lanes, by repeated halving."""
        return self.builder.extract_element(self.totals([lanes]), ir.Constant(INT, 0))

    def largest(self, lanes: Any) -> Any:
        """The largest of all lanes, by repeated halving."""
        builder, size = self.builder, LANES
        while size > 1:
            size //= 2
            upper = ir.Constant(ir.VectorType(INT, size), list(range(size, 2 * size)))
            lower = ir.Constant(ir.VectorType(INT, size), list(range(size)))
            left, right = (builder.shuffle_vector(lanes, lanes, half) for half in (lower, upper))
            lanes = builder.select(builder.fcmp_ordered(">", right, left), right, left)
        return builder.extract_element(lanes, ir.Constant(INT, 0))


def same(kind: Any, value: float) -> Any:
    """A constant: in every lane if `kind` is a vector, else a scalar."""
    return ir.Constant(kind, [value] * kind.count if isinstance(kind, ir.VectorType) else value)


@by_width(types.UniTuple(types.intp, 5))
def turn(code: Code, places: Any, *, wide: bool) -> None:
    """Transpose `LANES` by `LANES` numbers: rows of float32 (`wide`) or bfloat16 into columns of float32.

    Called as `(wide, (rows, row_stride, count, columns, column_stride))`; rows from `count` on become zeros.
    """
    rows, r_stride, count, columns, c_stride = places
    builder, zero = code.builder, ir.Constant(LONG, 0)
    bases = [code.offset(rows, r_stride, number) for number in range(LANES)]
    with builder.if_else(builder.icmp_signed("==", count, ir.Constant(LONG, LANES))) as branches:
        for branch, whole in zip(branches, (True, False), strict=True):
            with branch:
                lanes = [
                    code.load(base, zero, wide=wide) if whole else _if_there(code, base, number, count, wide)
                    for number, base in enumerate(bases)
                ]
                for number, column in enumerate(turned_lanes(builder, lanes)):
                    place = code.vector(code.offset(columns, c_stride, number), zero, 4, FLOATS)
                    builder.store(column, place, align=4)


@kernel(types.intp, returns=types.intp)
def read_long(code: Code, place: Any) -> Any:
    """The 64-bit integer at an address."""
    return code.builder.load(code.builder.inttoptr(place, LONG.as_pointer()), align=2)


@kernel(types.intp, types.intp)
def write_long(code: Code, place: Any, number: Any) -> None:
    """Write a 64-bit integer to an address."""
    code.builder.store(number, code.builder.inttoptr(place, LONG.as_pointer()), align=2)


@kernel(types.intp, types.float32)
def write_float(code: Code, place: Any, number: Any) -> None:
    """Write a float32 to an address."""
    code.store(number, place)


@kernel(types.intp, returns=types.intp)
def take_ticket(code: Code, counter: Any) -> Any:
    """Add one atomically to the 64-bit integer at `counter`; returns its previous value."""
    place = code.builder.inttoptr(counter, LONG.as_pointer())
    return code.builder.atomic_rmw("add", place, ir.Constant(LONG, 1), "monotonic")


@by_width(types.intp, types.intp, types.intp)
def widen(code: Code, source: Any, count: Any, target: Any, *, wide: bool) -> None:
    """Write `count` numbers (a multiple of `LANES`) as float32."""
    with code.steps(count, ()) as (k, _, _):
        code.store_lanes(code.load(source, k, wide=wide), target, k, wide=True)


def _if_there(code: Code, base: Any, number: int, count: Any, wide: bool) -> Any:
    """The numbers at `base`, or zeros if row `number` does not exist."""
    builder, before = code.builder, code.builder.block
    there, end = builder.append_basic_block("there"), builder.append_basic_block("end")
    builder.cbranch(builder.icmp_signed("<", ir.Constant(LONG, number), count), there, end)
    builder.position_at_end(there)
    found = code.load(base, ir.Constant(LONG, 0), wide=wide)
    builder.branch(end)
    builder.position_at_end(end)
    row = builder.phi(FLOATS)
    row.add_incoming(same(FLOATS, 0.0), before)
    row.add_incoming(found, there)
    return row


def turned_lanes(builder: ir.IRBuilder, lanes: list[Any]) -> list[Any]:
    """A transposed square of lanes: swaps off-diagonal blocks of halving size (Eklundh 1972)."""
    half, kind = LANES // 2, ir.VectorType(INT, LANES)
    while half:
        above = ir.Constant(kind, [lane if not lane & half else LANES + lane - half for lane in range(LANES)])
        below = ir.Constant(kind, [lane + half if not lane & half else LANES + lane for lane in range(LANES)])
        for number in range(LANES):
            if not number & half:
                upper, lower = lanes[number], lanes[number + half]
                lanes[number] = builder.shuffle_vector(upper, lower, above)
                lanes[number + half] = builder.shuffle_vector(upper, lower, below)
        half //= 2
    return lanes
