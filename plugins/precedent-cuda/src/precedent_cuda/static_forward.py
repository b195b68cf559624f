"""One forward of fixed size that reads and writes only buffers that never move.

The same operations run on the same memory for all sequences, so they can be captured as a CUDA graph and replayed.
Without a graph they run one by one and compute the same.
"""

from __future__ import annotations

from typing import Any

from torch import Tensor
from transformers.cache_utils import Cache
from transformers.masking_utils import causal_mask_function

from precedent.errors import UnsupportedError
from precedent.target.kv.arena import KVArena
from precedent.target.kv.cache import KVCache
from precedent.target.kv.rows import Running
from precedent_cuda.split_attention import StaticRows, Variant
from precedent_cuda.static_shape import StaticShape, fields_of


class ArenaKV(Cache):
    """The KV arena behind transformers' cache interface: writes each new row to its assigned place.

    `cache_rows` is `[blocks, rows]`, on the device. Returns only the new rows, as `PackedKV` does.
    """

    def __init__(self, arena: KVArena, cache_rows: Tensor) -> None:
        super().__init__(layers=list(KVCache(arena.shape).layers))
        self._arena, self._cache_rows = arena, cache_rows
        self._layer_of: dict[int, tuple[Tensor, int]] = {}  # keeps the tensors alive, so that their ids stay unique

    def update(
        self, key_states: Tensor, value_states: Tensor, layer_idx: int, *args: Any, **kwargs: Any
    ) -> tuple[Tensor, Tensor]:
        """Write rows `[1, heads, rows, dim]` of a layer, each to its own place."""
        block, keys, values = self._arena.layer(layer_idx)
        keys.index_copy_(1, self._cache_rows[block], key_states[0])
        values.index_copy_(1, self._cache_rows[block], value_states[0])
        self._layer_of[id(key_states)] = key_states, layer_idx
        return key_states, value_states

    def layer_of(self, key_states: Tensor) -> int:
        """The layer that wrote these keys. Raises KeyError if the model changed them since."""
        return self._layer_of[id(key_states)][1]


class StaticForward(Running):
    """One forward of a fixed size over the buffers `integers` (`static_shape`) and `ancestors`."""

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
        field = self._field
        return StaticRows(
            row_of=field["row_of"],
            slot_of=field["slot_of"],
            first_rows=field["first_rows"],
            counts=field["counts"],
            starts=field["starts"][block],
            lengths=field["lengths"],
            ancestors=ancestors,
            longest=shape.longest,
        )
