"""One forward of fixed size: its few sizes, the layout of a step's numbers, and the buffers that never move.

Every forward is padded to one of a few sizes, so that a captured graph is used again. A size consists of the numbers of
rows, of sequences, of rows per sequence, and of keys; everything else is data. The same operations run on the same
memory for all sequences, so they can be captured as a CUDA graph and replayed. Without a graph they run one by one and
compute the same.
"""

from __future__ import annotations

import bisect
from collections.abc import Sequence
from itertools import accumulate
from math import prod
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray
from torch import Tensor
from transformers.masking_utils import causal_mask_function

from precedent.errors import UnsupportedError
from precedent.target.kv.cache import KVCache
from precedent.target.kv.rows import NewRowsKV, Rows, Running
from precedent_cuda.arena import NOBODY, KVArena
from precedent_cuda.attention import StaticRows, Variant

ROWS = (1, 2, 4, 8, 16, 24, 32, 48, 64, 72, 96, 128, 192, 256, 384, 512, 768, 1024, 1536, 2304)
"""Rows in a forward, and rows of one sequence in it; a wider forward computes so long that a graph saves nothing."""

MOST_WIDTH = 256
"""Rows of one sequence at most: a tree, or the last piece of a prompt."""

LEAST_KEYS = 1024
"""Keys of the smallest bucket; each further bucket has twice as many."""

MOST_MASKED, MOST_PLACES = 1 << 19, 1 << 14
"""Limits on the entries of all ancestor masks and on the places for rows: both go to the device in every step."""


class StaticShape(NamedTuple):
    """The sizes of a static forward; only they determine which operations it runs."""

    rows: int
    sequences: int
    width: int
    longest: int


def shape_for(sequences: Sequence[Rows], every_rows: int | None = None) -> StaticShape | None:
    """The smallest size that holds these rows, or None; with `every_rows`, sizes have just that many rows and width."""
    counts = [len(rows) for rows in sequences]
    if sum(counts) > ROWS[-1] or max(counts) > MOST_WIDTH:
        return None
    keys = max(LEAST_KEYS, _power(max(one.kv.length + len(one) for one in sequences)))
    rows, width = every_rows or _up(sum(counts)), every_rows or _up(max(counts))
    shape = StaticShape(rows, _power(len(counts)), width, keys)
    places = shape.sequences * shape.width
    return shape if places <= MOST_PLACES and places * shape.width <= MOST_MASKED else None


def most_integers(blocks: int) -> int:
    """An upper bound for the integers of a step of any size."""
    return (3 + blocks) * (ROWS[-1] + _power(ROWS[-1])) + 6 * ROWS[-1] + MOST_PLACES


def _up(count: int) -> int:
    return ROWS[bisect.bisect_left(ROWS, count)]


def _power(count: int) -> int:
    """The smallest power of two that is at least `count`."""
    return 1 << (count - 1).bit_length()


def field_shapes(shape: StaticShape, blocks: int) -> dict[str, tuple[int, ...]]:
    """Shapes of a step's integers in the order of one array; the last two come once per block of KV layers."""
    rows, places = (shape.rows,), (shape.sequences,)
    return {
        "token_ids": rows,
        "positions": rows,
        "slot_of": rows,
        "row_of": (shape.sequences, shape.width),
        "first_rows": places,
        "counts": places,
        "lengths": places,
        "cache_rows": (blocks, shape.rows),
        "starts": (blocks, shape.sequences),
    }


def fields_of(integers: Any, shape: StaticShape, blocks: int) -> dict[str, Any]:
    """Views of one array or tensor of integers, by name."""
    shapes = field_shapes(shape, blocks)
    ends = accumulate(map(prod, shapes.values()))
    return {
        name: integers[end - prod(size) : end].reshape(size)
        for (name, size), end in zip(shapes.items(), ends, strict=True)
    }


def num_integers(shape: StaticShape, blocks: int) -> int:
    """The number of integers in a step of this size."""
    return sum(map(prod, field_shapes(shape, blocks).values()))


def step_data(
    shape: StaticShape, sequences: Sequence[Rows], starts: Sequence[Sequence[int]]
) -> tuple[NDArray[np.int64], NDArray[np.bool_]]:
    """The integers of these rows in this size, and their ancestor masks `[sequences, width, width]`.

    `starts` says for each sequence where it begins in each KV block. A padding row is token 0 at position 0, sees
    itself, and writes to an arena row that no sequence reads.
    """
    integers = np.zeros(num_integers(shape, len(starts[0])), dtype=np.int64)
    field = fields_of(integers, shape, len(starts[0]))
    field["slot_of"].fill(-1)
    field["cache_rows"].fill(NOBODY)
    ancestors = np.repeat(np.eye(shape.width, dtype=np.bool_)[None], shape.sequences, axis=0)
    first = 0
    for place, (rows, begins) in enumerate(zip(sequences, starts, strict=True)):
        count, length, span = len(rows), rows.kv.length, slice(first, first + len(rows))
        within = np.arange(count)
        field["token_ids"][span], field["positions"][span] = rows.token_ids, rows.positions
        field["slot_of"][span], field["row_of"][place, :count] = place * shape.width + within, first + within
        field["first_rows"][place], field["counts"][place], field["lengths"][place] = first, count, length
        field["starts"][:, place] = begins
        field["cache_rows"][:, span] = np.array(begins)[:, None] + length + within
        ancestors[place, :count, :count] = np.tri(count, dtype=np.bool_) if rows.ancestors is None else rows.ancestors
        first += count
    return integers, ancestors


class ArenaKV(NewRowsKV):
    """The KV arena in one forward; `cache_rows` `[blocks, rows]`, on the device, are the places of the new rows."""

    def __init__(self, arena: KVArena, cache_rows: Tensor) -> None:
        super().__init__(KVCache(arena.shape).layers)
        self._arena, self._cache_rows = arena, cache_rows

    def write(self, keys: Tensor, values: Tensor, layer_idx: int) -> None:
        """Write rows `[1, heads, rows, dim]` of a layer, each to its own place."""
        block, stored_keys, stored_values = self._arena.layer(layer_idx)
        stored_keys.index_copy_(1, self._cache_rows[block], keys[0])
        stored_values.index_copy_(1, self._cache_rows[block], values[0])


class StaticForward(Running):
    """One forward of a fixed size over the buffers `integers` (see `field_shapes`) and `ancestors`."""

    def __init__(
        self, arena: KVArena, shape: StaticShape, integers: Tensor, ancestors: Tensor, variant: Variant
    ) -> None:
        self._arena, self._variant = arena, variant
        self._field = fields_of(integers, shape, len(arena.lent))
        self._rows = [self._rows_of(block, shape, ancestors) for block in range(len(arena.lent))]
        self._kv = ArenaKV(arena, self._field["cache_rows"])
        self.cache = self._kv

    def inputs(self) -> dict[str, Any]:
        """The arguments of the model's forward."""
        return {
            "input_ids": self._field["token_ids"][None],
            "position_ids": self._field["positions"][None],
            "past_key_values": self.cache,
            "use_cache": True,
        }

    def check_rule(self, rule: Any) -> None:
        """Raise UnsupportedError for a layer that does not see the whole prefix."""
        if rule is not causal_mask_function:
            raise UnsupportedError("a layer has a window or a mask of its own, which fixed sizes do not support")

    def attend(self, query: Tensor, key: Tensor, scale: float | None) -> Tensor:
        """`[1, rows, heads, dim]` for queries `[1, heads, rows, dim]`; `key` identifies the layer."""
        block, keys, values = self._arena.layer(self._kv.layer_of(key))
        return self._variant(query, keys, values, self._rows[block], query.shape[3] ** -0.5 if scale is None else scale)

    def _rows_of(self, block: int, shape: StaticShape, ancestors: Tensor) -> StaticRows:
        shared = {name: self._field[name] for name in ("row_of", "slot_of", "first_rows", "counts", "lengths")}
        return StaticRows(**shared, starts=self._field["starts"][block], ancestors=ancestors, longest=shape.longest)
