"""Linear layers and embeddings over packed quantised weights, and their product of any number of rows."""

from __future__ import annotations

import ctypes
import logging
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import torch
from numba.np.numpy_support import carray
from torch import Tensor, nn
from transformers import PreTrainedModel

from precedent.errors import PrecedentError
from precedent.runtime.compiled import Int64s
from precedent.target.quantised import QuantisedEmbedding, QuantisedLinear, QuantisedWeight
from precedent_cpu.kernel_code import take_ticket
from precedent_cpu.layer_work import wait_for_team
from precedent_cpu.quantised_products import (
    Rows,
    piece_place,
    piece_product,
    pieces_of,
    quantise_rest,
    quantise_row,
    quantised_room,
    record_stride,
    records_bytes,
)
from precedent_cpu.quantised_weights import PackedWeight, packable
from precedent_cpu.row_products import barrier, run_on_team, thread_memory
from precedent_cpu.tile_products import close_tiles

log = logging.getLogger(__name__)


def _work(job):  # type: ignore[no-untyped-def]  # numba takes its types from the signature
    """What each thread of the team runs: quantise rows, wait for all, multiply bands; see `quantised_product`."""
    base = carray(job, 1).ctypes.data
    count, inputs, numbers, records, stride = job[3], job[4], job[5], job[6], job[7]
    weight, outputs, output_stride = job[8], job[9], job[10]
    room, num_records = job[11] + take_ticket(base) * job[12], job[14]
    row = take_ticket(base + 8)
    while row < count:
        quantise_row(numbers + 4 * row * inputs, inputs, records + row * stride)
        if num_records > count:
            others = records + (count + row) * stride
            quantise_rest(numbers + 4 * row * inputs, inputs, records + row * stride, others, room)
        row = take_ticket(base + 8)
    wait_for_team(job[13])
    rows = Rows(records, stride, num_records, outputs, output_stride)
    piece, pieces = take_ticket(base + 16), pieces_of(weight, num_records)
    while piece < pieces:
        following = take_ticket(base + 16)
        piece_product(weight, piece, piece_place(weight, following, num_records), rows, room)
        piece = following
    close_tiles()


def quantised_product(rows: Tensor, numbers: Int64s, outs: int, *, accurate: bool = False) -> Tensor:
    """float32 `rows [num_rows, in_features]` times a packed weight, given by its `FIELDS`, as float32.

    With `accurate`, what eight bits leave of each row is multiplied as a row of its own, and added: 16 bits in all.
    """
    (count, inputs), threads = rows.shape, torch.get_num_threads()
    rows, num_records = rows.float().contiguous(), count * (2 if accurate else 1)
    outputs = torch.empty((num_records, outs))
    stride, room = record_stride(inputs), quantised_room(inputs)
    records = records_bytes(num_records, inputs)
    memory = thread_memory("quantised", records + threads * room)
    job = (ctypes.c_int64 * 15)(
        0, 0, 0, count, inputs, rows.data_ptr(), memory.data_ptr(), stride,
        numbers.ctypes.data, outputs.data_ptr(), 4 * outs,
        memory.data_ptr() + records, room, barrier(), num_records,
    )  # fmt: skip
    run_on_team(_work, job, threads)
    return outputs[:count] + outputs[count:] if accurate else outputs


class PackedQuantisedLinear(QuantisedLinear):
    """A `QuantisedLinear` that multiplies with its packed weight; made by `pack_quantised`, never constructed."""

    numbers: Int64s
    order: Tensor | None
    _kept: tuple[PackedWeight, Tensor | None]
    """What `numbers` point to."""

    def prepare(self, packed: PackedWeight, *, accurate: bool) -> None:
        """Take the packed weight, and multiply `accurate` inputs with it (`quantised_product`) or those of 8 bits.

        Each of the two products that are added has half of the bias.
        """
        self.numbers, bias = packed.with_bias(self.bias / 2 if accurate and self.bias is not None else self.bias)
        self.accurate, self._kept = accurate, (packed, bias)
        order = getattr(self.quantised, "order", None)
        self.order = None if order is None else torch.from_numpy(order)

    def forward(self, input: Tensor) -> Tensor:
        """`[..., in_features]` to `[..., out_features]`, in the dtype of the input."""
        count = input.numel() // self.in_features
        if not count or not input.is_cpu or (torch.is_grad_enabled() and input.requires_grad):
            return super().forward(input)
        rows = input.reshape(count, self.in_features)
        if self.order is not None:
            rows = rows[:, self.order]
        product = quantised_product(rows, self.numbers, self.out_features, accurate=self.accurate)
        return product.view(*input.shape[:-1], self.out_features).to(input.dtype)


class PackedQuantisedEmbedding(QuantisedEmbedding):
    """A `QuantisedEmbedding` that reads rows of its packed weight; made by `pack_quantised`, never constructed."""

    def forward(self, input: Tensor) -> Tensor:
        """`[...]` ids to float32 `[..., embedding_dim]`."""
        rows = _packed_of(self.quantised).rows(input)
        return rows if self.scale == 1 else rows * self.scale


def pack_quantised(model: nn.Module) -> None:
    """Lay out the weights of all quantised layers and embeddings that the kernels support; others stay as they are.

    A model's head gets `accurate` inputs: it decides between tokens, and reading its weights takes longer than that.
    Where packing fails, core's own forward goes on, with a warning; damaged weights are an error (ModelLoadError).
    """
    head = model.get_output_embeddings() if isinstance(model, PreTrainedModel) else None
    modules: list[Any] = [each for each in model.modules() if type(each) in (QuantisedLinear, QuantisedEmbedding)]
    modules = [each for each in modules if packable(each.quantised)]
    with ThreadPoolExecutor(max(1, torch.get_num_threads())) as threads:
        list(threads.map(_pack, {id(each.quantised): each.quantised for each in modules}.values()))
    for each in modules:
        packed, linear = each.quantised.packed, isinstance(each, QuantisedLinear)
        if isinstance(packed, PackedWeight):
            each.__class__ = PackedQuantisedLinear if linear else PackedQuantisedEmbedding
            if linear:
                each.prepare(packed, accurate=each.accurate or each is head)


def _pack(weight: QuantisedWeight) -> None:
    try:
        _packed_of(weight)
    except PrecedentError:
        raise
    except Exception as error:  # such as a kernel that does not compile on this processor
        log.warning("%s runs without kernels, which is slow: %r", weight.name, error)


def _packed_of(weight: QuantisedWeight) -> PackedWeight:
    """The packed form of a weight, made once: an embedding and a head may share it."""
    if not isinstance(weight.packed, PackedWeight):
        weight.packed = PackedWeight(weight)
    return weight.packed
