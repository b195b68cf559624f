"""The compiled code that each thread of a team runs for decoder layers: part by part, taking pieces in turn.

`JOB` defines the fields that the threads read; `row_layer` prepares the jobs and starts the team. Every number is
rounded where transformers' own modules round it, so a fused layer gives the same result as its modules do one by one.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
from llvmlite import ir
from numba.core import types
from numba.np.numpy_support import carray

from precedent.runtime.compiled import compiled
from precedent_cpu.kernel_code import (
    FLOAT,
    FLOATS,
    LANES,
    LONG,
    Code,
    by_width,
    kernel,
    read_long,
    same,
    take_ticket,
    write_long,
)
from precedent_cpu.norm import norm_kernel
from precedent_cpu.product_kernels import PIECE, product_piece
from precedent_cpu.quantised_kernels import BLOCK, OUTS, RECORD
from precedent_cpu.quantised_products import (
    Rows,
    piece_bands,
    piece_place,
    piece_product,
    pieces_of,
    quantise_rest,
    quantise_row,
)
from precedent_cpu.row_attention import Piece, attend, exponential, finish
from precedent_cpu.tile_products import DEPTH, close_tiles, open_tiles, pack_inputs, piece_by_tiles

PARTS = 9
"""Parts of a layer, with a barrier between each two."""

WEIGHTS = ("query", "key", "value", "output", "gate", "up", "down")
NORMS = ("attention_norm", "attended_norm", "gate_norm", "gated_norm", "query_norm", "key_norm")
CONSTANTS = ("scale", "softcap", "norm_offset", "gate_slope", "gate_cubic")
OF_THE_CALL = (
    "base", "hidden_rows", "sequences", "cosines", "sines", "rows", "num_sequences", "width", "together",
    "normed", "queried", "keyed", "valued", "queries", "attended", "summand", "middle", "gates", "ups", "gated",
    "scratch", "scratch_bytes", "layers",
)  # fmt: skip
OF_THE_LAYER = (
    *WEIGHTS, *(f"{name}_bias" for name in WEIGHTS), *NORMS,
    "barrier", "wide", "tiles", "quantised", "hidden", "inner", "heads", "kv_heads", "dim",
)  # fmt: skip

JOB = np.dtype(
    [("taken", "i8", (PARTS + 1,)), *((name, "i8") for name in (*OF_THE_CALL, *OF_THE_LAYER))]
    + [(name, "f8") for name in (*CONSTANTS, *(f"{name}_epsilon" for name in NORMS))]
)
"""Counters of the pieces taken, then counts and addresses (0: none).

`layers` is the number of consecutive jobs, one per layer, that start here; `hidden_rows` is a layer's input and output.
float32: `normed` `[rows, hidden]`, `queries` and `attended` `[rows, heads, dim]`, `gated` `[rows, inner]`, the biases
and each thread's scratch. In the model's dtype: the weights, `hidden_rows`, `summand` and `middle` `[rows, hidden]`,
`queried`, `keyed` and `valued` `[rows, heads, dim]`, `gates` and `ups` `[rows, inner]`.

`quantised` is 0, or how many records of eight bits a row of a product's inputs has: 2 are those of 16 bits. Then the
weights are addresses of `quantised_products.FIELDS`, everything else is float32, `normed`, `attended` and `gated` hold
the records, first those of all rows, then what these leave, and products have as many rows before they are added up.
"""

SEQUENCE = 14
"""int64 numbers per sequence in the table `sequences`: its first row, number of rows and prefix length; the address of
its keys and the strides in bytes of their heads and rows; the same for its values; of its `Sight`, the
arrays `starts` and `columns`, `skipped`, the array `hidden`, and `path`."""


MOST_SQUARE = 2.0**60
"""Squares of gates are at most this, far beyond where the sigmoid is 0 or 1."""


def turned_head_kernel(*, as_query: bool) -> Callable[..., None]:
    """A kernel that applies rotary embeddings to one head (Su et al. 2104.09864, halves as in GPT-NeoX).

    Called as `(wide, numbers, cosines, sines, dim, scale, target)`. A query is multiplied by `scale` and written as
    float32; a key is written in the model's dtype.
    """

    @by_width(*[types.intp] * 4, types.float64, types.intp)
    def turned_head(
        code: Code, numbers: Any, cosines: Any, sines: Any, dim: Any, scale: Any, target: Any, *, wide: bool
    ) -> None:
        builder = code.builder
        half, spread = builder.lshr(dim, ir.Constant(LONG, 1)), code.spread(builder.fptrunc(scale, FLOAT))
        with code.steps(half, ()) as (k, _, _):
            places = (k, builder.add(k, half))
            left, right = (code.load(numbers, place, wide=wide) for place in places)
            for place, straight, across in ((places[0], left, builder.fneg(right)), (places[1], right, left)):
                kept = builder.fmul(straight, code.load(cosines, place, wide=wide))
                turned = builder.fmul(across, code.load(sines, place, wide=wide))
                total = code.rounded(builder.fadd(code.rounded(kept, wide), code.rounded(turned, wide)), wide)
                number = builder.fmul(total, spread) if as_query else total
                code.store_lanes(number, target, place, wide or as_query)

    return turned_head


@by_width(*[types.intp] * 3, *[types.float64] * 2, types.intp)
def _gated(
    code: Code, gates: Any, others: Any, count: Any, slope: Any, cubic: Any, outputs: Any, *, wide: bool
) -> None:
    """A gated linear unit (Shazeer 2002.05202): writes x * sigmoid(slope * x + cubic * x^3) times the other as float32.

    x is the gate. A slope of 1 is SiLU.
    """
    builder = code.builder
    slopes, cubics = (code.spread(builder.fptrunc(number, FLOAT)) for number in (slope, cubic))
    with code.steps(count, ()) as (k, _, _):
        opened = _opened(code, builder, code.load(gates, k, wide=wide), slopes, cubics)
        opened = code.rounded(opened, wide)
        passed = builder.fmul(opened, code.load(others, k, wide=wide))
        code.store_lanes(code.rounded(passed, wide), outputs, k, wide=True)


@by_width(*[types.intp] * 4)
def _add(code: Code, left: Any, right: Any, count: Any, outputs: Any, *, wide: bool) -> None:
    with code.steps(count, ()) as (k, _, _):
        total = code.builder.fadd(code.load(left, k, wide=wide), code.load(right, k, wide=wide))
        code.store_lanes(total, outputs, k, wide)


@kernel(types.intp)
def wait_for_team(code: Code, barrier: Any) -> None:
    """Wait until every thread of the team gets here; `barrier` is the address of OpenMP's own function."""
    function = ir.FunctionType(ir.VoidType(), [])
    code.builder.call(code.builder.inttoptr(barrier, function.as_pointer()), ())


def _opened(code: Code, builder: ir.IRBuilder, x: Any, slopes: Any, cubics: Any) -> Any:
    """Compute x / (1 + exp(-z)), z = slope * x + cubic * x^3; exp sees only numbers up to 0."""
    zero, one, most = same(FLOATS, 0.0), same(FLOATS, 1.0), same(FLOATS, MOST_SQUARE)
    square = builder.fmul(x, x)
    square = builder.select(builder.fcmp_ordered("<", square, most), square, most)  # 0 times infinity is not a number
    z = builder.fmul(x, code.fused(cubics, square, slopes))
    negative = builder.fcmp_ordered("<", x, zero)
    power = exponential(code, builder, builder.select(negative, z, builder.fneg(z)))
    above = builder.select(negative, builder.fmul(x, power), x)
    return builder.fdiv(above, builder.fadd(one, power))


_FIRST, _ROWS, _PREFIX, _KEYS, _KEY_HEAD, _KEY_ROW, _VALUES, _VALUE_HEAD, _VALUE_ROW = range(9)
_STARTS, _COLUMNS, _SKIPPED, _HIDDEN, _PATH = range(9, SEQUENCE)
"""Indices of a sequence's numbers (`SEQUENCE`)."""

_norm_to_floats, _norm_in_kind = (norm_kernel(as_floats=as_floats) for as_floats in (True, False))
_turn_query, _turn_key = (turned_head_kernel(as_query=as_query) for as_query in (True, False))


def layers_work(jobs):  # type: ignore[no-untyped-def]  # numba takes its types from the signature
    """Compute one layer after the other, each updating `hidden_rows`; keys and values go into their sequences' KV."""
    every = carray(jobs, carray(jobs, 1)[0].layers)
    if every[0].tiles:
        open_tiles()
    for number in range(len(every)):
        if number:
            wait_for_team(every[number].barrier)
        _layer(every[number])
    if every[0].tiles or every[0].quantised:
        close_tiles()


def attention_work(jobs):  # type: ignore[no-untyped-def]
    """Compute the attention of one job alone, from `queries` to `attended`."""
    job = carray(jobs, 1)[0]
    _attention(job, 1, job.scratch + take_ticket(job.base) * job.scratch_bytes)


@compiled
def _layer(job: Any) -> None:
    scratch = job.scratch + take_ticket(job.base) * job.scratch_bytes
    _norm(job, 1, job.hidden_rows, job.attention_norm, job.attention_norm_epsilon, scratch)
    wait_for_team(job.barrier)
    _project(job, 2, scratch)
    wait_for_team(job.barrier)
    _place(job, 3)
    wait_for_team(job.barrier)
    _attention(job, 4, scratch)
    wait_for_team(job.barrier)
    width, before, after = job.heads * job.dim, job.hidden_rows, job.middle
    if job.attended_norm:
        _multiply(job, 5, job.attended, width, job.output, job.output_bias, scratch)
        wait_for_team(job.barrier)
        _norm_and_add(job, 6, before, job.attended_norm, job.attended_norm_epsilon, after, job.gate_norm, scratch)
    else:
        _add_product(job, 5, job.attended, width, job.output, job.output_bias, before, after, scratch)
        wait_for_team(job.barrier)
        _norm(job, 6, after, job.gate_norm, job.gate_norm_epsilon, scratch)
    wait_for_team(job.barrier)
    _gate(job, 7, scratch)
    wait_for_team(job.barrier)
    if job.gated_norm:
        _multiply(job, 8, job.gated, job.inner, job.down, job.down_bias, scratch)
        wait_for_team(job.barrier)
        _norm_and_add(job, 9, after, job.gated_norm, job.gated_norm_epsilon, before, 0, scratch)
    else:
        _add_product(job, 8, job.gated, job.inner, job.down, job.down_bias, after, before, scratch)


@compiled
def _next(job: Any, part: int) -> int:
    piece: int = take_ticket(job.base + 8 * part)
    return piece


@compiled
def _size(job: Any) -> int:
    return 4 if job.wide else 2


@compiled
def _norm(job: Any, part: int, inputs: int, weight: int, epsilon: float, scratch: int) -> None:
    """Write every row's norm to `normed`."""
    while True:
        row = _next(job, part)
        if row >= job.rows:
            return
        _norm_row(job, row, inputs, weight, epsilon, scratch)


@compiled
def _norm_row(job: Any, row: int, inputs: int, weight: int, epsilon: float, scratch: int) -> None:
    source = inputs + row * job.hidden * _size(job)
    target = scratch if job.quantised else job.normed + 4 * row * job.hidden
    _norm_to_floats(job.wide != 0, source, weight, job.hidden, epsilon, job.norm_offset, target)
    if job.quantised:
        _quantise(job, scratch, job.hidden, job.normed, job.hidden, row, 0)


@compiled
def _record(records: int, length: int, row: int, first: int) -> int:
    """Address of the record of number `first` of a row."""
    return records + row * (length // BLOCK + 1) * RECORD + first // BLOCK * RECORD


@compiled
def _quantise(job: Any, numbers: int, count: int, records: int, length: int, row: int, first: int) -> None:
    """Quantise numbers from number `first` of a row on. With two records they become what the first one leaves."""
    place = _record(records, length, row, first)
    quantise_row(numbers, count, place)
    if job.quantised > 1:
        quantise_rest(numbers, count, place, _record(records, length, job.rows + row, first), numbers)


@compiled
def _num_records(job: Any) -> int:
    count: int = job.rows * job.quantised
    return count


@compiled
def _norm_and_add(
    job: Any, part: int, before: int, weight: int, epsilon: float, after: int, following: int, scratch: int
) -> None:
    """Norm every row of a product and add it to `before`, the residual; then write the norm before the gate, if any."""
    while True:
        row = _next(job, part)
        if row >= job.rows:
            return
        at = row * job.hidden * _size(job)
        _norm_in_place(job, job.summand + at, job.hidden, weight, epsilon)
        _add(job.wide != 0, before + at, job.summand + at, job.hidden, after + at)
        if following:
            _norm_row(job, row, after, following, job.gate_norm_epsilon, scratch)


@compiled
def _product(
    job: Any, piece: int, inputs: int, length: int, weight: int, bias: int, outputs: int, num_outs: int, scratch: int
) -> None:
    """Compute one piece of a product's outputs for every row; with tiles, the inputs are packed in `scratch`."""
    size = _size(job)
    places = (weight, size * length, inputs, 4 * length, length, bias, outputs, size * num_outs)
    first = piece * PIECE
    last = min(first + PIECE, num_outs)
    if job.tiles and length % DEPTH == 0:
        piece_by_tiles(places, job.rows, first, last, scratch)
    else:
        product_piece(places, job.rows, first, last, job.wide != 0)


@compiled
def _pack(job: Any, inputs: int, length: int, scratch: int) -> None:
    """With tiles, pack a product's inputs: each thread packs its own copy, since waiting for another takes longer."""
    if job.tiles and length % DEPTH == 0:
        pack_inputs(inputs, 4 * length, length, job.rows, scratch)


@compiled
def _pieces(num_outs: int) -> int:
    return (num_outs + PIECE - 1) // PIECE


@compiled
def _piece(
    job: Any, weight: int, piece: int, ahead: int, inputs: int, length: int, outputs: int, num_outs: int, scratch: int
) -> None:
    """Compute one piece of a quantised product for every row; meanwhile the bands at `ahead` are prefetched."""
    records = _num_records(job)
    piece_product(
        weight, piece, ahead, Rows(inputs, (length // BLOCK + 1) * RECORD, records, outputs, 4 * num_outs), scratch
    )
    first = piece * OUTS * piece_bands(weight, records)
    count = min(OUTS * piece_bands(weight, records), num_outs - first)
    for row in range(job.rows, records):
        place, rest = outputs + 4 * ((row - job.rows) * num_outs + first), outputs + 4 * (row * num_outs + first)
        _add(True, place, rest, count, place)


@compiled
def _projected_piece(job: Any, number: int) -> tuple[int, int]:
    """The weight and the piece of it of number `number` among queries, keys and values; 0 beyond the last."""
    for weight in (job.query, job.key, job.value):
        pieces = pieces_of(weight, _num_records(job))
        if number < pieces:
            return weight, number
        number -= pieces
    return 0, 0


@compiled
def _project_quantised(job: Any, part: int, scratch: int) -> None:
    weight, piece = _projected_piece(job, _next(job, part))
    while weight:
        following, beyond = _projected_piece(job, _next(job, part))
        ahead = piece_place(following, beyond, _num_records(job)) if following else 0
        if weight == job.query:
            outputs, num_outs = job.queried, job.heads * job.dim
        elif weight == job.key:
            outputs, num_outs = job.keyed, job.kv_heads * job.dim
        else:
            outputs, num_outs = job.valued, job.kv_heads * job.dim
        _piece(job, weight, piece, ahead, job.normed, job.hidden, outputs, num_outs, scratch)
        weight, piece = following, beyond


@compiled
def _project(job: Any, part: int, scratch: int) -> None:
    if job.quantised:
        _project_quantised(job, part, scratch)
        return
    _pack(job, job.normed, job.hidden, scratch)
    queries, keys = _pieces(job.heads * job.dim), _pieces(job.kv_heads * job.dim)
    wide, narrow = job.heads * job.dim, job.kv_heads * job.dim
    while True:
        piece = _next(job, part)
        if piece < queries:
            _product(job, piece, job.normed, job.hidden, job.query, job.query_bias, job.queried, wide, scratch)
        elif piece < queries + keys:
            piece -= queries
            _product(job, piece, job.normed, job.hidden, job.key, job.key_bias, job.keyed, narrow, scratch)
        elif piece < queries + 2 * keys:
            piece -= queries + keys
            _product(job, piece, job.normed, job.hidden, job.value, job.value_bias, job.valued, narrow, scratch)
        else:
            return


@compiled
def _place(job: Any, part: int) -> None:
    """Apply rotary embeddings to queries and keys, and write keys and values into their sequence's KV."""
    while True:
        row = _next(job, part)
        if row >= job.rows:
            return
        sequence = job.sequences
        while row >= read_long(sequence + 8 * _FIRST) + read_long(sequence + 8 * _ROWS):
            sequence += 8 * SEQUENCE
        for head in range(job.heads):
            _place_query(job, row, head, sequence)
        for head in range(job.kv_heads):
            _place_key(job, row, head, sequence)


@compiled
def _place_query(job: Any, row: int, head: int, sequence: int) -> None:
    """Write a query to its row of `queries`: ordered by sequence, key/value head, row, head within the group."""
    size, groups = _size(job) * job.dim, job.heads // job.kv_heads
    source = job.queried + (row * job.heads + head) * size
    if job.query_norm:
        _norm_in_place(job, source, job.dim, job.query_norm, job.query_norm_epsilon)
    first, rows = read_long(sequence + 8 * _FIRST), read_long(sequence + 8 * _ROWS)
    place = first * job.heads + (head // groups * rows + row - first) * groups + head % groups
    cosines, sines, target = job.cosines + row * size, job.sines + row * size, job.queries + 4 * place * job.dim
    _turn_query(job.wide != 0, source, cosines, sines, job.dim, job.scale, target)


@compiled
def _place_key(job: Any, row: int, head: int, sequence: int) -> None:
    """Write a key and its value into their sequence's KV."""
    size = _size(job) * job.dim
    source = job.keyed + (row * job.kv_heads + head) * size
    if job.key_norm:
        _norm_in_place(job, source, job.dim, job.key_norm, job.key_norm_epsilon)
    at = read_long(sequence + 8 * _PREFIX) + row - read_long(sequence + 8 * _FIRST)
    target = _spot(sequence, _KEYS, head, at)
    cosines, sines = job.cosines + row * size, job.sines + row * size
    _turn_key(job.wide != 0, source, cosines, sines, job.dim, 1.0, target)
    value, target = job.valued + (row * job.kv_heads + head) * size, _spot(sequence, _VALUES, head, at)
    for offset in range(0, size, 8):
        write_long(target + offset, read_long(value + offset))


@compiled
def _spot(sequence: int, kind: int, head: int, at: int) -> int:
    """Address of a key or value: base, then head by its stride, then row by its stride."""
    by_head, by_row = read_long(sequence + 8 * (kind + 1)), read_long(sequence + 8 * (kind + 2))
    spot: int = read_long(sequence + 8 * kind) + head * by_head + at * by_row
    return spot


@compiled
def _norm_in_place(job: Any, numbers: int, length: int, weight: int, epsilon: float) -> None:
    _norm_in_kind(job.wide != 0, numbers, weight, length, epsilon, job.norm_offset, numbers)


@compiled
def _attention(job: Any, part: int, scratch: int) -> None:
    """Write every row's attention to `attended`; a piece is one key/value head and some rows of a sequence."""
    piece = _next(job, part)
    done, sequence = 0, job.sequences
    for _ in range(job.num_sequences):
        rows = read_long(sequence + 8 * _ROWS)
        blocks = (rows + job.together - 1) // job.together
        while piece < done + job.kv_heads * blocks:
            head, first = (piece - done) // blocks, (piece - done) % blocks * job.together
            _attend(job, sequence, head, first, min(job.together, rows - first), scratch)
            piece = _next(job, part)
        done += job.kv_heads * blocks
        sequence += 8 * SEQUENCE


@compiled
def _attend(job: Any, sequence: int, head: int, first: int, count: int, scratch: int) -> None:
    groups, dim = job.heads // job.kv_heads, job.dim
    start, rows = read_long(sequence + 8 * _FIRST), read_long(sequence + 8 * _ROWS)
    most, queries = job.together * groups, start * job.heads + (head * rows + first) * groups
    sums = scratch + 4 * most * job.width
    totals = sums + 4 * most * dim
    block, skipped = totals + 4 * (most + LANES), read_long(sequence + 8 * _SKIPPED)
    shared = first if read_long(sequence + 8 * _PATH) else 0
    piece = Piece(
        job.queries + 4 * dim * queries, first, count * groups, groups, dim,
        _spot(sequence, _KEYS, head, skipped), read_long(sequence + 8 * _KEY_ROW),
        _spot(sequence, _VALUES, head, skipped), read_long(sequence + 8 * _VALUE_ROW),
        read_long(sequence + 8 * _PREFIX) - skipped + shared, shared, job.wide != 0, job.width,
        scratch, sums, totals, block, read_long(sequence + 8 * _STARTS), read_long(sequence + 8 * _COLUMNS),
        read_long(sequence + 8 * _HIDDEN), job.softcap,
    )  # fmt: skip
    attend(piece)
    for query in range(count * groups):
        row, at, own = start + first + query // groups, head * groups + query % groups, sums + 4 * query * dim
        target = own if job.quantised else job.attended + 4 * dim * (row * job.heads + at)
        finish(job.wide != 0, own, dim, totals + 4 * query, target)
        if job.quantised:
            _quantise(job, own, dim, job.attended, job.heads * dim, row, at * dim)


@compiled
def _add_product(
    job: Any, part: int, inputs: int, length: int, weight: int, bias: int, before: int, outputs: int, scratch: int
) -> None:
    """Compute a product of every row and add it to `before`, the residual."""
    if job.quantised:
        _add_quantised(job, part, inputs, length, weight, before, outputs, scratch)
        return
    _pack(job, inputs, length, scratch)
    size, pieces = _size(job), _pieces(job.hidden)
    while True:
        piece = _next(job, part)
        if piece >= pieces:
            return
        _product(job, piece, inputs, length, weight, bias, job.summand, job.hidden, scratch)
        count = min(PIECE, job.hidden - piece * PIECE)
        for row in range(job.rows):
            at = (row * job.hidden + piece * PIECE) * size
            _add(job.wide != 0, before + at, job.summand + at, count, outputs + at)


@compiled
def _add_quantised(
    job: Any, part: int, inputs: int, length: int, weight: int, before: int, outputs: int, scratch: int
) -> None:
    """`_add_product` of a quantised weight; nothing is added if `before` is 0."""
    records = _num_records(job)
    piece, pieces, width = _next(job, part), pieces_of(weight, records), OUTS * piece_bands(weight, records)
    while piece < pieces:
        following = _next(job, part)
        ahead = piece_place(weight, following, records)
        _piece(job, weight, piece, ahead, inputs, length, job.summand, job.hidden, scratch)
        if before:
            count = min(width, job.hidden - piece * width)
            for row in range(job.rows):
                at = 4 * (row * job.hidden + piece * width)
                _add(True, before + at, job.summand + at, count, outputs + at)
        piece = following


@compiled
def _multiply(job: Any, part: int, inputs: int, length: int, weight: int, bias: int, scratch: int) -> None:
    if job.quantised:
        _add_quantised(job, part, inputs, length, weight, 0, 0, scratch)
        return
    _pack(job, inputs, length, scratch)
    while True:
        piece = _next(job, part)
        if piece >= _pieces(job.hidden):
            return
        _product(job, piece, inputs, length, weight, bias, job.summand, job.hidden, scratch)


@compiled
def _gate(job: Any, part: int, scratch: int) -> None:
    """Compute both products of the gated linear unit, and the gate."""
    if job.quantised:
        _gate_quantised(job, part, scratch)
        return
    _pack(job, job.normed, job.hidden, scratch)
    size, pieces = _size(job), _pieces(job.inner)
    while True:
        piece = _next(job, part)
        if piece >= pieces:
            return
        _product(job, piece, job.normed, job.hidden, job.gate, job.gate_bias, job.gates, job.inner, scratch)
        _product(job, piece, job.normed, job.hidden, job.up, job.up_bias, job.ups, job.inner, scratch)
        count = min(PIECE, job.inner - piece * PIECE)
        for row in range(job.rows):
            at = row * job.inner + piece * PIECE
            gates, ups, target = job.gates + size * at, job.ups + size * at, job.gated + 4 * at
            _gated(job.wide != 0, gates, ups, count, job.gate_slope, job.gate_cubic, target)


@compiled
def _gate_quantised(job: Any, part: int, scratch: int) -> None:
    """`_gate` of quantised weights."""
    records = _num_records(job)
    width = OUTS * piece_bands(job.gate, records)
    piece, pieces = _next(job, part), pieces_of(job.gate, records)
    while piece < pieces:
        following = _next(job, part)
        ahead, beside = piece_place(job.gate, following, records), piece_place(job.up, piece, records)
        _piece(job, job.gate, piece, beside, job.normed, job.hidden, job.gates, job.inner, scratch)
        _piece(job, job.up, piece, ahead, job.normed, job.hidden, job.ups, job.inner, scratch)
        first = piece * width
        count = min(width, job.inner - first)
        for row in range(job.rows):
            at = 4 * (row * job.inner + first)
            gates, ups = job.gates + at, job.ups + at
            _gated(True, gates, ups, count, job.gate_slope, job.gate_cubic, gates)
            _quantise(job, gates, count, job.gated, job.inner, row, first)
        piece = following
