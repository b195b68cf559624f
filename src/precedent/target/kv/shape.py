"""What one row of a model's KV cache looks like, as observed in a forward, and how much memory a sequence needs."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import groupby
from typing import Any

import torch
from torch import Tensor
from transformers.cache_utils import Cache, CacheLayerMixin

from precedent.target.kv.index_keys import IndexKeys
from precedent.target.kv.no_states import NoStates
from precedent.target.kv.states import MOST_SNAPSHOTS, Key, StateShape

BUCKET = 256
"""Buffers hold a multiple of this many tokens, so that a growing answer rarely reallocates."""

GROWTH_SHARE = 8
"""A long sequence grows by about this fraction of itself (a power of two): copying stays linear in its length."""

BLOCK_LAYERS = 8
"""The most layers that share a buffer."""

STATES_HELD = MOST_SNAPSHOTS + 3
"""States of a sequence at most: snapshots, the present one, the one before the last step, and one in the making."""


def capacity_for(num_tokens: int) -> int:
    """Rows in a buffer for `num_tokens` tokens: rounded up to a bucket, or to about an eighth of a long sequence."""
    bucket = max(BUCKET, 1 << (max(num_tokens // GROWTH_SHARE, 1).bit_length() - 1))
    return -(-num_tokens // bucket) * bucket


@dataclass(frozen=True, slots=True)
class LayerShape:
    """One layer's keys `[heads, tokens, key_dim]` and values, their dtype, and the layer's device."""

    key_heads: int
    key_dim: int
    value_heads: int
    value_dim: int
    dtype: torch.dtype
    device: torch.device

    @property
    def row_bytes(self) -> int:
        """Bytes of one token in this layer."""
        return (self.key_heads * self.key_dim + self.value_heads * self.value_dim) * self.dtype.itemsize


@dataclass(frozen=True, slots=True)
class KVShape:
    """The shapes of all layers; None for a layer without its own keys and values.

    `states` are those of the recurrent layers. A forward keeps `kept_bytes` of each row's inputs until its path is
    known. `index_keys` are those that layers with an indexer keep beside their own keys and values, `()` if none does.
    """

    layers: tuple[LayerShape | None, ...]
    states: tuple[tuple[Key, StateShape], ...] = ()
    kept_bytes: int = 0
    index_keys: tuple[LayerShape | None, ...] = ()

    @property
    def blocks(self) -> list[tuple[LayerShape | None, int]]:
        """Runs of consecutive equal layers with their lengths, none longer than `BLOCK_LAYERS`; then the index keys."""
        runs = [(shape, len(list(run))) for shape, run in groupby((*self.layers, *self.index_keys))]
        return [
            (shape, min(BLOCK_LAYERS, count - start))
            for shape, count in runs
            for start in range(0, count, BLOCK_LAYERS)
        ]

    @property
    def row_bytes(self) -> int:
        """Bytes of one token in all layers."""
        return sum(shape.row_bytes for shape in (*self.layers, *self.index_keys) if shape is not None)

    def first_layers(self, count: int) -> KVShape:
        """The keys and values of the first `count` layers, without states."""
        return KVShape(self.layers[:count], index_keys=_if_any(self.index_keys[:count]))

    def nbytes(self, num_tokens: int) -> int:
        """Bytes of a cache for `num_tokens` tokens, rounding included, with all states that it may hold."""
        return capacity_for(num_tokens) * self.row_bytes + STATES_HELD * self.state_bytes

    @property
    def state_bytes(self) -> int:
        """Bytes of the states of all recurrent layers."""
        return sum(shape.nbytes for _, shape in self.states)


def _if_any(layers: tuple[LayerShape | None, ...]) -> tuple[LayerShape | None, ...]:
    return layers if any(layers) else ()


class ShapeObserver(NoStates, Cache):
    """Takes the KV cache's place in a model's first forward and records what each layer would store."""

    def __init__(self, num_layers: int) -> None:
        self._observing = [_ObserverLayer() for _ in range(num_layers)]
        super().__init__(layers=list(self._observing))

    @property
    def shape(self) -> KVShape:
        """The shapes recorded."""
        index_keys = tuple(layer.index_shape for layer in self._observing)
        return KVShape(tuple(layer.shape for layer in self._observing), index_keys=_if_any(index_keys))


class _ObserverLayer(CacheLayerMixin):
    is_sliding = False
    is_croppable = True

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]  # transformers does not type it
        self.shape: LayerShape | None = None
        self.index_shape: LayerShape | None = None
        self.indexer_position_ids: Tensor | None = None

    def lazy_initialization(self, key_states: Tensor, value_states: Tensor) -> None:
        """Nothing is stored."""

    def update(self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor]:
        (_, key_heads, _, key_dim), (_, value_heads, _, value_dim) = key_states.shape, value_states.shape
        place = key_states.dtype, key_states.device
        self.shape = LayerShape(key_heads, key_dim, value_heads, value_dim, *place)
        return key_states, value_states

    def update_indexer(self, indexer_key_states: Tensor) -> Tensor:
        place = indexer_key_states.dtype, indexer_key_states.device
        self.index_shape = LayerShape(1, indexer_key_states.shape[-1], 1, 0, *place)
        return indexer_key_states.as_subclass(IndexKeys)

    def update_index(self, indexer_key_states: Tensor) -> Tensor:
        self.update_indexer(indexer_key_states)
        return indexer_key_states

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        return query_length, 0

    def get_seq_length(self) -> int:
        return 0

    def get_max_length(self) -> int:
        return -1
