"""A KV cache that takes a whole candidate tree and keeps only the rows of the accepted path.

Rows `[0, length)` are committed. A forward pass writes its rows behind them; `keep` commits some of those, in place and
in order, and the next forward overwrites the rest. No token is ever computed twice.

Every layer keeps all of its keys and values, even with a sliding window: its mask hides keys outside the window. So the
cache can be rewound to any earlier token. Rows that were not written are never read.
"""

from __future__ import annotations

import mmap
from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from math import prod
from typing import Any

import numpy as np
import torch
from torch import Tensor
from transformers.cache_utils import Cache, CacheLayerMixin

from precedent.runtime.placing import placed
from precedent.target.kv.shape import KVShape, LayerShape, capacity_for

MAPPED = 128 * 2**10
"""Bytes from which a buffer in main memory has pages of its own, which go back to the system with it.

Buffers come and go in sizes that grow with their conversations: in C's heap they leave holes, and a server's memory
grows for hours.
"""


def _empty(size: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> Tensor:
    num_bytes = prod(size) * dtype.itemsize
    if device.type != "cpu" or num_bytes < MAPPED:
        return torch.empty(size, dtype=dtype, device=device)
    pages = mmap.mmap(-1, num_bytes, access=mmap.ACCESS_COPY)  # a copy: no child process shares it
    return torch.frombuffer(pages, dtype=dtype).view(size)


class KVBlock:
    """Keys `[num_layers, heads, capacity, key_dim]` and values of some consecutive layers of equal shape.

    Layers share a buffer so that `keep` is a few operations, not a few per layer. Not all layers share one, so that
    growing needs twice the memory of one block, not of the whole cache.
    """

    def __init__(self, shape: LayerShape, num_layers: int) -> None:
        self.shape, self.num_layers = shape, num_layers
        self._hold(*self._buffers(0))

    @property
    def capacity(self) -> int:
        """Rows that fit without growing."""
        return self.keys.shape[2]

    @property
    def nbytes(self) -> int:
        """Bytes of both buffers."""
        return self.keys.nbytes + self.values.nbytes

    def reserve(self, rows: int, used: int) -> None:
        """Make room for `rows` rows, carrying over the first `used`. A failed allocation leaves the block as it was."""
        if rows > self.capacity:
            keys, values = self._buffers(capacity_for(rows))
            keys[:, :, :used], values[:, :, :used] = self.keys[:, :, :used], self.values[:, :, :used]
            self._hold(keys, values)

    def move(self, sources: Tensor, start: int) -> None:
        """Copy rows `sources` (`[num_rows]`, on this block's device) to the rows from `start` on."""
        stop = start + sources.numel()
        self.keys[:, :, start:stop] = self.keys.index_select(2, sources)
        self.values[:, :, start:stop] = self.values.index_select(2, sources)

    def _hold(self, keys: Tensor, values: Tensor) -> None:
        """Use these buffers; `layers` are views `[1, heads, capacity, dim]` of them, made once, not at each step."""
        self.keys, self.values = keys, values
        self.layers = [(keys[index, None], values[index, None]) for index in range(self.num_layers)]

    def _buffers(self, capacity: int) -> tuple[Tensor, Tensor]:
        shape = self.shape
        keys, values = (
            _empty((self.num_layers, heads, capacity, dim), shape.dtype, shape.device) for heads, dim in shape.sizes
        )
        return keys, values


class Arena(ABC):
    """Memory for the keys and values of all sequences, set aside at the start; a back end of a package may have one."""

    nbytes: int

    @abstractmethod
    def block(self, number: int) -> KVBlock:
        """A sequence's part of block `number` of `KVShape.blocks`, which has a shape."""

    @abstractmethod
    def has_room(self, rows: int) -> bool:
        """Whether every block has room for a sequence of `rows` rows."""


@dataclass(slots=True)
class _Filled:
    """Number of committed rows, shared by a cache and its layers."""

    length: int = 0


class KVLayer(CacheLayerMixin):
    """One attention layer's part of a block, in transformers' interface; a layer without KV has no block.

    `extra` holds the rows that the layer keeps beside its own keys and values, if there are any (`KVShape.extra`).
    """

    is_sliding = False  # even with a sliding window: nothing is dropped, the mask hides it
    is_croppable = True
    supports_early_init = False

    def __init__(self, filled: _Filled, block: KVBlock | None = None, index: int = 0) -> None:
        self._filled, self.block, self._index = filled, block, index
        self.is_initialized = block is not None
        self.extra: KVLayer | None = None

    def shared_with(self, filled: _Filled) -> KVLayer:
        """The same rows for a cache with a different length."""
        layer = type(self)(filled, self.block, self._index)
        layer.extra = None if self.extra is None else self.extra.shared_with(filled)
        return layer

    def lazy_initialization(self, key_states: Tensor, value_states: Tensor) -> None:
        """Does nothing: the shape is known from the start."""

    def write(self, key_states: Tensor, value_states: Tensor) -> int:
        """Write rows `[1, heads, rows, dim]` behind the committed ones; returns where they end."""
        start, count = self._filled.length, key_states.shape[2]
        keys, values = self.room_for(count)
        keys.narrow(2, start, count).copy_(key_states)
        values.narrow(2, start, count).copy_(value_states)
        return start + count

    def room_for(self, count: int) -> tuple[Tensor, Tensor]:
        """All keys and values `[1, heads, capacity, dim]`, with room for `count` rows behind the committed ones."""
        assert self.block is not None, "a layer wrote keys and values that wrote none when the model was examined"
        self.block.reserve(self._filled.length + count, self._filled.length)
        return self.block.layers[self._index]

    def rows(self, first: int, end: int) -> tuple[Tensor, Tensor]:
        """Keys and values `[1, heads, end - first, dim]` of these rows, without a copy."""
        assert self.block is not None
        keys, values = self.block.layers[self._index]
        return keys.narrow(2, first, end - first), values.narrow(2, first, end - first)

    @property
    def keys(self) -> Tensor:  # type: ignore[override]  # transformers has an attribute, which nothing writes here
        """The committed keys, `[1, heads, length, dim]`: Llama 3.2 Vision asks each layer for them."""
        return self.rows(0, self._filled.length)[0]

    def update(self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor]:
        """Write rows behind the committed ones and return all of them, `[1, heads, length + rows, dim]`."""
        return self.rows(0, self.write(key_states, value_states))

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        """Number of keys that a query of `query_length` tokens sees, and their offset."""
        return self._filled.length + query_length, 0

    def get_seq_length(self) -> int:
        """Number of committed tokens."""
        return self._filled.length

    def get_max_length(self) -> int:
        """This layer has no limit."""
        return -1


class KVCache(Cache):
    """One sequence's keys and values for all layers, with `keep` and `rewind`; in `arena` while it has room.

    `state`, what layers remember beside them, follows every change.
    """

    def __init__(self, shape: KVShape, arena: Arena | None = None) -> None:
        self._filled, self._shape, self._arena = _Filled(), shape, arena
        self.blocks: list[KVBlock] = []
        layers: list[KVLayer] = []
        for number, (layer, count) in enumerate(shape.blocks):
            block = None
            if layer is not None:
                block = KVBlock(layer, count) if arena is None else arena.block(number)
                self.blocks.append(block)
            layers.extend((shape.state.cache_layer or KVLayer)(self._filled, block, index) for index in range(count))
        self._layers, self.state = tuple(layers[: len(shape.layers)]), shape.state.new()
        for own, extra in zip(self._layers, layers[len(shape.layers) :], strict=False):
            own.extra = extra if extra.block is not None else None
        super().__init__(layers=list(self._layers))

    @property
    def length(self) -> int:
        """Number of committed tokens."""
        return self._filled.length

    def layer(self, index: int) -> KVLayer:
        """One layer's part of the cache."""
        return self._layers[index]

    @property
    def nbytes(self) -> int:
        """Bytes held by all buffers and states."""
        return sum(block.nbytes for block in self.blocks) + self.state.nbytes

    def reserve(self, rows: int) -> None:
        """Make room for `rows` rows in all layers at once, so that a long prompt is not copied repeatedly."""
        for block in self.blocks:
            block.reserve(rows, self.length)

    def fork(self, length: int, room: int = 0) -> KVCache:
        """A separate cache that starts with a copy of the first `length` rows (of `nearest`), with room for `room`."""
        fork = type(self)(self._shape, self._arena)
        fork.reserve(max(length, room))
        for own, copied in zip(self._stored(length), fork._stored(length), strict=True):
            copied.copy_(own)
        fork._filled.length, fork.state = length, self.state.fork(self.length, length)
        return fork

    def _stored(self, length: int) -> list[Tensor]:
        """The first `length` keys and values of each block in turn, `[num_layers, heads, length, dim]` each."""
        return [stored[:, :, :length] for block in self.blocks for stored in (block.keys, block.values)]

    def copied(self, length: int) -> list[Tensor]:
        """Copies, in the computer's memory, of the first `length` rows: keys and values of each block in turn.

        `[num_layers, heads, length, dim]` each; then the parts of the state after them, if layers have one.
        """
        parts = [*self._stored(length), *self.state.parts(self.length, length)]
        return [part.to("cpu", copy=True, memory_format=torch.contiguous_format) for part in parts]

    def fill(self, rows: Sequence[Tensor], length: int) -> None:
        """Commit what `copied` gave to an empty cache. Raises ValueError for another model's shapes or dtypes."""
        self.reserve(length)
        stored = self._stored(length)
        own, state = rows[: len(stored)], rows[len(stored) :]
        if [(part.shape, part.dtype) for part in stored] != [(part.shape, part.dtype) for part in own]:
            raise ValueError("these keys and values are not of this model")
        self.state = self._shape.state.restored(state)
        for mine, theirs in zip(stored, own, strict=True):
            mine.copy_(theirs)
        self._filled.length = length
        self.mark()

    def first_layers(self, count: int) -> KVCache:
        """The first `count` layers over the same buffers; no other cache reads what it writes behind committed rows.

        It has its own length, so it can run ahead; the next forward over this cache overwrites its rows.
        """
        early = KVCache(KVShape(()))
        early._shape, early._filled.length = self._shape.first_layers(count), self.length
        early.state = self.state.first_layers(count)
        early._layers = tuple(layer.shared_with(early._filled) for layer in self._layers[:count])
        parts = [part for layer in early._layers for part in (layer, layer.extra) if part is not None]
        early.blocks = list(dict.fromkeys(part.block for part in parts if part.block is not None))
        early.layers = list(early._layers)
        return early

    def keep(self, rows: Sequence[int]) -> None:
        """Commit these rows of the last forward (increasing offsets, 0 = its first token); modifies the cache.

        Rows that are already in place, as in a chain, are not copied.
        """
        length = self.length
        in_place = next((i for i, row in enumerate(rows) if row != i), len(rows))
        if in_place < len(rows):
            sources, start = length + np.array(rows[in_place:], dtype=np.int64), length + in_place
            on_device = cache(lambda device: placed(sources, device))  # copied once for all blocks there
            for block in self.blocks:
                block.move(on_device(block.keys.device), start)
        self.state.keep(length, rows)
        self._filled.length = length + len(rows)

    def mark(self) -> None:
        """Take a snapshot of the state, to go back to."""
        self.state.mark(self.length)

    def nearest(self, length: int) -> int:
        """The most tokens, up to `length`, that the cache can go back to: fewer only with layers that have a state."""
        return self.state.nearest(self.length, length)

    def rewind(self, length: int) -> None:
        """Forget all tokens from `length` on. Raises ValueError unless exactly those before can be kept."""
        if not (0 <= length <= self.length and self.nearest(length) == length):
            raise ValueError(f"cannot rewind to {length} tokens: the KV cache holds {self.length}")
        self.state.rewind(self.length, length)
        self._filled.length = length
