"""Keys and values of all sequences in buffers that never move, so that a captured CUDA graph always finds them.

Every block of layers has its own buffers, from which sequences borrow regions. Row 0 belongs to no sequence: padding
rows of a forward write there.
"""

from __future__ import annotations

import weakref
from collections import deque

import torch
from torch import Tensor

from precedent.target.kv.cache import Arena, KVBlock, KVCache
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


class BlockArena:
    """Keys `[num_layers, heads, rows, key_dim]` and values of some layers of equal shape, lent in regions.

    The buffers start as zeros, so rows that were never written are finite.
    """

    def __init__(self, shape: LayerShape, num_layers: int, rows: int) -> None:
        self.shape, self.num_layers = shape, num_layers
        self.keys, self.values = (
            torch.zeros((num_layers, heads, rows, dim), dtype=shape.dtype, device=shape.device)
            for heads, dim in shape.sizes
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


class ArenaBlock(KVBlock):
    """A sequence's rows of a block: a region of the arena as long as it has one that is large enough."""

    region: Region | None = None

    def __init__(self, arena: BlockArena) -> None:
        self._arena = arena
        super().__init__(arena.shape, arena.num_layers)

    def _buffers(self, capacity: int) -> tuple[Tensor, Tensor]:
        region = self._arena.take(capacity) if capacity else None
        if region is None:
            keys, values = super()._buffers(capacity)
        else:
            keys, values = (
                stored.narrow(2, region.start, capacity) for stored in (self._arena.keys, self._arena.values)
            )
        self.region = region  # the rows of the one before are copied before anybody takes them
        return keys, values


class KVArena(Arena):
    """The arenas of all blocks of a model's KV cache, with room for `num_tokens` tokens of all sequences together.

    Every layer has keys and values.
    """

    def __init__(self, shape: KVShape, num_tokens: int) -> None:
        self.shape = shape
        rows, runs = -(-num_tokens // BUCKET) * BUCKET + KEPT_FREE, list(enumerate(shape.blocks))
        self.lent = [BlockArena(layer, count, rows) for _, (layer, count) in runs if layer is not None]
        self._places = [(number, within) for number, (_, count) in runs for within in range(count)]
        self.nbytes = sum(block.keys.nbytes + block.values.nbytes for block in self.lent)

    def block(self, number: int) -> ArenaBlock:
        """A sequence's part of block `number` of `KVShape.blocks`."""
        return ArenaBlock(self.lent[number])

    def has_room(self, rows: int) -> bool:
        """Whether every block has room for a sequence of `rows` rows."""
        return all(block.has_room(rows) for block in self.lent)

    def layer(self, index: int) -> tuple[int, Tensor, Tensor]:
        """A layer's block, as an index into `lent`, and the layer's keys `[heads, rows, dim]` and values."""
        number, within = self._places[index]
        return number, self.lent[number].keys[within], self.lent[number].values[within]

    def starts(self, kv: KVCache) -> list[int] | None:
        """Where the rows of a cache begin in each block; None unless all of them are here."""
        regions = [block.region if isinstance(block, ArenaBlock) else None for block in kv.blocks]
        pairs = zip(regions, self.lent, strict=False)  # an early exit has fewer blocks
        here = [region.start for region, block in pairs if region is not None and region.arena is block]
        return here if len(here) == len(regions) == len(self.lent) else None
