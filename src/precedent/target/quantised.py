"""Weights of 4 to 8 bits as a file stores them: codes in groups, with the scales and minima that make them numbers.

A weight stays where it is stored (a mapped file) and is read in bands of outputs. `QuantisedLinear` and
`QuantisedEmbedding` compute with it as it is, by dequantising one band at a time; packages of the group
`precedent.models` replace them by kernels that lay the codes out for their processor (`ModelSupport.prepare`).
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any, NamedTuple, NoReturn, cast

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from precedent.errors import UnsupportedError

Rows = slice | NDArray[np.int64]
"""Outputs of a weight: a range, or their numbers."""

BAND = 512
"""Outputs that are dequantised at once."""


@dataclass(frozen=True, slots=True)
class Layout:
    """How the numbers of a weight follow from its codes: `level * scale + minimum`, one scale for `group` inputs.

    The level is `code - offset`, or `table[code]` where there is a `table`. `scale_dtype` is the smallest of float16,
    bfloat16 and float32 that holds every scale and minimum exactly; with `factors`, scales and minima are products of
    one float16 for 256 inputs and a small integer for each group, which float32 holds exactly and float16 does not.
    """

    bits: int
    group: int
    offset: int = 0
    minima: bool = False
    table: tuple[int, ...] | None = None
    scale_dtype: str = "float16"
    factors: bool = False


@dataclass(frozen=True, slots=True)
class Factors:
    """Scales and minima as a file stores them: `scales[i] = super_scales[i // n] * steps[i]`, the same for minima.

    `super_scales` and `super_minima` are float16 `[outputs, inputs / 256]`, `steps` int8 or uint8
    `[outputs, inputs / group]`. A minimum is `-super_minima * minimum_steps`.
    """

    super_scales: NDArray[np.float16]
    steps: NDArray[np.int8] | NDArray[np.uint8]
    super_minima: NDArray[np.float16] | None = None
    minimum_steps: NDArray[np.uint8] | None = None


class Bits(NamedTuple):
    """Where some bits of a block's codes are stored, and from which bit of a code they begin (`shift`).

    The codes take the lowest `bits` of `width` bytes from `place` on, then the next higher ones of the same bytes, and
    so on; then those of the next `width` bytes.
    """

    place: int
    bits: int
    width: int
    shift: int = 0


def fields_of(packed: NDArray[np.uint8], bits: int, width: int) -> NDArray[np.uint8]:
    """Fields of `bits` bits in `[rows, blocks, bytes]`, in the order of `Bits`: `[rows, blocks, fields]`."""
    rows, blocks, _ = packed.shape
    shifts = np.arange(0, 8, bits, dtype=np.uint8)[:, None]
    fields = packed.reshape(rows, blocks, -1, 1, width) >> shifts
    fields &= np.uint8((1 << bits) - 1)
    return fields.reshape(rows, blocks, -1)


class PackedCodes(NamedTuple):
    """Codes as they are stored: `blocks` `[outputs, blocks, bytes]` of `size` codes each, in which their `bits` are.

    `added` is added to every code, modulo 256.
    """

    blocks: NDArray[np.uint8]
    size: int
    bits: tuple[Bits, ...]
    added: int = 0

    def unpacked(self) -> NDArray[np.uint8]:
        """The codes, `[outputs, inputs]`."""
        rows, count, _ = self.blocks.shape
        codes = np.full((rows, count, self.size), self.added, np.uint8)
        for place, bits, width, shift in self.bits:
            stored = self.blocks[..., place : place + self.size * bits // 8]
            codes += fields_of(stored, bits, width) << np.uint8(shift)
        return codes.reshape(rows, -1)


@dataclass(frozen=True, slots=True)
class Band:
    """Some outputs of a weight: codes as they are stored, `scales` and `minima` `[outputs, inputs / group]`."""

    stored: PackedCodes | NDArray[np.uint8]
    scales: NDArray[np.float32]
    minima: NDArray[np.float32] | None = None
    factors: Factors | None = None

    @property
    def codes(self) -> NDArray[np.uint8]:
        """The codes, a byte each: `[outputs, inputs]`."""
        return self.stored.unpacked() if isinstance(self.stored, PackedCodes) else self.stored


class QuantisedWeight(ABC):
    """A weight `[out_features, in_features]` of a linear layer or an embedding, where it is stored.

    `name` is the tensor's name in its file and `kind` its type there (`Q4_K`, `AWQ`), for messages. `order` permutes
    the inputs, where codes are stored sorted by group: code `i` of a row belongs to input `order[i]`. `packed` is free
    for the package that computes with the weight: one weight may serve an embedding and the head.
    """

    name: str
    kind: str
    out_features: int
    in_features: int
    layout: Layout
    order: NDArray[np.int64] | None = None
    packed: object | None = None

    @abstractmethod
    def rows(self, which: Rows) -> Band:
        """Some outputs. Raises ModelLoadError, naming the tensor, for scales that are not finite."""

    def band(self, first: int, last: int) -> Band:
        """Outputs `first` to `last`, as `rows`."""
        return self.rows(slice(first, last))

    def numbers(self, which: Rows) -> NDArray[np.float32]:
        """Some outputs as the numbers that were quantised where those are stored, else as dequantised ones."""
        return dequantised_rows(self, which)

    @property
    @abstractmethod
    def stored(self) -> NDArray[Any]:
        """The numbers that are stored, in any shape: two weights of one kind and shape are equal if these are."""

    @property
    def nbytes(self) -> int:
        """Bytes where it is stored."""
        return int(self.stored.nbytes)

    @property
    def shape(self) -> tuple[int, int]:
        """Outputs and inputs."""
        return self.out_features, self.in_features

    def release(self) -> None:  # noqa: B027
        """Tell the system that the stored pages are not needed for now: a copy laid out for kernels replaces them."""

    def __tensor_flatten__(self) -> tuple[list[str], None]:
        """Name the plain parts, as torch's tensors of several parts do: fingerprints read them."""
        return ["stored"], None

    def __deepcopy__(self, memo: Any) -> QuantisedWeight:
        return self  # nothing changes it

    def __reduce__(self) -> NoReturn:
        raise UnsupportedError(
            f"{self.name} is read where it is stored and cannot be pickled: load the model in the other process"
        )


def dequantised(weight: QuantisedWeight, first: int, last: int) -> NDArray[np.float32]:
    """Outputs `first` to `last` as numbers, `[last - first, in_features]`, inputs in their natural order."""
    return dequantised_rows(weight, slice(first, last))


def dequantised_rows(weight: QuantisedWeight, which: Rows) -> NDArray[np.float32]:
    """Some outputs as numbers, `[outputs, in_features]`, inputs in their natural order."""
    band, layout = weight.rows(which), weight.layout
    codes = band.codes
    if layout.table is None:
        numbers = codes.astype(np.float32)
        if layout.offset:
            numbers -= np.float32(layout.offset)
    else:
        numbers = np.array(layout.table, np.float32)[codes]
    groups = numbers.reshape(len(numbers), -1, layout.group)
    groups *= band.scales[..., None]
    if band.minima is not None:
        groups += band.minima[..., None]
    if weight.order is not None:
        numbers[:, weight.order] = numbers.copy()
    return numbers


class QuantisedLinear(nn.Module):
    """A linear layer that computes with a quantised weight, dequantising a band of outputs at a time.

    Its state dict holds the `QuantisedWeight` itself, so it can be compared and not saved. Kernels round its inputs to
    8 bits, or to 16 if it is `accurate`.
    """

    accurate = False

    def __init__(self, quantised: QuantisedWeight, bias: Tensor | None = None) -> None:
        super().__init__()
        self.quantised = quantised
        self.bias = None if bias is None else nn.Parameter(bias, requires_grad=False)

    @property
    def in_features(self) -> int:
        """Width of the input."""
        return self.quantised.in_features

    @property
    def out_features(self) -> int:
        """Width of the output."""
        return self.quantised.out_features

    def forward(self, input: Tensor) -> Tensor:
        """`[..., in_features]` to `[..., out_features]`, in the input's dtype."""
        count, found = self.out_features, []
        for first in range(0, count, BAND):
            last = min(first + BAND, count)
            band = torch.from_numpy(dequantised(self.quantised, first, last))
            bias = None if self.bias is None else self.bias[first:last]
            found.append(nn.functional.linear(input, band.to(input), bias))
        return torch.cat(found, -1)

    def extra_repr(self) -> str:
        """Say its type and sizes when the model is printed."""
        return f"{self.quantised.kind}, in_features={self.in_features}, out_features={self.out_features}"

    def _save_to_state_dict(self, destination: Any, prefix: str, keep_vars: bool) -> None:
        super()._save_to_state_dict(destination, prefix, keep_vars)
        destination[f"{prefix}weight"] = self.quantised


class QuantisedEmbedding(nn.Module):
    """Looks rows up in a quantised weight, which may also be the head's, and multiplies them by `scale`."""

    def __init__(self, quantised: QuantisedWeight, scale: float = 1.0) -> None:
        super().__init__()
        self.quantised, self.scale = quantised, scale

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
        distinct, places = input.unique(return_inverse=True)
        rows = torch.from_numpy(dequantised_rows(self.quantised, distinct.cpu().numpy()))
        return (rows * self.scale).to(input.device)[places]

    def extra_repr(self) -> str:
        """Say its type and sizes when the model is printed."""
        return f"{self.quantised.kind}, {self.num_embeddings}, {self.embedding_dim}"

    def _save_to_state_dict(self, destination: Any, prefix: str, keep_vars: bool) -> None:
        super()._save_to_state_dict(destination, prefix, keep_vars)
        destination[f"{prefix}weight"] = self.quantised


class QuantisedExperts(nn.Module):
    """The experts of a mixture, each with linear layers over quantised weights.

    `weights` are those of all experts' gates, ups and downs, and `theirs` the module that is replaced, for which there
    are `shapes_of_experts`.
    """

    def __init__(self, theirs: Any, weights: Iterable[Iterable[QuantisedWeight]]) -> None:
        super().__init__()
        self.gate, self.up, self.down = (nn.ModuleList(map(QuantisedLinear, part)) for part in weights)
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
    if how != [True, True, False, False] or module.has_post_expert_norm:
        return None
    if type(module)._apply_gate.__name__ != "_default_apply_gate":
        return None
    experts, hidden, inner = module.down_proj.shape
    return {"gate": (experts, inner, hidden), "up": (experts, inner, hidden), "down": (experts, hidden, inner)}


def rows_of(module: Any, ids: Tensor | slice) -> Tensor:
    """Rows of the weight of a linear layer or an embedding, `[rows, in_features]`; in float32 where it is quantised."""
    weight = getattr(module, "quantised", None)
    if not isinstance(weight, QuantisedWeight):
        return cast(Tensor, module.weight.detach()[ids])
    found = torch.from_numpy(dequantised_rows(weight, ids if isinstance(ids, slice) else ids.reshape(-1).cpu().numpy()))
    return found if isinstance(ids, slice) else found.view(*ids.shape, weight.in_features)


def quantised_weights(model: nn.Module) -> dict[str, QuantisedWeight]:
    """The quantised weights of a model's layers, under the names that ordinary ones would have."""
    found = {name: getattr(module, "quantised", None) for name, module in model.named_modules()}
    return {f"{name}.weight": weight for name, weight in found.items() if isinstance(weight, QuantisedWeight)}


def is_quantised(model: nn.Module) -> bool:
    """Whether some of a model's layers compute with quantised weights."""
    return bool(quantised_weights(model))
