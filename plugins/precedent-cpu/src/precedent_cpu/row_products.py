"""The product of few rows with a weight in place, without a packed copy.

A decoding step multiplies one to some dozens of rows with every weight of the model; reading the weights sets the pace.
The loops of `product_kernels` and `tile_products` run on torch's own threads (OpenMP's team of the calling thread),
which take pieces of the output in turn. A row's result does not depend on the number of rows or threads, so plain
decoding and the verification of a tree round alike.
"""

from __future__ import annotations

import ctypes
import threading
from collections.abc import Callable
from functools import cache
from typing import Any

import torch
from numba import types
from numba.np.numpy_support import carray
from torch import Tensor

from precedent.runtime.compiled import compiled_callback
from precedent.runtime.openmp import openmp_function
from precedent_cpu.kernel_code import FUSED, LANES, take_ticket
from precedent_cpu.product_kernels import PIECE, product_piece
from precedent_cpu.tile_products import (
    DEPTH,
    close_tiles,
    open_tiles,
    pack_inputs,
    piece_by_tiles,
    tile_room,
    tiles_at_hand,
)

_memory = threading.local()


def _work(job):  # type: ignore[no-untyped-def]  # numba takes its types from the signature
    """What each thread of the team runs until no piece is left; see `row_product` for the fields."""
    rows, num_outs, wide = job[2], job[3], job[4] != 0
    at = (job[5], job[6], job[7], job[8], job[9], job[10], job[11], job[12])
    base, tiles = carray(job, 1).ctypes.data, job[13] != 0
    room = job[13] + take_ticket(base + 8) * job[14]
    if tiles:
        open_tiles()
        pack_inputs(at[2], at[3], at[4], rows, room)
    first = take_ticket(base) * PIECE
    while first < num_outs:
        if tiles:
            piece_by_tiles(at, rows, first, min(first + PIECE, num_outs), room)
        else:
            product_piece(at, rows, first, min(first + PIECE, num_outs), wide)
        first = take_ticket(base) * PIECE
    if tiles:
        close_tiles()


def fits(weight: Tensor) -> bool:
    """Whether `row_product` supports this weight on this machine."""
    return (
        weight.dtype in (torch.bfloat16, torch.float32)
        and weight.is_cpu
        and weight.is_contiguous()
        and weight.shape[1] % LANES == 0
        and team() is not None
    )


def by_tiles(dtype: torch.dtype, length: int) -> bool:
    """Whether the processor's matrix unit computes products over `length` numbers."""
    return dtype == torch.bfloat16 and length % DEPTH == 0 and tiles_at_hand()


def row_product(rows: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """`rows [num_rows, in_features]` times `weight [out_features, in_features]` (one that `fits`), plus a float32 bias.

    Sums are float32 and rounded once to the weight's dtype.
    """
    (num_outs, length), num_rows, wide = weight.shape, rows.shape[0], weight.dtype == torch.float32
    inputs = rows.float().contiguous()
    outputs, threads = torch.empty((num_rows, num_outs), dtype=weight.dtype), torch.get_num_threads()
    size, room = weight.element_size(), tile_room(num_rows, length) if by_tiles(weight.dtype, length) else 0
    memory = thread_memory("tiles", threads * room)
    job = (ctypes.c_int64 * 15)(
        0, 0, num_rows, num_outs, wide,
        weight.data_ptr(), size * length, inputs.data_ptr(), 4 * length, length,
        0 if bias is None else bias.data_ptr(), outputs.data_ptr(), size * num_outs,
        memory.data_ptr() if room else 0, room,
    )  # fmt: skip
    run_on_team(_work, job, threads)
    return outputs


def thread_memory(name: str, size: int) -> Tensor:
    """`size` bytes, the same memory at each call from this thread: new memory costs a page fault per page."""
    held: Tensor | None = getattr(_memory, name, None)
    if held is None or held.numel() < size:
        held = torch.empty(size, dtype=torch.uint8)
        setattr(_memory, name, held)
    return held


Job = ctypes.Array[ctypes.c_int64]
"""Counters, counts and addresses; each work function defines their meaning."""


def run_on_team(work: Callable[[Any], None], job: Job | int, threads: int, kind: Any = types.int64) -> None:
    """Run a compiled function on `job` (or the job at that address) on `threads` of torch's threads, and wait for all.

    `kind` is the numba type of the job's elements.
    """
    run = team()
    assert run is not None, "callers check `fits` first"
    run(_entry(work, kind).address, job, threads, 0)


@cache
def _entry(work: Callable[[Any], None], kind: Any) -> Any:
    """The function as machine code, compiled at first use: not at all where nothing runs on a CPU."""
    return compiled_callback(work, types.void(types.CPointer(kind)))


@cache
def team() -> Any:
    """`GOMP_parallel` of torch's OpenMP library; None if it or an instruction that the kernels need is missing."""
    function = openmp_function("GOMP_parallel") if FUSED else None
    if function is not None:
        function.argtypes, function.restype = [ctypes.c_void_p, ctypes.c_void_p, ctypes.c_uint, ctypes.c_uint], None
    return function


@cache
def barrier() -> int:
    """Address of OpenMP's barrier function; 0 if there is none."""
    return ctypes.cast(openmp_function("GOMP_barrier"), ctypes.c_void_p).value or 0
