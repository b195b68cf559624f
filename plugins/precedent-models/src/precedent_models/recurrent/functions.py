"""The functions that transformers' recurrent modules call, by the names and arguments that they have there.

transformers computes one sequence at a time, in chunks of a chain. These compute the rows of the running step, which
may be trees of several sequences. They return states that nobody reads: the step keeps what is needed.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import silu, softplus
from transformers.activations import ACT2FN

from precedent_models.recurrent import channels, matrices
from precedent_models.recurrent.channels import Gated
from precedent_models.recurrent.step import the_step


def causal_conv1d_fn(
    hidden_states: Tensor, weight: Tensor, bias: Tensor | None = None, activation: str | None = None, **_: Any
) -> Tensor:
    """`[1, channels, rows]` to the same shape."""
    output = the_step().convolve(hidden_states[0].to(weight.dtype), weight, bias)
    return (output if activation is None else ACT2FN[activation](output)).to(hidden_states.dtype)[None]


def gated_delta_rule(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    g: Tensor,
    beta: Tensor,
    *,
    use_qk_l2norm_in_kernel: bool = False,
    **_: Any,
) -> tuple[Tensor, Tensor]:
    """`query` and `key` `[1, rows, heads, key_dim]`, `value` `[1, rows, heads, value_dim]`; returns outputs like it.

    `g` `[1, rows, heads]`, or with a last dimension of channels, is the logarithm of the decay, `beta` the step size.
    """
    heads = value.shape[2]
    query, key = (_precise(each).repeat_interleave(heads // each.shape[2], dim=1)[0] for each in (query, key))
    if use_qk_l2norm_in_kernel:
        query, key = _unit(query), _unit(key)
    decay = _precise(g if g.dim() == 4 else g[..., None])[0]
    inputs = matrices.Inputs(
        query * query.shape[-1] ** -0.5, key, _precise(value)[0], decay, _precise(beta[..., None])[0]
    )
    return _over_tree(inputs, value), _nothing(value)


def mamba2_chunk_scan(
    hidden_states: Tensor,
    dt: Tensor,
    A: Tensor,
    B: Tensor,
    C: Tensor,
    *,
    D: Tensor | None = None,
    dt_bias: Tensor | None = None,
    dt_softplus: bool = False,
    dt_limit: tuple[float, float] = (0.0, float("inf")),
    return_final_states: bool = False,
    **_: Any,
) -> tuple[Tensor, Tensor] | Tensor:
    """`hidden_states` `[1, rows, heads, head_dim]`, `dt` `[1, rows, heads]`, `A` `[heads]`, `B` and `C` for each group.

    Returns outputs like `hidden_states`.
    """
    heads = hidden_states.shape[2]
    dt = dt if dt_bias is None else dt + dt_bias.to(dt.dtype)
    step = _precise((softplus(dt) if dt_softplus else dt).clamp(*dt_limit)[..., None])[0]
    key, query = (_precise(each).repeat_interleave(heads // each.shape[2], dim=1)[0] for each in (B, C))
    value = _precise(hidden_states)[0]
    inputs = matrices.Inputs(query, key, value * step, step * A.to(step.dtype)[:, None, None])
    output = _over_tree(inputs, hidden_states)
    if D is not None:
        output = output + D[:, None] * hidden_states
    return (output, _nothing(output)) if return_final_states else output


def mamba_selective_scan(
    hidden_states: Tensor,
    dt: Tensor,
    A: Tensor,
    B: Tensor,
    C: Tensor,
    *,
    D: Tensor | None = None,
    z: Tensor | None = None,
    delta_bias: Tensor | None = None,
    delta_softplus: bool = False,
    return_last_state: bool = False,
    **_: Any,
) -> tuple[Tensor, Tensor] | Tensor:
    """`hidden_states` and `dt` `[1, channels, rows]`, `A` `[channels, states]`, `B` and `C` `[1, states, rows]`.

    Returns outputs like `hidden_states`.
    """
    dt = dt if delta_bias is None else dt + delta_bias.to(dt.dtype)[:, None]
    by_row = [channels.prepare(each[0]) for each in (hidden_states, softplus(dt) if delta_softplus else dt, B, C)]
    value, step, key, query = by_row
    inputs = channels.Selective(value, step, key, query, A.to(value.dtype))
    output = over_channels(inputs, inputs.value).transpose(0, 1)[None]
    if D is not None:
        output = output + hidden_states * D[:, None]
    if z is not None:
        output = output * silu(z)
    return (output, _nothing(output)) if return_last_state else output


def over_channels(inputs: channels.Gated | channels.Selective, like: Tensor) -> Tensor:
    """Outputs of a recurrence of the channels, `[rows, channels]`."""
    return torch.cat(the_step().scan(inputs, channels, like.device))


def _over_tree(inputs: matrices.Inputs, like: Tensor) -> Tensor:
    """Outputs of a recurrence of matrices, `[1, rows, heads, value_dim]`, in the dtype of `like`."""
    output = torch.cat(the_step().scan(inputs, matrices, like.device), dim=1)
    return output.transpose(0, 1)[None].to(like.dtype).contiguous()


def decayed_sum(query: Tensor, key: Tensor, value: Tensor, decay: Tensor) -> Tensor:
    """Lightning attention: `[1, heads, rows, dim]` each, `decay` `[heads, 1, 1]` as a logarithm; like `value`."""
    query, key, value = (each[0].to(_precision(each)) for each in (query, key, value))
    each = decay.to(value.dtype).expand(-1, value.shape[1], 1)
    return _over_tree(matrices.Inputs(query, key, value, each), value)


def _precise(by_row: Tensor) -> Tensor:
    """Heads before rows, in at least float32, `[1, heads, rows, ...]`."""
    return by_row.transpose(1, 2).to(_precision(by_row))


def _precision(tensor: Tensor) -> torch.dtype:
    return torch.promote_types(tensor.dtype, torch.float32)


def _unit(vectors: Tensor) -> Tensor:
    return vectors * torch.rsqrt((vectors * vectors).sum(-1, keepdim=True) + 1e-6)


def _nothing(like: Tensor) -> Tensor:
    return like.new_empty(0)


FUNCTIONS: dict[str, Callable[..., Any]] = {
    "causal_conv1d_fn": causal_conv1d_fn,
    "torch_chunk_gated_delta_rule": gated_delta_rule,
    "chunk_kimi_delta_attention": gated_delta_rule,
    "mamba2_chunk_scan": mamba2_chunk_scan,
    "mamba_selective_scan": mamba_selective_scan,
}
"""What replaces the functions of transformers' modules, by their names there."""


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
