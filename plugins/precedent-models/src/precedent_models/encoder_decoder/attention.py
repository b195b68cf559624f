"""The decoder's attention: to its own tokens along the tree, with T5's position bias, and to the encoder's output."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention
from transformers import AttentionInterface, AttentionMaskInterface
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import bidirectional_mask_function, sdpa_mask

from precedent.errors import UnsupportedError
from precedent.target.attention import Terms, attention, written_out
from precedent.target.kv.visibility import RowMasks, Rule
from precedent_models.encoder_decoder.forward import DecoderForward, decoder_forward
from precedent_models.encoder_decoder.positions import DepthBias

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
        return _biased(query, key, value, attention_mask, position_bias, kwargs.get("scaling")), None
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
    """Every row attends to the whole prompt of its sequence."""
    parts = []
    for index, (start, stop) in enumerate(forward.spans):
        keys, values = forward.cross_kv(index, layer)
        parts.append(_unmasked(query[:, :, start:stop], keys, values, terms))
    return torch.cat(parts, dim=2).transpose(1, 2).contiguous()


def _unmasked(query: Tensor, keys: Tensor, values: Tensor, terms: Terms) -> Tensor:
    if not terms.plain:
        return written_out(query, keys, values, None, False, terms)
    grouped = query.shape[1] > keys.shape[1]
    return scaled_dot_product_attention(query, keys, values, scale=terms.scaling, enable_gqa=grouped)


def _biased(
    query: Tensor, key: Tensor, value: Tensor, masks: RowMasks, bias: DepthBias, scaling: float | None
) -> Tensor:
    """Attention along the tree with a bias for each head and distance."""
    parts = []
    for index, (start, stop) in enumerate(masks.forward.spans):
        keys, values = masks.forward.keys_and_values(index, key, value, 0)
        mask = bias.mask(index, masks, query.dtype)
        parts.append(scaled_dot_product_attention(query[:, :, start:stop], keys, values, attn_mask=mask, scale=scaling))
    return torch.cat(parts, dim=2).transpose(1, 2).contiguous()


def decoder_masks(
    *, mask_function: Rule, local_size: int | None = None, use_vmap: bool = False, device: torch.device, **kwargs: Any
) -> RowMasks | Tensor | None:
    """The mask of one kind of layer: ours in our own forwards, none towards the encoder, `sdpa`'s otherwise."""
    forward = decoder_forward()
    if forward is None:
        return sdpa_mask(mask_function=mask_function, local_size=local_size, use_vmap=use_vmap, device=device, **kwargs)
    if use_vmap:
        raise UnsupportedError("the decoder combines causal attention with a mask of its own")
    return (
        None if mask_function is bidirectional_mask_function else RowMasks(forward, mask_function, local_size, device)
    )


AttentionInterface.register(NAME, decoder_attention)
AttentionMaskInterface.register(NAME, decoder_masks)
