"""A KV cache that takes a whole candidate tree and keeps only the rows of the accepted path.

Rows `[0, length)` are committed. A forward pass writes its rows behind them; `keep` makes some of those permanent (in
place, in order), and whatever is not kept is overwritten by the next forward. No token is ever computed twice.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from transformers.cache_utils import Cache, CacheLayerMixin

BUCKET = 256
"""Buffers grow in steps of this many tokens, so that a growing answer seldom reallocates."""


class KVLayer(CacheLayerMixin):
    """Keys and values of one attention layer, `[1, num_key_value_heads, capacity, head_dim]`."""

    is_sliding = False
    is_croppable = True
    keys: Tensor  # transformers allows None here; nobody asks before the first update
    values: Tensor

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]  # transformers does not type it
        self.length = 0

    def lazy_initialization(self, key_states: Tensor, value_states: Tensor) -> None:
        """Allocate the first bucket in the dtype and on the device of the first keys."""
        self.dtype, self.device = key_states.dtype, key_states.device
        self.keys = key_states.new_empty((*key_states.shape[:2], 0, key_states.shape[3]))
        self.values = value_states.new_empty((*value_states.shape[:2], 0, value_states.shape[3]))
        self.is_initialized = True

    def update(self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor]:
        """Write rows behind the committed ones and return all of them, `[1, heads, length + rows, head_dim]`."""
        if not self.is_initialized:
            self.lazy_initialization(key_states, value_states)
        end = self.length + key_states.shape[-2]
        self._reserve(end)
        self.keys[:, :, self.length : end] = key_states
        self.values[:, :, self.length : end] = value_states
        return self.keys[:, :, :end], self.values[:, :, :end]

    def _reserve(self, rows: int) -> None:
        missing = rows - self.keys.shape[-2]
        if missing > 0:
            extra = -(-missing // BUCKET) * BUCKET
            self.keys = _grown(self.keys, self.length, extra)
            self.values = _grown(self.values, self.length, extra)

    def keep(self, rows: Tensor) -> None:
        """Move scored rows (offsets behind `length`, `[num_kept]`, increasing) to the front and commit them."""
        end = self.length + rows.numel()
        source = rows + self.length
        self.keys[:, :, self.length : end] = self.keys.index_select(2, source)
        self.values[:, :, self.length : end] = self.values.index_select(2, source)

    def fork(self, length: int) -> KVLayer:
        """A layer that starts with a copy of the first `length` rows."""
        copy = KVLayer()
        if self.is_initialized:
            copy.dtype, copy.device, copy.is_initialized = self.dtype, self.device, True
            extra = -(-length // BUCKET) * BUCKET
            copy.keys = _grown(self.keys[:, :, :0], 0, extra)
            copy.values = _grown(self.values[:, :, :0], 0, extra)
            copy.keys[:, :, :length] = self.keys[:, :, :length]
            copy.values[:, :, :length] = self.values[:, :, :length]
            copy.length = length
        return copy

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        """Number of keys that a query of `query_length` tokens sees, and their offset."""
        return self.length + query_length, 0

    def get_seq_length(self) -> int:
        """Number of committed tokens."""
        return self.length

    def get_max_length(self) -> int:
        """No limit of its own."""
        return -1


def _grown(buffer: Tensor, used: int, extra: int) -> Tensor:
    """A copy with `extra` more rows; only the first `used` rows are carried over."""
    shape = (*buffer.shape[:2], buffer.shape[2] + extra, buffer.shape[3])
    grown = buffer.new_zeros(
        shape
    )  # zeros, not garbage: masked rows still enter 0 · value products, and 0 · NaN is NaN
    grown[:, :, :used] = buffer[:, :, :used]
    return grown


class KVCache(Cache):
    """One sequence's keys and values for all layers, with `keep` and `rewind`."""

    def __init__(self, layers: Sequence[KVLayer]) -> None:
        super().__init__(layers=list(layers))
        self._layers = tuple(layers)

    @classmethod
    def empty(cls, num_layers: int) -> KVCache:
        """A cache that holds nothing yet."""
        return cls([KVLayer() for _ in range(num_layers)])

    def fork(self, length: int) -> KVCache:
        """A cache of its own that starts with a copy of the first `length` tokens."""
        return KVCache([layer.fork(length) for layer in self._layers])

    @property
    def length(self) -> int:
        """Number of committed tokens."""
        return self._layers[0].length

    @property
    def nbytes(self) -> int:
        """Bytes held by all buffers."""
        initialized = [layer for layer in self._layers if layer.is_initialized]
        return sum(layer.keys.nbytes + layer.values.nbytes for layer in initialized)

    def keep(self, rows: Sequence[int]) -> None:
        """Commit these rows of the last forward (increasing offsets, 0 = its first token); modifies the cache.

        Rows that already stand in place, which is the common case of a chain, are not copied.
        """
        in_place = next((i for i, row in enumerate(rows) if row != i), len(rows))
        self._advance(in_place)
        if in_place < len(rows):
            for layer in self._layers:
                moved = torch.tensor([row - in_place for row in rows[in_place:]], device=layer.keys.device)
                layer.keep(moved)
            self._advance(len(rows) - in_place)

    def rewind(self, length: int) -> None:
        """Forget all tokens from `length` on; modifies the cache. Raises ValueError when it holds fewer."""
        if not 0 <= length <= self.length:
            raise ValueError(f"cannot rewind to {length} tokens: the KV cache holds {self.length}")
        for layer in self._layers:
            layer.length = length

    def _advance(self, rows: int) -> None:
        for layer in self._layers:
            layer.length += rows
