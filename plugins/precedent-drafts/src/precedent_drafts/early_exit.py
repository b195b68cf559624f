"""A trained exit: the target's first layers, an adapter, and the target's final norm and head (FREE, 2310.05424).

The layers are the target's own and store the keys and values that they store there, so an exit reads the target's KV
cache as `first-layers:N` does. The adapter looks at one token at a time and stores nothing.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from precedent.errors import ModelLoadError, UnsupportedError
from precedent.target.fingerprints import name_of
from precedent.target.load.first_layers import base_of, first_layers, layers_of
from precedent_drafts.borrowed import HEAD_TOKENS, check_on_one_device, restrict_head

ADAPTER = "adapter."
"""How the names of an adapter's weights begin in a draft's folder."""

EPSILON = 1e-6


class ExitAdapter(nn.Module):
    """Adds to a layer's output a linear map and a gated unit of its norm; with new weights it changes nothing.

    `width` is the size of the gated unit.
    """

    def __init__(self, hidden_size: int, width: int) -> None:
        super().__init__()
        self.norm = nn.RMSNorm(hidden_size, eps=EPSILON)
        self.map_proj = nn.Linear(hidden_size, hidden_size, bias=False)
        self.gate_proj = nn.Linear(hidden_size, width, bias=False)
        self.up_proj = nn.Linear(hidden_size, width, bias=False)
        self.down_proj = nn.Linear(width, hidden_size, bias=False)
        nn.init.zeros_(self.map_proj.weight)
        nn.init.zeros_(self.down_proj.weight)

    def forward(self, hidden: Tensor) -> Tensor:
        """`[..., hidden_size]` to the same shape."""
        normed = self.norm(hidden)
        gated: Tensor = self.down_proj(nn.functional.silu(self.gate_proj(normed)) * self.up_proj(normed))
        mapped: Tensor = self.map_proj(normed)
        return hidden + mapped + gated


class AdaptedNorm(nn.Module):
    """Stands where a model has its final norm: the adapter, then that norm."""

    def __init__(self, adapter: ExitAdapter, norm: nn.Module) -> None:
        super().__init__()
        self.adapter, self.norm = adapter, norm

    def forward(self, hidden: Tensor) -> Tensor:
        """The last layer's output to final hidden states."""
        found: Tensor = self.norm(self.adapter(hidden))
        return found


def check_exits(target: PreTrainedModel) -> None:
    """Raise UnsupportedError unless a target has `layers`, a final `norm` behind them, and is whole on one device."""
    layers_of(target)
    if not isinstance(getattr(base_of(target), "norm", None), nn.Module):
        raise UnsupportedError(f"{name_of(target)} has no final `norm`, before which an exit puts its adapter")
    check_on_one_device(target, "an exit")


def exit_beside(target: PreTrainedModel, layer: int, weights: Mapping[str, Tensor]) -> PreTrainedModel:
    """The exit behind the target's layer `layer`, counted from 1, in the target's dtype; no weight of it is copied.

    Raises ModelLoadError for weights that do not fit, UnsupportedError for a target without a place for an exit.
    """
    check_exits(target)
    draft = first_layers(target, layer)
    base: Any = base_of(draft)
    base.norm = AdaptedNorm(_adapter_of(target, weights), base.norm).eval()
    if HEAD_TOKENS in weights:
        restrict_head(draft, target, weights[HEAD_TOKENS])
    return draft


def _adapter_of(target: PreTrainedModel, weights: Mapping[str, Tensor]) -> ExitAdapter:
    own = {
        name.removeprefix(ADAPTER): tensor.to(target.device, target.dtype)
        for name, tensor in weights.items()
        if name.startswith(ADAPTER)
    }
    try:
        with torch.device("meta"):
            adapter = ExitAdapter(target.config.get_text_config().hidden_size, own["gate_proj.weight"].shape[0])
        adapter.load_state_dict(own, assign=True)
    except (KeyError, RuntimeError) as error:
        raise ModelLoadError(f"the weights of the exit do not fit: {' '.join(str(error).split())}") from error
    return adapter
