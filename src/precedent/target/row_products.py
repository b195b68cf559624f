"""The product of a few rows with a weight as it lies in memory: no packed copy, no row waits for another.

A step of decoding multiplies one to some dozens of rows with every weight of the model, which is as fast as the weights
can be read. The loops of `dot_kernels` run on torch's own threads (OpenMP's team of the calling thread), which take
pieces of the output in turn. A row's result does not depend on the number of rows or threads: plain decoding and the
verification of a tree round alike.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import torch
from numba import cfunc, types
from numba.np.numpy_support import carray
from torch import Tensor

from precedent.compiled import compiled
from precedent.target.dot_kernels import FUSED, LANES, Places, dot_block, take_ticket, widen

PIECE = 64
"""Outputs that a thread takes in turn."""

WIDENED_ABOVE = 4
"""Input rows above which bfloat16 weights are written out as float32 once instead of widened for each block."""

_1x8, _1x8_wide = (dot_block(8, 1, wide_weights=wide, wide_outputs=wide) for wide in (False, True))
_1x1, _1x1_wide = (dot_block(1, 1, wide_weights=wide, wide_outputs=wide) for wide in (False, True))
_1x4, _2x4, _4x4 = (dot_block(4, rows, wide_weights=False, wide_outputs=False) for rows in (1, 2, 4))
_1x4_mixed, _2x4_mixed, _4x4_mixed = (dot_block(4, rows, wide_weights=True, wide_outputs=False) for rows in (1, 2, 4))
_1x4_wide, _2x4_wide, _4x4_wide = (dot_block(4, rows, wide_weights=True, wide_outputs=True) for rows in (1, 2, 4))


# Three times the same walk over the rows: numba keeps machine code on disk only for functions that name their kernels.


@compiled
def _narrow_rows(at: Places, rows: int) -> None:
    """Four outputs of every input row, from bfloat16 weights."""
    while rows >= 4:
        _4x4(at)
        at, rows = _below(at, 4), rows - 4
    if rows >= 2:
        _2x4(at)
        at, rows = _below(at, 2), rows - 2
    if rows:
        _1x4(at)


@compiled
def _mixed_rows(at: Places, rows: int) -> None:
    """The same from weights that were widened."""
    while rows >= 4:
        _4x4_mixed(at)
        at, rows = _below(at, 4), rows - 4
    if rows >= 2:
        _2x4_mixed(at)
        at, rows = _below(at, 2), rows - 2
    if rows:
        _1x4_mixed(at)


@compiled
def _wide_rows(at: Places, rows: int) -> None:
    """The same from float32 weights to float32 outputs."""
    while rows >= 4:
        _4x4_wide(at)
        at, rows = _below(at, 4), rows - 4
    if rows >= 2:
        _2x4_wide(at)
        at, rows = _below(at, 2), rows - 2
    if rows:
        _1x4_wide(at)


@compiled
def _below(at: Places, rows: int) -> Places:
    """The places of the input rows further down."""
    return (at[0], at[1], at[2] + rows * at[3], at[3], at[4], at[5], at[6] + rows * at[7], at[7])


@compiled
def product_piece(at: Places, rows: int, first: int, last: int, wide: bool, scratch: int) -> None:
    """Outputs `first` to `last` of every input row; `scratch` holds four widened rows of weights."""
    size = 4 if wide else 2
    out = first
    while rows == 1 and out + 8 <= last:
        if wide:
            _1x8_wide(_right(at, out, size))
        else:
            _1x8(_right(at, out, size))
        out += 8
    while out + 4 <= last:
        here = _right(at, out, size)
        if wide:
            _wide_rows(here, rows)
        elif rows > WIDENED_ABOVE:
            for row in range(4):
                widen(here[0] + row * here[1], at[4], scratch + row * 4 * at[4])
            _mixed_rows((scratch, 4 * at[4], here[2], here[3], here[4], here[5], here[6], here[7]), rows)
        else:
            _narrow_rows(here, rows)
        out += 4
    while out < last:
        here = _right(at, out, size)
        for row in range(rows):
            if wide:
                _1x1_wide(_below(here, row))
            else:
                _1x1(_below(here, row))
        out += 1


@compiled
def _right(at: Places, out: int, size: int) -> Places:
    """The places from output `out` on."""
    biases = at[5] + 4 * out if at[5] else 0
    return (at[0] + out * at[1], at[1], at[2], at[3], at[4], biases, at[6] + out * size, at[7])


def _work(job):  # type: ignore[no-untyped-def]  # numba takes its types from the signature
    """What each thread of the team does until no piece is left; see `row_product` for the fields."""
    rows, num_outs, wide, length = job[2], job[3], job[4] != 0, job[9]
    at = (job[5], job[6], job[7], job[8], job[9], job[10], job[11], job[12])
    base = carray(job, 2).ctypes.data
    scratch = job[13] + take_ticket(base) * 16 * length
    while True:
        first = take_ticket(base + 8) * PIECE
        if first >= num_outs:
            return
        product_piece(at, rows, first, min(first + PIECE, num_outs), wide, scratch)


def fits(weight: Tensor) -> bool:
    """Whether `row_product` takes this weight on this machine."""
    return (
        weight.dtype in (torch.bfloat16, torch.float32)
        and weight.is_cpu
        and weight.is_contiguous()
        and weight.shape[1] % LANES == 0
        and team() is not None
    )


def row_product(rows: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """`rows [num_rows, in_features]` times `weight [out_features, in_features]` (one that `fits`), plus a float32 bias.

    Sums are float32 and rounded once to the weight's dtype.
    """
    (num_outs, length), num_rows, wide = weight.shape, rows.shape[0], weight.dtype == torch.float32
    inputs = rows.float().contiguous()
    outputs, threads = torch.empty((num_rows, num_outs), dtype=weight.dtype), torch.get_num_threads()
    scratch = torch.empty(threads * 4 * length) if num_rows > WIDENED_ABOVE and not wide else None
    size = weight.element_size()
    job = (ctypes.c_int64 * 14)(
        0, 0, num_rows, num_outs, wide,
        weight.data_ptr(), size * length, inputs.data_ptr(), 4 * length, length,
        0 if bias is None else bias.data_ptr(), outputs.data_ptr(), size * num_outs,
        0 if scratch is None else scratch.data_ptr(),
    )  # fmt: skip
    run_on_team(_work, job, threads)
    return outputs


Job = ctypes.Array[ctypes.c_int64]
"""Counters, counts and addresses of a piece of work; what they mean is the work's own affair."""


def run_on_team(work: Callable[[Any], None], job: Job | int, threads: int, kind: Any = types.int64) -> None:
    """Run a compiled function on `job` (or what lies at its address) on so many of torch's threads, and wait for all.

    `kind` is the numba type of the job's elements.
    """
    run = team()
    assert run is not None, "what needs the team asks `fits` before"
    run(_entry(work, kind).address, job, threads, 0)


@cache
def _entry(work: Callable[[Any], None], kind: Any) -> Any:
    """The function as machine code: translated when first used, not where nothing runs on a CPU."""
    return cfunc(types.void(types.CPointer(kind)), cache=True)(work)


@cache
def team() -> Any:
    """`GOMP_parallel` of the OpenMP library that torch itself runs on; None where `_openmp` is None."""
    function = _openmp("GOMP_parallel")
    if function is not None:
        function.argtypes, function.restype = [ctypes.c_void_p, ctypes.c_void_p, ctypes.c_uint, ctypes.c_uint], None
    return function


@cache
def barrier() -> int:
    """Address of the function in which the threads of a team wait for each other; 0 where there is none."""
    return ctypes.cast(_openmp("GOMP_barrier"), ctypes.c_void_p).value or 0


def _openmp(name: str) -> Any:
    """A function of the OpenMP library that torch itself runs on.

    None where torch uses something else, or where the processor lacks what the kernels need. A second library would
    keep threads of its own, which spin while torch's want the cores.
    """
    if not FUSED or "OpenMP" not in torch.__config__.parallel_info():
        return None
    library = next((path for path in _loaded_libraries() if "gomp" in path or "iomp" in path), None)
    return getattr(ctypes.CDLL(library), name, None) if library else None


def _loaded_libraries() -> list[str]:
    """Files of the shared libraries in this process, torch's own first."""
    try:
        with Path("/proc/self/maps").open() as maps:
            files = {line.split(maxsplit=5)[-1].strip() for line in maps if "/" in line}
    except OSError:
        return []
    return sorted(files, key=lambda file: "torch" not in file)
