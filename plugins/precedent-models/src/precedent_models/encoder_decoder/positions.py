"""Positions of decoder rows: by depth in the tree, where transformers' decoders count rows."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from precedent.target.kv.visibility import RowMasks, additive, within
from precedent_models.encoder_decoder.forward import DecoderForward, decoder_forward


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
    for attention in _biased(decoder):
        attention.compute_bias = partial(_bias_by_depth, attention, attention.compute_bias)
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
