"""The decoder's attention and its positions: to its own tokens along the tree, and to the encoder's output."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import scaled_dot_product_attention
from transformers import AttentionInterface, AttentionMaskInterface
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import bidirectional_mask_function

from precedent.errors import UnsupportedError
from precedent.target.attention import Terms, attention, row_masks, written_out
from precedent.target.kv.rows import RowMasks, Rule, RunningForward, additive, within
from precedent_models.encoder_decoder.kv import DecoderForward, decoder_forward


class DepthBias:
    """T5's bias in one forward: a number for each head and each distance along the tree, made at first use."""

    def __init__(self, attention: Any, forward: DecoderForward) -> None:
        self._attention, self._forward = attention, forward
        self._made: dict[int, Tensor] = {}

    def mask(self, index: int, masks: RowMasks, dtype: torch.dtype) -> Tensor:
        """Sequence `index`'s bias `[1, heads, rows, keys]`, -inf where a key is hidden."""
        if index not in self._made:
            self._made[index] = self._mask(index, masks, dtype)
        return self._made[index]

    def _mask(self, index: int, masks: RowMasks, dtype: torch.dtype) -> Tensor:
        buckets = _buckets(self._attention, self._forward.distances[index])
        bias: Tensor = self._attention.relative_attention_bias(buckets).permute(2, 0, 1)[None].to(dtype)
        visible = masks.visible(index)
        allowed = within(self._forward.sequences[index], masks.device) if visible.causal else visible.allowed
        return bias if allowed is None else bias + additive(allowed, bias.shape[-1], dtype)


def _buckets(attention: Any, distances: Tensor) -> Tensor:
    """The bucket of each distance; UMT5 takes number and reach of buckets from the module, T5 as arguments."""
    settings = False, attention.relative_attention_num_buckets, attention.relative_attention_max_distance
    own = hasattr(attention._relative_position_bucket, "__self__")
    buckets: Tensor = attention._relative_position_bucket(distances, *(() if own else settings))
    return buckets


def count_by_depth(decoder: nn.Module, first_position: int) -> None:
    """Let a decoder use each row's depth in the tree in forwards of ours, and its own positions in all others.

    `first_position` is the row of the position table that the first token gets (`first_row`).
    """
    for module in _biased(decoder):
        module.compute_bias = partial(_bias_by_depth, module, module.compute_bias)
    table = getattr(decoder, "embed_positions", None)
    if table is not None:
        table.register_forward_hook(partial(_position_by_depth, first_position))


def first_row(table: nn.Module, embedded: Tensor) -> int:
    """The row of a position table that equals `embedded` `[dim]`. Raises ValueError if none does."""
    found = (_rows_of(table) == embedded.reshape(1, -1)).all(dim=1).nonzero()
    if not len(found):
        raise ValueError("its positions are not rows of a table")
    return int(found[0])


def _rows_of(table: Any) -> Tensor:
    """The rows of a position table, `[positions, dim]`: an embedding's, or a buffer of sinusoids (M2M100)."""
    rows: Tensor = table.weight if hasattr(table, "weight") else table.weights
    return rows


def _biased(decoder: nn.Module) -> Iterator[Any]:
    return (module for module in decoder.modules() if getattr(module, "has_relative_attention_bias", False))


def _bias_by_depth(attention: Any, otherwise: Any, *args: Any, **kwargs: Any) -> DepthBias | Tensor:
    forward = decoder_forward()
    if forward is None:
        bias: Tensor = otherwise(*args, **kwargs)
        return bias
    return DepthBias(attention, forward)


def _position_by_depth(first_position: int, table: nn.Module, args: Any, embedded: Tensor) -> Tensor:
    forward = decoder_forward()
    if forward is None:
        return embedded
    rows = torch.nn.functional.embedding(forward.positions + first_position, _rows_of(table))
    return rows.to(embedded.dtype).view_as(embedded)


NAME = "precedent-decoder"


def decoder_attention(
    module: torch.nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: RowMasks | Tensor | None,
    position_bias: DepthBias | Tensor | None = None,
    **kwargs: Any,
) -> tuple[Tensor, Tensor | None]:
    """Attention in a decoder forward of ours, transformers' own otherwise; shapes are those of `target.attention`."""
    forward = decoder_forward()
    if forward is None:
        return _plain(module, query, key, value, attention_mask, position_bias, **kwargs)
    layer = forward.cross_layer(key)
    if layer is not None:
        return _to_encoder(forward, query, layer, Terms(kwargs.get("scaling"), kwargs.get("softcap"), None)), None
    if isinstance(position_bias, DepthBias):
        assert isinstance(attention_mask, RowMasks)
        return _attend_biased(query, key, value, attention_mask, position_bias, kwargs.get("scaling")), None
    if position_bias is not None:
        raise UnsupportedError(f"{type(module).__name__} has a position bias of its own, which a tree cannot follow")
    return attention(module, query, key, value, attention_mask, **kwargs)


def _plain(
    module: Any, query: Tensor, key: Tensor, value: Tensor, mask: Any, bias: Any, **kwargs: Any
) -> tuple[Tensor, None]:
    if kwargs.get("softcap") is not None:  # which `sdpa` does not compute
        return attention(module, query, key, value, mask, is_causal=module.is_causal, **kwargs)
    if bias is not None:
        kwargs["position_bias"] = bias
    attended: tuple[Tensor, None] = sdpa_attention_forward(module, query, key, value, mask, **kwargs)
    return attended


def _to_encoder(forward: DecoderForward, query: Tensor, layer: int, terms: Terms) -> Tensor:
    parts = []
    for index, (start, stop) in enumerate(forward.spans):
        (keys, values), rows = forward.cross_kv(index, layer), query[:, :, start:stop]
        if terms.plain:
            grouped = query.shape[1] > keys.shape[1]
            parts.append(scaled_dot_product_attention(rows, keys, values, scale=terms.scaling, enable_gqa=grouped))
        else:
            parts.append(written_out(rows, keys, values, None, False, terms))
    return torch.cat(parts, dim=2).transpose(1, 2).contiguous()


def _attend_biased(
    query: Tensor, key: Tensor, value: Tensor, masks: RowMasks, bias: DepthBias, scaling: float | None
) -> Tensor:
    parts = []
    for index, (start, stop) in enumerate(masks.forward.spans):
        keys, values = masks.forward.keys_and_values(index, key, value, 0)
        mask = bias.mask(index, masks, query.dtype)
        parts.append(scaled_dot_product_attention(query[:, :, start:stop], keys, values, attn_mask=mask, scale=scaling))
    return torch.cat(parts, dim=2).transpose(1, 2).contiguous()


def decoder_masks(*, mask_function: Rule, **kwargs: Any) -> RowMasks | RunningForward | Tensor | None:
    """The mask of one kind of layer, as in `target.attention`; none towards the encoder in our own forwards."""
    towards_encoder = decoder_forward() is not None and mask_function is bidirectional_mask_function
    return None if towards_encoder else row_masks(mask_function=mask_function, **kwargs)


AttentionInterface.register(NAME, decoder_attention)
AttentionMaskInterface.register(NAME, decoder_masks)
