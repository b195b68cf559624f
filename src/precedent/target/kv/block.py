"""Keys and values of some consecutive layers of one sequence, in buffers that grow."""

from __future__ import annotations

import numpy as np
from torch import Tensor

from precedent.runtime.compiled import Int64s
from precedent.target.kv.arena import BlockArena, Region
from precedent.target.kv.memory import empty
from precedent.target.kv.shape import LayerShape, capacity_for


class KVBlock:
    """Keys `[num_layers, heads, capacity, key_dim]` and values of some consecutive layers of equal shape.

    Layers share a buffer so that `keep` is a few operations, not a few per layer. Not all layers share one, so that
    growing needs twice the memory of one block, not of the whole cache. With an `arena`, the rows are a region of it
    as long as it has one that is large enough.
    """

    def __init__(self, shape: LayerShape, num_layers: int, arena: BlockArena | None = None) -> None:
        self.shape, self.num_layers, self._arena = shape, num_layers, arena
        self.region: Region | None = None
        self._places: Int64s | None = None
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
            capacity = capacity_for(rows)
            region = None if self._arena is None else self._arena.take(capacity)
            keys, values = self._buffers(capacity) if region is None else region.arena.rows_of(region)
            keys[:, :, :used], values[:, :, :used] = self.keys[:, :, :used], self.values[:, :, :used]
            self._hold(keys, values)
            self.region = region

    def move(self, sources: Tensor, start: int) -> None:
        """Copy rows `sources` (`[num_rows]`, on this block's device) to the rows from `start` on."""
        stop = start + sources.numel()
        self.keys[:, :, start:stop] = self.keys.index_select(2, sources)
        self.values[:, :, start:stop] = self.values.index_select(2, sources)

    def copy_from(self, other: KVBlock, rows: int) -> None:
        """Take over the first `rows` rows of a block of the same shape."""
        self.keys[:, :, :rows], self.values[:, :, :rows] = other.keys[:, :, :rows], other.values[:, :, :rows]

    @property
    def places(self) -> Int64s:
        """Where each layer's keys, then its values, are: address and strides in bytes of heads and rows.

        `[num_layers, 6]`.
        """
        if self._places is None:
            numbers = np.arange(self.num_layers, dtype=np.int64)[:, None]
            sides = []
            for stored in (self.keys, self.values):
                by_layer, *others = (step * stored.element_size() for step in stored.stride()[:3])
                sides.append(np.hstack([stored.data_ptr() + numbers * by_layer, np.tile(others, (self.num_layers, 1))]))
            self._places = np.hstack(sides)
        return self._places

    def _hold(self, keys: Tensor, values: Tensor) -> None:
        """Use these buffers; `layers` are views `[1, heads, capacity, dim]` of them, made once, not at each step."""
        self.keys, self.values = keys, values
        self._places = None
        self.layers = [(keys[index, None], values[index, None]) for index in range(self.num_layers)]

    def _buffers(self, capacity: int) -> tuple[Tensor, Tensor]:
        shape = self.shape
        sizes = (shape.key_heads, capacity, shape.key_dim), (shape.value_heads, capacity, shape.value_dim)
        keys, values = (empty((self.num_layers, *size), shape.dtype, shape.device) for size in sizes)
        return keys, values
