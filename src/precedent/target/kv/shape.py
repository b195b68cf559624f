"""What one row of a model's KV cache looks like, as observed in a forward, and how much memory a sequence needs."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import groupby
from typing import TYPE_CHECKING

import torch
from torch import Tensor
from transformers.cache_utils import Cache, DynamicLayer

if TYPE_CHECKING:
    from precedent.target.kv.cache import KVLayer

BUCKET = 256
"""Buffers hold a multiple of this many tokens, so that a growing answer rarely reallocates."""

GROWTH_SHARE = 8
"""A long sequence grows by about this fraction of itself (a power of two): copying stays linear in its length."""

BLOCK_LAYERS = 8
"""The most layers that share a buffer."""


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
    def sizes(self) -> tuple[tuple[int, int], tuple[int, int]]:
        """Heads and dimension of the keys, then of the values."""
        return (self.key_heads, self.key_dim), (self.value_heads, self.value_dim)

    @property
    def row_bytes(self) -> int:
        """Bytes of one token in this layer."""
        return sum(heads * dim for heads, dim in self.sizes) * self.dtype.itemsize

    @classmethod
    def of(cls, keys: Tensor, values: Tensor) -> LayerShape:
        """The shape of `keys` and `values` `[1, heads, tokens, dim]`."""
        (_, key_heads, _, key_dim), (_, value_heads, _, value_dim) = keys.shape, values.shape
        return cls(key_heads, key_dim, value_heads, value_dim, keys.dtype, keys.device)


class SequenceState:
    """What some layers remember of one sequence instead of keys and values, or beside them; this one, nothing.

    `KVCache` calls it at every change of its rows. A state is a function of all tokens before it and cannot be cut back
    as keys can, so an implementation says with `nearest` how far it can go back. Lengths are in tokens.
    """

    nbytes = 0
    """Bytes held, snapshots included."""

    kept_bytes = 0
    """Bytes that the last forward keeps until a path is committed."""

    @property
    def shape(self) -> StateShape:
        """The shape of the committed state."""
        return StateShape()

    def keep(self, length: int, rows: Sequence[int]) -> None:
        """Commit these rows of the last forward, before which `length` tokens were committed."""

    def mark(self, length: int) -> None:
        """Remember the current `length` as one to go back to."""

    def nearest(self, length: int, wanted: int) -> int:
        """The most tokens up to `wanted`, of the current `length`, that it can go back to."""
        return wanted

    def rewind(self, length: int, to: int) -> None:
        """Go back from `length` tokens to `to`, which `nearest` returned; forget what was not committed."""

    def fork(self, length: int, at: int) -> SequenceState:
        """The state of another sequence that begins with the first `at` of these `length` tokens."""
        return self

    def first_layers(self, count: int) -> SequenceState:
        """The state of the first `count` layers, to run ahead with."""
        return self

    def parts(self, length: int, at: int) -> list[Tensor]:
        """All tensors of the state after the first `at` tokens, in a fixed order."""
        return []


@dataclass(frozen=True)
class StateShape:
    """What the `SequenceState` of a model takes; this one, nothing.

    A forward keeps `kept_bytes` of each row until its path is known.
    """

    kept_bytes: int = 0

    @property
    def nbytes(self) -> int:
        """Bytes of one state of all layers."""
        return 0

    @property
    def most_bytes(self) -> int:
        """The most bytes that a sequence holds, snapshots included."""
        return 0

    @property
    def cache_layer(self) -> type[KVLayer] | None:
        """What transformers' modules find in the cache for each layer; None for core's own `KVLayer`."""
        return None

    def new(self) -> SequenceState:
        """The state of an empty sequence."""
        return SequenceState()

    def restored(self, parts: Sequence[Tensor]) -> SequenceState:
        """The state that `SequenceState.parts` gave. Raises ValueError for tensors of another model."""
        if parts:
            raise ValueError("these keys and values are not of this model")
        return self.new()


@dataclass(frozen=True, slots=True)
class KVShape:
    """The shapes of all layers; None for a layer without its own keys and values.

    `extra` are rows that layers keep beside their own keys and values, `()` if none does: an indexer's keys.
    """

    layers: tuple[LayerShape | None, ...]
    state: StateShape = StateShape()
    extra: tuple[LayerShape | None, ...] = ()

    @property
    def blocks(self) -> list[tuple[LayerShape | None, int]]:
        """Runs of consecutive equal layers with their lengths, none longer than `BLOCK_LAYERS`; then `extra`."""
        runs = [(shape, len(list(run))) for shape, run in groupby((*self.layers, *self.extra))]
        return [
            (shape, min(BLOCK_LAYERS, count - start))
            for shape, count in runs
            for start in range(0, count, BLOCK_LAYERS)
        ]

    @property
    def row_bytes(self) -> int:
        """Bytes of one token in all layers."""
        return sum(shape.row_bytes for shape in (*self.layers, *self.extra) if shape is not None)

    def first_layers(self, count: int) -> KVShape:
        """The keys and values of the first `count` layers, without states."""
        return KVShape(self.layers[:count], extra=_if_any(self.extra[:count]))

    def nbytes(self, num_tokens: int) -> int:
        """Bytes of a cache for `num_tokens` tokens, rounding included, with all states that it may hold."""
        return capacity_for(num_tokens) * self.row_bytes + self.state.most_bytes


def _if_any(layers: tuple[LayerShape | None, ...]) -> tuple[LayerShape | None, ...]:
    return layers if any(layers) else ()


class ObserverLayer(DynamicLayer):
    """Keeps, as transformers does, what one layer stores in the forward in which a model is observed."""

    extra_shape: LayerShape | None = None
    """The shape of what the layer stores beside its keys and values (`KVShape.extra`)."""


class ShapeObserver(Cache):
    """Takes the KV cache's place in a model's first forward and tells what each layer stored."""

    def __init__(self, num_layers: int, layer: type[ObserverLayer] = ObserverLayer) -> None:
        self._observing = [layer() for _ in range(num_layers)]
        super().__init__(layers=list(self._observing))

    @property
    def shape(self) -> KVShape:
        """The shapes of what was stored."""
        stored = ((layer.keys, layer.values) for layer in self._observing)
        shapes = tuple(
            None if keys is None or values is None else LayerShape.of(keys, values) for keys, values in stored
        )
        return KVShape(shapes, extra=_if_any(tuple(layer.extra_shape for layer in self._observing)))
