"""Forwards of recurrent modules that compute their recurrence in place, where no function could be replaced."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import softplus

from precedent_models.recurrent.channels import Gated
from precedent_models.recurrent.functions import decayed_sum, over_channels
from precedent_models.recurrent.step import the_step


def lightning_attention(module: Any, hidden_states: Tensor, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor | None]:
    """MiniMax: linear attention with a fixed decay for each head, `[1, rows, hidden]` to the same shape."""
    rows = module.act_fn(module.qkv_proj(hidden_states))
    rows = rows.reshape(1, hidden_states.shape[1], module.num_attention_heads, 3 * module.head_dim)
    query, key, value = rows.transpose(1, 2).split(module.head_dim, dim=3)
    output = decayed_sum(query, key, value, -module.slope_rate).to(hidden_states.dtype)
    output = module.norm(output.flatten(2))
    return module.out_proj(torch.sigmoid(module.output_gate(hidden_states)) * output), None


def gated_unit(
    module: Any, input_states: Tensor, position_ids: Tensor, *args: Any, **kwargs: Any
) -> tuple[Tensor, None]:
    """RecurrentGemma's block: a convolution and the RG-LRU, times a gate, `[1, rows, hidden]` to the same shape."""
    gate = module.act_fn(module.linear_y(input_states))
    convolution = module.conv_1d
    line = module.linear_x(input_states)[0].transpose(0, 1)
    line = the_step().convolve(line, convolution.weight[:, 0], convolution.bias).to(input_states.dtype)
    found = _gated(module.rg_lru, line.transpose(0, 1)[None], position_ids)
    return module.linear_out(found.to(input_states.dtype)[None] * gate), None


def _gated(unit: Any, rows: Tensor, position_ids: Tensor) -> Tensor:
    """The RG-LRU, `[1, rows, channels]` to `[rows, channels]`: the gates as transformers computes them, then the state.

    The first token of a text forgets whatever was before it.
    """
    by_head = rows[0].reshape(-1, unit.num_attention_heads, unit.block_width).transpose(0, 1)
    taken, forgotten = (
        torch.baddbmm(bias[:, None], by_head, weight).transpose(0, 1).reshape(rows.shape[1:]).sigmoid()
        for bias, weight in (
            (unit.input_gate_bias, unit.input_gate_weight),
            (unit.recurrent_gate_bias, unit.recurrent_gate_weight),
        )
    )
    exponent = -8.0 * forgotten * softplus(unit.recurrent_param)
    first = position_ids[0, :, None] == 0
    scale = torch.where(first, 1.0, torch.sqrt(1 - (2 * exponent).exp()))
    added = rows[0] * taken * scale.to(rows.dtype)
    precise = torch.promote_types(rows.dtype, torch.float32)
    kept = exponent.exp().to(precise).masked_fill(first, 0.0)
    return over_channels(Gated(kept, added.to(precise)), rows)


OWN_FORWARDS: dict[str, Callable[..., Any]] = {
    "MiniMaxLightningAttention": lightning_attention,
    "RecurrentGemmaRecurrentBlock": gated_unit,
}
"""Forwards by the names of transformers' classes."""
