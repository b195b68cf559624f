"""Linear layers, embeddings and experts over quantised weights, and the product of packed ones and any rows."""

from __future__ import annotations

import ctypes
import logging
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import torch
from numba.np.numpy_support import carray
from torch import Tensor, nn
from transformers import PreTrainedModel

from precedent.errors import ModelLoadError, PrecedentError
from precedent.runtime.compiled import Int64s
from precedent.target.quantised import BAND, QuantisedWeight
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


class QuantisedLayer(nn.Module):
    """A layer over a `quantised` weight. Its state dict holds the weight itself: it can be compared and not saved."""

    def __init__(self, quantised: QuantisedWeight) -> None:
        super().__init__()
        self.quantised = quantised

    @property
    def packed(self) -> PackedWeight | None:
        """The weight as kernels read it; None where `pack_quantised` did not lay it out."""
        return self.quantised.packed if isinstance(self.quantised.packed, PackedWeight) else None

    def extra_repr(self) -> str:
        """Say its type and sizes when the model is printed."""
        return f"{self.quantised.kind}, {self.quantised.out_features}, {self.quantised.in_features}"

    def _save_to_state_dict(self, destination: Any, prefix: str, keep_vars: bool) -> None:
        super()._save_to_state_dict(destination, prefix, keep_vars)
        destination[f"{prefix}weight"] = self.quantised


class QuantisedLinear(QuantisedLayer):
    """A linear layer, by kernels where it is packed, else by dequantising a band of outputs at a time.

    Kernels round its inputs to 8 bits, or to 16 if it is `accurate`.
    """

    accurate = False
    numbers: Int64s | None = None
    """The `FIELDS` of its packed weight."""

    order: Tensor | None = None
    _kept: tuple[PackedWeight, Tensor | None]
    """What `numbers` point to."""

    def __init__(self, quantised: QuantisedWeight, bias: Tensor | None = None) -> None:
        super().__init__(quantised)
        self.bias = None if bias is None else nn.Parameter(bias, requires_grad=False)

    @property
    def in_features(self) -> int:
        """Width of the input."""
        return self.quantised.in_features

    @property
    def out_features(self) -> int:
        """Width of the output."""
        return self.quantised.out_features

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
        count, learns = input.numel() // self.in_features, torch.is_grad_enabled() and input.requires_grad
        if self.numbers is None or not count or not input.is_cpu or learns:
            return self._by_bands(input)
        rows = input.reshape(count, self.in_features)
        if self.order is not None:
            rows = rows[:, self.order]
        product = quantised_product(rows, self.numbers, self.out_features, accurate=self.accurate)
        return product.view(*input.shape[:-1], self.out_features).to(input.dtype)

    def _by_bands(self, input: Tensor) -> Tensor:
        found = []
        for first in range(0, self.out_features, BAND):
            which = slice(first, first + BAND)
            band = torch.from_numpy(self.quantised.dequantised(which)).to(input)
            found.append(nn.functional.linear(input, band, None if self.bias is None else self.bias[which]))
        return torch.cat(found, -1)


class QuantisedEmbedding(QuantisedLayer):
    """Looks rows up in a weight, which may also be the head's, and multiplies them by `scale`."""

    def __init__(self, quantised: QuantisedWeight, scale: float = 1.0) -> None:
        super().__init__(quantised)
        self.scale = scale

    @property
    def num_embeddings(self) -> int:
        """Rows."""
        return self.quantised.out_features

    @property
    def embedding_dim(self) -> int:
        """Width of a row."""
        return self.quantised.in_features

    def forward(self, input: Tensor) -> Tensor:
        """Token ids `[...]` to float32 rows `[..., embedding_dim]`."""
        if self.packed is not None:
            rows = self.packed.rows(input)
        else:
            distinct, places = input.unique(return_inverse=True)
            rows = torch.from_numpy(self.quantised.dequantised(distinct.cpu().numpy())).to(input.device)[places]
        return rows if self.scale == 1 else rows * self.scale


class QuantisedExperts(nn.Module):
    """The experts of a mixture, each with linear layers over quantised weights: all gates, all ups, all downs.

    `theirs` is the module that is replaced, for which there are `shapes_of_experts`.
    """

    def __init__(self, theirs: Any, weights: Sequence[QuantisedWeight]) -> None:
        super().__init__()
        count = len(weights) // 3
        self.gate, self.up, self.down = (
            nn.ModuleList(map(QuantisedLinear, weights[start : start + count])) for start in range(0, 3 * count, count)
        )
        self.act_fn = theirs.act_fn

    def forward(self, hidden_states: Tensor, top_k_index: Tensor, top_k_weights: Tensor) -> Tensor:
        """Rows `[rows, hidden]` through the experts of each, `[rows, k]`, added up by their weights."""
        found = torch.zeros_like(hidden_states)
        for expert in top_k_index.unique().tolist():
            rows, places = torch.where(top_k_index == expert)
            states = hidden_states[rows]
            states = self.down[expert](self.act_fn(self.gate[expert](states)) * self.up[expert](states))
            found.index_add_(0, rows, (states * top_k_weights[rows, places, None]).to(found.dtype))
        return found


def shapes_of_experts(module: Any) -> dict[str, tuple[int, int, int]] | None:
    """`[experts, outputs, inputs]` of `gate`, `up` and `down` of a mixture's experts; None for another module.

    Experts with biases, or whose gate is not an activation of one half times the other, are of another kind.
    """
    how = [getattr(module, name, None) for name in ("has_gate", "is_concatenated", "is_transposed", "has_bias")]
    if how != [True, True, False, False] or getattr(module, "has_post_expert_norm", False):  # not of older versions
        return None
    if type(module)._apply_gate.__name__ != "_default_apply_gate":
        return None
    experts, hidden, inner = module.down_proj.shape
    return {"gate": (experts, inner, hidden), "up": (experts, inner, hidden), "down": (experts, hidden, inner)}


def layer_over(module: Any, weights: Sequence[QuantisedWeight]) -> nn.Module | None:
    """`ModelSupport.quantised_layer`."""
    shapes = shapes_of_experts(module)
    if shapes is not None:
        expected = [shape[1:] for shape in shapes.values() for _ in range(shape[0])]
        if [weight.shape for weight in weights] != expected:
            wrong = (weight for weight, shape in zip(weights, expected, strict=False) if weight.shape != shape)
            raise ModelLoadError(
                f"the tensor {next(wrong, weights[-1]).name} does not hold the {shapes['up'][0]} experts of its model: "
                "the file is damaged, get it again"
            )
        return QuantisedExperts(module, weights)
    scale = getattr(module, "scalar_embed_scale", None)
    if type(module) is nn.Linear:
        return QuantisedLinear(weights[0], module.bias)
    return QuantisedEmbedding(weights[0], scale or 1.0) if type(module) is nn.Embedding or scale is not None else None


def pack_quantised(model: nn.Module) -> None:
    """Lay out the weights of all quantised layers and embeddings that the kernels support; others stay as they are.

    A model's head gets `accurate` inputs: it decides between tokens, and reading its weights takes longer than that.
    Where packing fails, layers go on without kernels, with a warning; damaged weights are an error (ModelLoadError).
    """
    head = model.get_output_embeddings() if isinstance(model, PreTrainedModel) else None
    layers = [each for each in model.modules() if isinstance(each, QuantisedLayer) and packable(each.quantised)]
    with ThreadPoolExecutor(max(1, torch.get_num_threads())) as threads:
        list(threads.map(_pack, {id(each.quantised): each.quantised for each in layers}.values()))
    for each in layers:
        if isinstance(each, QuantisedLinear) and each.packed is not None and each.numbers is None:
            each.prepare(each.packed, accurate=each.accurate or each is head)


def _pack(weight: QuantisedWeight) -> None:
    """Pack a weight once: an embedding and a head may share it."""
    try:
        if not isinstance(weight.packed, PackedWeight):
            weight.packed = PackedWeight(weight)
    except PrecedentError:
        raise
    except Exception as error:  # such as a kernel that does not compile on this processor
        log.warning("%s runs without kernels, which is slow: %r", weight.name, error)
