"""One forward pass over the rows of several sequences, packed without padding.

The rows of all sequences follow one another in a single `[1, total_rows]` input, so every linear layer sees one matrix.
Only attention treats them separately: new keys and values go into each sequence's own KV cache, and each sequence's
rows attend to its own keys. A row's result does not depend on the rest of the batch.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from itertools import accumulate, pairwise
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from transformers.cache_utils import Cache

from precedent.runtime.placing import placed
from precedent.target.kv.cache import KVCache, KVLayer
from precedent.target.kv.no_states import NoStates
from precedent.tree import CandidateTree


@dataclass(frozen=True, slots=True)
class Rows:
    """One sequence's rows in a forward; they follow the rows in its KV cache.

    `depths` `[rows]` counts from the first row; `ancestors` `[rows, rows]` is true where the column is the row's
    ancestor or the row itself, None for a chain. With `causal_in_windows`, layers with a window hide later rows too,
    whatever `ancestors` says: those of a block see each other in the other layers only.
    """

    kv: KVCache
    token_ids: Sequence[int]
    depths: NDArray[np.int64]
    ancestors: NDArray[np.bool_] | None = None
    causal_in_windows: bool = False

    def __len__(self) -> int:
        return len(self.token_ids)

    @property
    def positions(self) -> NDArray[np.int64]:
        """Absolute position of each row, `[rows]`."""
        return self.depths + self.kv.length


def chain_rows(kv: KVCache, token_ids: Sequence[int]) -> Rows:
    """Rows of consecutive tokens: a piece of a prompt."""
    return Rows(kv, token_ids, np.arange(len(token_ids)))


def tree_rows(kv: KVCache, pending: int, tree: CandidateTree) -> Rows:
    """Rows of the pending token and the candidate tree behind it."""
    count = len(tree) + 1
    if count == 1:
        return Rows(kv, (pending,), np.zeros(1, dtype=np.int64))
    depths, ancestors = np.zeros(count, dtype=np.int64), np.zeros((count, count), dtype=np.bool_)
    depths[1:], ancestors[1:, 1:] = tree.depths, tree.ancestors
    ancestors[:, 0] = True
    return Rows(kv, (pending, *tree.token_ids), depths, ancestors)


class PackedKV(NoStates, Cache):
    """The KV caches of several sequences behind transformers' interface, for one forward.

    `update` returns only the new rows; `layers_of` tells the attention function which layer they belong to.
    """

    def __init__(self, sequences: Sequence[Rows], spans: Sequence[tuple[int, int]]) -> None:
        super().__init__(layers=list(sequences[0].kv.layers))
        self._caches, self._spans = [rows.kv for rows in sequences], spans
        self._layer_of: dict[int, tuple[Tensor, int]] = {}  # keeps the tensors alive, so that their ids stay unique

    def update(
        self, key_states: Tensor, value_states: Tensor, layer_idx: int, *args: Any, **kwargs: Any
    ) -> tuple[Tensor, Tensor]:
        """Write each sequence's new rows into its own cache."""
        for cache, (start, stop) in zip(self._caches, self._spans, strict=True):
            cache.layer(layer_idx).write(key_states[:, :, start:stop], value_states[:, :, start:stop])
        self._layer_of[id(key_states)] = key_states, layer_idx
        return key_states, value_states

    def update_indexer(self, indexer_key_states: Tensor, layer_idx: int) -> Tensor:
        """Raises TypeError: an indexer compares its queries with the keys of one sequence."""
        raise TypeError("the indexer of a layer takes one sequence at a time")

    def layers_of(self, key_states: Tensor) -> list[KVLayer]:
        """Each sequence's layer that stored these new keys. Raises KeyError if the model changed them since."""
        layer_idx = self._layer_of[id(key_states)][1]
        return [cache.layer(layer_idx) for cache in self._caches]


class Running:
    """One of our forwards: the cache that transformers gets, and what the layers must know about it.

    `by_rows` requires every layer to compute row by row, or refuse (`target.bitwise`).
    """

    cache: Cache
    by_rows: bool = False

    def check_rule(self, rule: Any) -> None:
        """Raise UnsupportedError for a mask of transformers that this forward, in place of the mask, cannot follow."""
        raise NotImplementedError

    def attend(self, query: Tensor, key: Tensor, scale: float | None) -> Tensor:
        """Attention of a forward that takes the place of its mask; `key`, its new keys, identifies the layer."""
        raise NotImplementedError

    @contextmanager
    def running(self) -> Iterator[None]:
        """Announce this forward to attention functions; neither the model nor transformers passes it on."""
        token = _RUNNING.set(self)
        try:
            yield
        finally:
            _RUNNING.reset(token)


class Forward(Running):
    """The sequences in one forward, and the span of each in the input."""

    def __init__(self, sequences: Sequence[Rows], *, by_rows: bool = False) -> None:
        self.sequences, self.by_rows = tuple(sequences), by_rows
        self.spans = tuple(pairwise(accumulate((len(rows) for rows in sequences), initial=0)))
        self.packed = PackedKV(self.sequences, self.spans) if len(sequences) > 1 else None
        self.cache = self.packed or sequences[0].kv

    def inputs(self, device: torch.device) -> dict[str, Any]:
        """The arguments of the model's forward: token and position ids `[1, total_rows]`, and the cache."""
        token_ids = np.array([token for rows in self.sequences for token in rows.token_ids], dtype=np.int64)
        positions = np.concatenate([rows.positions for rows in self.sequences])
        return {
            "input_ids": placed(token_ids, device)[None],
            "position_ids": placed(positions, device)[None],
            "past_key_values": self.cache,
            "use_cache": True,
        }

    def keys_and_values(self, index: int, key: Tensor, value: Tensor, first: int) -> tuple[Tensor, Tensor]:
        """Sequence `index`'s keys and values `[1, heads, keys, dim]` from row `first` on, new rows included."""
        if self.packed is None:
            return (key[:, :, first:], value[:, :, first:]) if first else (key, value)
        rows = self.sequences[index]
        return self.packed.layers_of(key)[index].rows(first, rows.kv.length + len(rows))

    def room_in_layer(self, index: int) -> list[tuple[Tensor, Tensor]]:
        """Each sequence's whole keys and values `[1, heads, capacity, dim]` of a layer, with room for its new rows."""
        return [rows.kv.layer(index).room_for(len(rows)) for rows in self.sequences]


_RUNNING: ContextVar[Running | None] = ContextVar("precedent_forward", default=None)


def running_forward() -> Running | None:
    """The forward that this thread is running; None outside of `Running.running`."""
    return _RUNNING.get()
