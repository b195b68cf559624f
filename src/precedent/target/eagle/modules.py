"""The parts of an EAGLE-3 head around its layers: its inputs, their fusion, and its first layer.

The layer attends to `[norm(embedding), norm(state)]`, twice as wide as the head (2503.01840, section 3.1).
"""

from __future__ import annotations

import copy
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

from precedent.target.given_states import GivenStates


class EagleInputs(GivenStates):
    """What the first layer reads: embeddings beside states, `[1, rows, 2 * hidden_size]`."""

    def fused(self, embedded: Tensor, states: Tensor) -> Tensor:
        """Both, side by side."""
        return torch.cat([embedded.to(states.dtype), states], dim=-1)


class Fusion(nn.Module):
    """The outputs of several of the target's layers as one vector per token."""

    def __init__(self, width: int, hidden_size: int, norms: Sequence[nn.Module]) -> None:
        super().__init__()
        self.norms = nn.ModuleList(norms)
        self.fc = nn.Linear(width, hidden_size, bias=False)

    def forward(self, states: Tensor) -> Tensor:
        """`[..., width]` to `[..., hidden_size]`; each norm takes an equal part of the width."""
        states = states.to(self.fc.weight.dtype)
        if len(self.norms):
            parts = states.chunk(len(self.norms), dim=-1)
            states = torch.cat([norm(part) for norm, part in zip(self.norms, parts, strict=True)], dim=-1)
        fused: Tensor = self.fc(states)
        return fused


class FirstLayer(nn.Module):
    """A decoder layer of the usual parts, whose attention reads embeddings and states side by side."""

    def __init__(self, layer: Any, *, norm_before_residual: bool) -> None:
        super().__init__()
        self.self_attn, self.mlp = layer.self_attn, layer.mlp
        self.input_layernorm, self.post_attention_layernorm = layer.input_layernorm, layer.post_attention_layernorm
        self.hidden_norm = copy.deepcopy(layer.input_layernorm)
        self._norm_before_residual = norm_before_residual
        self.attention_type = getattr(layer, "attention_type", None)  # some transformers choose a layer's mask by it
        for name in ("q_proj", "k_proj", "v_proj"):
            part = getattr(self.self_attn, name)
            wide = nn.Linear(2 * part.in_features, part.out_features, part.bias is not None, part.weight.device)
            setattr(self.self_attn, name, wide)

    def forward(self, hidden_states: Tensor, **given: Any) -> Tensor:
        """Embeddings beside states, `[1, rows, 2 * hidden_size]`, to `[1, rows, hidden_size]`."""
        embedded, states = hidden_states.chunk(2, dim=-1)
        normed = self.hidden_norm(states)
        read = torch.cat([self.input_layernorm(embedded), normed], dim=-1)
        attended, _ = self.self_attn(hidden_states=read, **given)
        hidden = (normed if self._norm_before_residual else states) + attended
        output: Tensor = hidden + self.mlp(self.post_attention_layernorm(hidden))
        return output
