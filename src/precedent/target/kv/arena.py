"""KV rows of many sequences in buffers that never move, so that a captured CUDA graph always finds them.

Every block of layers has its own buffers, from which sequences borrow regions. Row 0 belongs to no sequence: padding
rows of a forward write there.
"""

from __future__ import annotations

import weakref
from collections import deque

import numpy as np
import torch
from torch import Tensor

from precedent.runtime.compiled import Int64s
from precedent.runtime.placing import placed
from precedent.target.kv.shape import BUCKET, KVShape, LayerShape

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
