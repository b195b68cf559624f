"""The compiled code that each thread of a team runs for decoder layers: part by part, taking pieces in turn.

`row_layer` prepares the jobs and starts the team; `layer_job` defines a job's fields.
"""

from __future__ import annotations

from typing import Any

from numba.np.numpy_support import carray

from precedent.runtime.compiled import compiled
from precedent_cpu.attention_kernels import finish_kernel, read_long, write_long
from precedent_cpu.attention_piece import Piece
from precedent_cpu.dot_kernels import norm_kernel, take_ticket
from precedent_cpu.kernel_code import LANES
from precedent_cpu.layer_job import SEQUENCE
from precedent_cpu.layer_kernels import gated_kernel, sum_kernel, turned_head_kernel, wait_for_team
from precedent_cpu.product_pieces import PIECE, product_piece
from precedent_cpu.row_attention import attend
from precedent_cpu.tile_kernels import DEPTH, close_tiles, open_tiles
from precedent_cpu.tile_products import pack_inputs, piece_by_tiles

_FIRST, _ROWS, _PREFIX, _KEYS, _KEY_HEAD, _KEY_ROW, _VALUES, _VALUE_HEAD, _VALUE_ROW = range(9)
_STARTS, _COLUMNS, _SKIPPED, _HIDDEN = range(9, SEQUENCE)
"""Indices of a sequence's numbers (`SEQUENCE`)."""

_norm_narrow, _norm_wide = (norm_kernel(wide=wide, wide_outputs=True) for wide in (False, True))
_same_norm_narrow, _same_norm_wide = (norm_kernel(wide=wide) for wide in (False, True))
_query_narrow, _query_wide = (turned_head_kernel(wide=wide, as_query=True) for wide in (False, True))
_key_narrow, _key_wide = (turned_head_kernel(wide=wide, as_query=False) for wide in (False, True))
_finish_narrow, _finish_wide = (finish_kernel(wide=wide, wide_outputs=True) for wide in (False, True))
_gated_narrow, _gated_wide = (gated_kernel(wide=wide) for wide in (False, True))
_sum_narrow, _sum_wide = (sum_kernel(wide=wide) for wide in (False, True))


def layers_work(jobs):  # type: ignore[no-untyped-def]  # numba takes its types from the signature
    """Compute one layer after the other, each updating `hidden_rows`; keys and values go into their sequences' KV."""
    every = carray(jobs, carray(jobs, 1)[0].layers)
    if every[0].tiles:
        open_tiles()
    for number in range(len(every)):
        if number:
            wait_for_team(every[number].barrier)
        _layer(every[number])
    if every[0].tiles:
        close_tiles()


@compiled
def _layer(job: Any) -> None:
    """One layer."""
    scratch = job.scratch + take_ticket(job.base) * job.scratch_bytes
    _norm(job, 1, job.hidden_rows, job.attention_norm, job.attention_norm_epsilon)
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
        _norm_and_add(job, 6, before, job.attended_norm, job.attended_norm_epsilon, after, job.gate_norm)
    else:
        _add_product(job, 5, job.attended, width, job.output, job.output_bias, before, after, scratch)
        wait_for_team(job.barrier)
        _norm(job, 6, after, job.gate_norm, job.gate_norm_epsilon)
    wait_for_team(job.barrier)
    _gate(job, 7, scratch)
    wait_for_team(job.barrier)
    if job.gated_norm:
        _multiply(job, 8, job.gated, job.inner, job.down, job.down_bias, scratch)
        wait_for_team(job.barrier)
        _norm_and_add(job, 9, after, job.gated_norm, job.gated_norm_epsilon, before, 0)
    else:
        _add_product(job, 8, job.gated, job.inner, job.down, job.down_bias, after, before, scratch)


@compiled
def _next(job: Any, part: int) -> int:
    """Take the next piece of a part."""
    piece: int = take_ticket(job.base + 8 * part)
    return piece


@compiled
def _size(job: Any) -> int:
    """Bytes of a number in the model's dtype."""
    return 4 if job.wide else 2


@compiled
def _norm(job: Any, part: int, inputs: int, weight: int, epsilon: float) -> None:
    """Write every row's norm to `normed`."""
    while True:
        row = _next(job, part)
        if row >= job.rows:
            return
        _norm_row(job, row, inputs, weight, epsilon)


@compiled
def _norm_row(job: Any, row: int, inputs: int, weight: int, epsilon: float) -> None:
    source, target = inputs + row * job.hidden * _size(job), job.normed + 4 * row * job.hidden
    if job.wide:
        _norm_wide(source, weight, job.hidden, epsilon, job.norm_offset, target)
    else:
        _norm_narrow(source, weight, job.hidden, epsilon, job.norm_offset, target)


@compiled
def _norm_and_add(job: Any, part: int, before: int, weight: int, epsilon: float, after: int, following: int) -> None:
    """Norm every row of a product and add it to `before`, the residual; then write the norm before the gate, if any."""
    while True:
        row = _next(job, part)
        if row >= job.rows:
            return
        at = row * job.hidden * _size(job)
        _norm_in_place(job, job.summand + at, job.hidden, weight, epsilon)
        _add(job, before + at, job.summand + at, job.hidden, after + at)
        if following:
            _norm_row(job, row, after, following, job.gate_norm_epsilon)


@compiled
def _add(job: Any, left: int, right: int, count: int, outputs: int) -> None:
    if job.wide:
        _sum_wide(left, right, count, outputs)
    else:
        _sum_narrow(left, right, count, outputs)


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
def _project(job: Any, part: int, scratch: int) -> None:
    """Compute queries, keys and values of every row."""
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
    if job.wide:
        _query_wide(source, cosines, sines, job.dim, job.scale, target)
    else:
        _query_narrow(source, cosines, sines, job.dim, job.scale, target)


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
    if job.wide:
        _key_wide(source, cosines, sines, job.dim, 1.0, target)
    else:
        _key_narrow(source, cosines, sines, job.dim, 1.0, target)
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
    """Norm a head or a row, in the model's dtype."""
    if job.wide:
        _same_norm_wide(numbers, weight, length, epsilon, job.norm_offset, numbers)
    else:
        _same_norm_narrow(numbers, weight, length, epsilon, job.norm_offset, numbers)


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
    """Attention of `count` rows of a sequence with one key/value head."""
    groups, dim = job.heads // job.kv_heads, job.dim
    start, rows = read_long(sequence + 8 * _FIRST), read_long(sequence + 8 * _ROWS)
    most, queries = job.together * groups, start * job.heads + (head * rows + first) * groups
    sums = scratch + 4 * most * job.width
    totals = sums + 4 * most * dim
    block, skipped = totals + 4 * (most + LANES), read_long(sequence + 8 * _SKIPPED)
    piece = Piece(
        job.queries + 4 * dim * queries, first, count * groups, groups, dim,
        _spot(sequence, _KEYS, head, skipped), read_long(sequence + 8 * _KEY_ROW),
        _spot(sequence, _VALUES, head, skipped), read_long(sequence + 8 * _VALUE_ROW),
        read_long(sequence + 8 * _PREFIX) - skipped, job.wide != 0, job.width,
        scratch, sums, totals, block, read_long(sequence + 8 * _STARTS), read_long(sequence + 8 * _COLUMNS),
        read_long(sequence + 8 * _HIDDEN), job.softcap,
    )  # fmt: skip
    attend(piece)
    for query in range(count * groups):
        row = start + first + query // groups
        target = job.attended + 4 * dim * (row * job.heads + head * groups + query % groups)
        if job.wide:
            _finish_wide(sums + 4 * query * dim, dim, totals + 4 * query, target)
        else:
            _finish_narrow(sums + 4 * query * dim, dim, totals + 4 * query, target)


@compiled
def _add_product(
    job: Any, part: int, inputs: int, length: int, weight: int, bias: int, before: int, outputs: int, scratch: int
) -> None:
    """Compute a product of every row and add it to `before`, the residual."""
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
            _add(job, before + at, job.summand + at, count, outputs + at)


@compiled
def _multiply(job: Any, part: int, inputs: int, length: int, weight: int, bias: int, scratch: int) -> None:
    """Compute a product of every row, to be normed."""
    _pack(job, inputs, length, scratch)
    while True:
        piece = _next(job, part)
        if piece >= _pieces(job.hidden):
            return
        _product(job, piece, inputs, length, weight, bias, job.summand, job.hidden, scratch)


@compiled
def _gate(job: Any, part: int, scratch: int) -> None:
    """Compute both products of the gated linear unit, and the gate."""
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
            if job.wide:
                _gated_wide(gates, ups, count, job.gate_slope, job.gate_cubic, target)
            else:
                _gated_narrow(gates, ups, count, job.gate_slope, job.gate_cubic, target)
