"""One forward of fixed size: its few sizes, and a step's numbers in buffers that never move.

Every forward is padded to one of a few sizes, so that a captured graph is used again. A size consists of the numbers of
rows, of sequences, of rows per sequence, and of keys; everything else is data. The same operations run on the same
memory for all sequences, so they can be captured as a CUDA graph and replayed. Without a graph they run one by one and
compute the same.
"""

from __future__ import annotations

import bisect
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray
from torch import Tensor
from transformers.masking_utils import causal_mask_function

from precedent.errors import UnsupportedError
from precedent.target.kv.cache import KVCache
from precedent.target.kv.rows import NewRowsKV, Rows, RunningForward
from precedent_cuda import attention
from precedent_cuda.arena import NOBODY, KVArena
from precedent_cuda.attention import StaticRows

ROWS = (1, 2, 4, 8, 16, 24, 32, 48, 64, 72, 96, 128, 192, 256, 384, 512, 768, 1024, 1536, 2304)
"""Rows in a forward, and rows of one sequence in it; a wider forward computes so long that a graph saves nothing."""

MOST_WIDTH = 256
"""Rows of one sequence at most: a tree, or the last piece of a prompt."""

LEAST_KEYS = 1024
"""Keys of the smallest bucket; each further bucket has twice as many."""

MOST_MASKED = 1 << 19
"""Entries of all ancestor masks at most: they go to the device in every step."""


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
    return shape if shape.sequences * shape.width**2 <= MOST_MASKED else None


def _up(count: int) -> int:
    return ROWS[bisect.bisect_left(ROWS, count)]


def _power(count: int) -> int:
    """The smallest power of two that is at least `count`."""
    return 1 << (count - 1).bit_length()


def step_numbers(
    shape: StaticShape, sequences: Sequence[Rows], starts: Sequence[Sequence[int]]
) -> dict[str, NDArray[Any]]:
    """The numbers of these rows in this size, by name.

    `starts` says for each sequence where it begins in each KV block. A padding row is token 0 at position 0, sees
    itself, and writes to an arena row that no sequence reads.
    """
    blocks, places = len(starts[0]), shape.sequences
    field: dict[str, NDArray[Any]] = {name: np.zeros(shape.rows, np.int64) for name in ("token_ids", "positions")}
    field |= {name: np.zeros(places, np.int64) for name in ("first_rows", "counts", "lengths")}
    field["starts"] = np.zeros((blocks, places), np.int64)
    field["slot_of"] = np.full(shape.rows, -1)
    field["cache_rows"] = np.full((blocks, shape.rows), NOBODY)
    field["ancestors"] = np.repeat(np.eye(shape.width, dtype=np.bool_)[None], places, axis=0)
    first = 0
    for place, (rows, begins) in enumerate(zip(sequences, starts, strict=True)):
        count, length, span = len(rows), rows.kv.length, slice(first, first + len(rows))
        within = np.arange(count)
        own = np.tri(count, dtype=np.bool_) if rows.ancestors is None else rows.ancestors
        field["token_ids"][span], field["positions"][span] = rows.token_ids, rows.positions
        field["slot_of"][span] = place * shape.width + within
        field["first_rows"][place], field["counts"][place], field["lengths"][place] = first, count, length
        field["starts"][:, place] = begins
        field["cache_rows"][:, span] = np.array(begins)[:, None] + length + within
        field["ancestors"][place, :count, :count] = own
        first += count
    return field


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


class StaticForward(RunningForward):
    """One forward of a fixed size over `buffers`, which hold `step_numbers` on the device."""

    def __init__(self, arena: KVArena, shape: StaticShape, buffers: Mapping[str, Tensor]) -> None:
        self._arena, self._buffers = arena, buffers
        shared = {name: buffers[name] for name in ("slot_of", "first_rows", "counts", "lengths", "ancestors")}
        self._rows = [StaticRows(**shared, starts=starts, longest=shape.longest) for starts in buffers["starts"]]
        self._kv = ArenaKV(arena, buffers["cache_rows"])
        self.cache = self._kv

    def inputs(self) -> dict[str, Any]:
        """The arguments of the model's forward."""
        return {
            "input_ids": self._buffers["token_ids"][None],
            "position_ids": self._buffers["positions"][None],
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
        scale = query.shape[3] ** -0.5 if scale is None else scale
        return attention.attend(query, keys, values, self._rows[block], scale)
