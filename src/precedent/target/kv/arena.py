"""Keys and values of some layers: in buffers of a sequence that grow, or in buffers of all sequences that never move.

A captured CUDA graph always finds the rows of an arena. Every block of layers has its own buffers, from which sequences
borrow regions. Row 0 belongs to no sequence: padding rows of a forward write there.
"""

from __future__ import annotations

import weakref
from collections import deque

import numpy as np
import torch
from torch import Tensor

from precedent.runtime.compiled import Int64s
from precedent.runtime.placing import placed
from precedent.target.kv.memory import empty
from precedent.target.kv.shape import BUCKET, KVShape, LayerShape, capacity_for

NOBODY = 0
"""The arena row that padding rows write to."""

KEPT_FREE = 16
"""Rows before the first region; with them, all regions begin at a multiple of 16 bytes."""


class Region:
    """Some consecutive rows of an arena; they become free when this object is garbage collected."""

    def __init__(self, arena: BlockArena, start: int, rows: int) -> None:
        self.arena, self.start, self.rows = arena, start, rows
        weakref.finalize(self, arena.given_back.append, (start, rows)).atexit = False


class Moves:
    """Row moves of several sequences in their arenas, made all at once, in as few operations as for one sequence.

    `by` is the sequence whose rows are added next; `asked` holds every sequence that added rows.
    """

    def __init__(self) -> None:
        self._of: dict[BlockArena, list[Int64s]] = {}
        self.by, self.asked = 0, set[int]()

    def add(self, region: Region, sources: Int64s, start: int) -> None:
        """Move rows `sources` of a region to its rows from `start` on."""
        pairs = np.stack([sources, start + np.arange(len(sources))]) + region.start
        self._of.setdefault(region.arena, []).append(pairs)
        self.asked.add(self.by)

    def make(self) -> None:
        """Make the moves; all rows are read before any is written."""
        for arena, pairs in self._of.items():
            arena.move(*placed(np.concatenate(pairs, axis=1), arena.keys.device))
        self._of.clear()


class BlockArena:
    """Keys `[num_layers, heads, rows, key_dim]` and values of some layers of equal shape, lent in regions.

    The buffers start as zeros, so rows that were never written are finite.
    """

    def __init__(self, shape: LayerShape, num_layers: int, rows: int) -> None:
        sizes = (shape.key_heads, rows, shape.key_dim), (shape.value_heads, rows, shape.value_dim)
        self.keys, self.values = (
            torch.zeros((num_layers, *size), dtype=shape.dtype, device=shape.device) for size in sizes
        )
        self.given_back: deque[tuple[int, int]] = deque()
        self._free = [(KEPT_FREE, rows - KEPT_FREE)]

    def take(self, rows: int) -> Region | None:
        """The first region of `rows` rows that fits; None if there is none."""
        self._settle()
        for place, (start, length) in enumerate(self._free):
            if length >= rows:
                self._free[place : place + 1] = [(start + rows, length - rows)] if length > rows else []
                return Region(self, start, rows)
        return None

    def has_room(self, rows: int) -> bool:
        """Whether `take` would find a region of `rows` rows."""
        self._settle()
        return any(length >= rows for _, length in self._free)

    def move(self, sources: Tensor, destinations: Tensor) -> None:
        """Copy rows `sources` to rows `destinations` (`[num_rows]` each, on its device); destinations are distinct."""
        for stored in (self.keys, self.values):
            stored.index_copy_(2, destinations, stored.index_select(2, sources))

    def rows_of(self, region: Region) -> tuple[Tensor, Tensor]:
        """A region's keys `[num_layers, heads, rows, key_dim]` and values, in place."""
        return self.keys.narrow(2, region.start, region.rows), self.values.narrow(2, region.start, region.rows)

    def _settle(self) -> None:
        """Merge returned regions, which any thread may return at any time, into the free ones."""
        while self.given_back:
            self._free.append(self.given_back.popleft())
        joined: list[tuple[int, int]] = []
        for start, length in sorted(self._free):
            if joined and sum(joined[-1]) == start:
                joined[-1] = (joined[-1][0], joined[-1][1] + length)
            else:
                joined.append((start, length))
        self._free = joined


class KVArena:
    """The arenas of all blocks of a model's KV cache, with room for `num_tokens` tokens of all sequences together."""

    def __init__(self, shape: KVShape, num_tokens: int) -> None:
        self.shape = shape
        rows = -(-num_tokens // BUCKET) * BUCKET + KEPT_FREE
        self.blocks = tuple(None if layer is None else BlockArena(layer, count, rows) for layer, count in shape.blocks)
        self.lent = tuple(block for block in self.blocks if block is not None)
        self._places = _by_layer(shape)

    @property
    def nbytes(self) -> int:
        """Bytes of all buffers."""
        return sum(block.keys.nbytes + block.values.nbytes for block in self.lent)

    def has_room(self, rows: int) -> bool:
        """Whether every block has room for a sequence of `rows` rows."""
        return all(block.has_room(rows) for block in self.lent)

    def layer(self, index: int) -> tuple[int, Tensor, Tensor]:
        """A layer's block, as an index into `lent`, and the layer's keys `[heads, rows, dim]` and values."""
        number, within = self._places[index]
        block = self.lent[number]
        return number, block.keys[within], block.values[within]


def _by_layer(shape: KVShape) -> dict[int, tuple[int, int]]:
    """For every layer with its own keys and values: its block's number, and its index there."""
    places, layer_idx, number = {}, 0, 0
    for layer, count in shape.blocks:
        if layer is not None:
            places.update({layer_idx + within: (number, within) for within in range(count)})
            number += 1
        layer_idx += count
    return places


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
