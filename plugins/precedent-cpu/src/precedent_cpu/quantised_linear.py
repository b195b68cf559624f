"""Linear layers and embeddings over packed quantised weights, and their product of any number of rows."""

from __future__ import annotations

import ctypes
from typing import Any

import torch
from numba.np.numpy_support import carray
from torch import Tensor, nn

from precedent.runtime.compiled import Int64s
from precedent.target.quantised import QuantisedEmbedding, QuantisedLinear, QuantisedWeight
from precedent_cpu.kernel_code import take_ticket
from precedent_cpu.layer_work import wait_for_team
from precedent_cpu.quantised_kernels import OUTS
from precedent_cpu.quantised_products import (
    Rows,
    band_place,
    band_product,
    quantise_row,
    quantised_room,
    record_stride,
    records_bytes,
)
from precedent_cpu.quantised_weights import PackedWeight, packable
from precedent_cpu.row_products import barrier, run_on_team, thread_memory
from precedent_cpu.tile_products import close_tiles


def _work(job):  # type: ignore[no-untyped-def]  # numba takes its types from the signature
    """What each thread of the team runs: quantise rows, wait for all, multiply bands; see `quantised_product`."""
    base = carray(job, 1).ctypes.data
    count, inputs, numbers, records, stride = job[3], job[4], job[5], job[6], job[7]
    weight, outputs, output_stride, bands = job[8], job[9], job[10], job[11]
    room = job[12] + take_ticket(base) * job[13]
    row = take_ticket(base + 8)
    while row < count:
        quantise_row(numbers + 4 * row * inputs, inputs, records + row * stride)
        row = take_ticket(base + 8)
    wait_for_team(job[14])
    rows = Rows(records, stride, count, outputs, output_stride)
    band = take_ticket(base + 16)
    while band < bands:
        following = take_ticket(base + 16)
        band_product(weight, band, band_place(weight, following) if following < bands else 0, rows, room)
        band = following
    close_tiles()


def quantised_product(rows: Tensor, numbers: Int64s, outs: int) -> Tensor:
    """float32 `rows [num_rows, in_features]` times a packed weight, given by its `FIELDS`, as float32."""
    (count, inputs), threads = rows.shape, torch.get_num_threads()
    rows, outputs = rows.float().contiguous(), torch.empty((count, outs))
    stride, room = record_stride(inputs), quantised_room(inputs)
    records = records_bytes(count, inputs)
    memory = thread_memory("quantised", records + threads * room)
    job = (ctypes.c_int64 * 15)(
        0, 0, 0, count, inputs, rows.data_ptr(), memory.data_ptr(), stride,
        numbers.ctypes.data, outputs.data_ptr(), 4 * outs, -(-outs // OUTS),
        memory.data_ptr() + records, room, barrier(),
    )  # fmt: skip
    run_on_team(_work, job, threads)
    return outputs


class PackedQuantisedLinear(QuantisedLinear):
    """A `QuantisedLinear` that multiplies with its packed weight; made by `pack_quantised`, never constructed."""

    numbers: Int64s
    _kept: Tensor | None

    def prepare(self, packed: PackedWeight) -> None:
        """Take the packed weight."""
        self.numbers, self._kept = packed.with_bias(self.bias)

    def forward(self, input: Tensor) -> Tensor:
        """`[..., in_features]` to `[..., out_features]`, in the dtype of the input."""
        count = input.numel() // self.in_features
        if not count or (torch.is_grad_enabled() and input.requires_grad):
            return super().forward(input)
        product = quantised_product(input.reshape(count, self.in_features), self.numbers, self.out_features)
        return product.view(*input.shape[:-1], self.out_features).to(input.dtype)


class PackedQuantisedEmbedding(QuantisedEmbedding):
    """A `QuantisedEmbedding` that reads rows of its packed weight; made by `pack_quantised`, never constructed."""

    def forward(self, input: Tensor) -> Tensor:
        """`[...]` ids to float32 `[..., embedding_dim]`."""
        rows = _packed_of(self.quantised).rows(input)
        return rows if self.scale == 1 else rows * self.scale


def pack_quantised(model: nn.Module) -> None:
    """Lay out the weights of all quantised layers and embeddings that the kernels support; others stay as they are."""
    for module in model.modules():
        each: Any = module
        if type(module) in (QuantisedLinear, QuantisedEmbedding) and packable(each.quantised):
            packed = _packed_of(each.quantised)
            if isinstance(module, QuantisedLinear):
                each.__class__ = PackedQuantisedLinear
                each.prepare(packed)
            else:
                each.__class__ = PackedQuantisedEmbedding


def _packed_of(weight: QuantisedWeight) -> PackedWeight:
    """The packed form of a weight, made once: an embedding and a head may share it."""
    if not isinstance(weight.packed, PackedWeight):
        weight.packed = PackedWeight(weight)
    return weight.packed
