"""Weights that stay as a file stores them, and the layers that compute with them, a dequantised band at a time.

Packages of the group `precedent.models` replace the layers by kernels that read the codes (`ModelSupport.prepare`).
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable
from typing import Any, NoReturn, cast

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from precedent.errors import UnsupportedError

Rows = slice | NDArray[np.int64]
"""Outputs of a weight: a range, or their numbers."""

BAND = 512
"""Outputs that are dequantised at once."""


class QuantisedWeight(ABC):
    """A weight `[out_features, in_features]` of a linear layer or an embedding, where it is stored.

    `name` is the tensor's name in its file and `kind` its type there (`Q4_K`, `AWQ`), for messages. `packed` is free
    for the package that computes with the weight: one weight may serve an embedding and the head. A copy is the weight
    itself: nothing changes it.
    """

    name: str
    kind: str
    out_features: int
    in_features: int
    packed: object | None = None

    @abstractmethod
    def dequantised(self, which: Rows) -> NDArray[np.float32]:
        """Some outputs as numbers, `[outputs, in_features]`. Raises ModelLoadError, naming the tensor, for NaN."""

    def numbers(self, which: Rows) -> NDArray[np.float32]:
        """Some outputs as the numbers that were quantised where those are stored, else as dequantised ones."""
        return self.dequantised(which)

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
        return self

    def __reduce__(self) -> NoReturn:
        raise UnsupportedError(
            f"{self.name} is read where it is stored and cannot be pickled: load the model in the other process"
        )


class QuantisedLayer(nn.Module):
    """A layer over a `quantised` weight. Its state dict holds the weight itself: it can be compared and not saved."""

    def __init__(self, quantised: QuantisedWeight) -> None:
        super().__init__()
        self.quantised = quantised

    def extra_repr(self) -> str:
        """Say its type and sizes when the model is printed."""
        return f"{self.quantised.kind}, {self.quantised.out_features}, {self.quantised.in_features}"

    def _save_to_state_dict(self, destination: Any, prefix: str, keep_vars: bool) -> None:
        super()._save_to_state_dict(destination, prefix, keep_vars)
        destination[f"{prefix}weight"] = self.quantised


class QuantisedLinear(QuantisedLayer):
    """A linear layer. Kernels round its inputs to 8 bits, or to 16 if it is `accurate`."""

    accurate = False

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

    def forward(self, input: Tensor) -> Tensor:
        """`[..., in_features]` to `[..., out_features]`, in the input's dtype."""
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
        distinct, places = input.unique(return_inverse=True)
        rows = torch.from_numpy(self.quantised.dequantised(distinct.cpu().numpy()))
        return (rows * self.scale).to(input.device)[places]


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


def layer_over(module: Any, weight: QuantisedWeight) -> QuantisedLinear | QuantisedEmbedding | None:
    """What computes a linear layer or an embedding with a quantised weight; None for another module."""
    scale = getattr(module, "scalar_embed_scale", None)
    if type(module) is nn.Linear:
        return QuantisedLinear(weight, module.bias)
    return QuantisedEmbedding(weight, scale or 1.0) if type(module) is nn.Embedding or scale is not None else None


def tie_head(model: Any) -> None:
    """Let a head that has no weight of its own have the embeddings'."""
    head, embedding = model.get_output_embeddings(), model.get_input_embeddings()
    if isinstance(head, nn.Linear) and head.weight.is_meta:
        if isinstance(embedding, QuantisedEmbedding):
            model.set_output_embeddings(QuantisedLinear(embedding.quantised, head.bias))
        elif not embedding.weight.is_meta:
            head.weight = embedding.weight


def rows_of(module: Any, ids: Tensor | slice) -> Tensor:
    """Rows of the weight of a linear layer or an embedding, `[rows, in_features]`; in float32 where it is quantised."""
    weight = getattr(module, "quantised", None)
    if not isinstance(weight, QuantisedWeight):
        return cast(Tensor, module.weight.detach()[ids])
    if isinstance(ids, slice):
        return torch.from_numpy(weight.dequantised(ids))
    return torch.from_numpy(weight.dequantised(ids.reshape(-1).cpu().numpy())).view(*ids.shape, weight.in_features)


def is_quantised(model: nn.Module) -> bool:
    """Whether some of a model's layers compute with quantised weights."""
    return any(isinstance(module, QuantisedLayer) for module in model.modules())
