"""The rows of one forward pass over several sequences, packed without padding, and which keys each row may see.

The rows of all sequences follow one another in a single `[1, total_rows]` input, so every linear layer sees one matrix.
Only attention treats them separately: new keys and values go into each sequence's own KV cache, and each sequence's
rows attend to its own keys. A row's result does not depend on the rest of the batch.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from itertools import accumulate, pairwise
from typing import Any, NamedTuple, TypeVar

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from transformers.cache_utils import Cache
from transformers.masking_utils import causal_mask_function

from precedent.runtime.placing import placed
from precedent.target.kv.cache import KVCache
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


class NewRowsKV(Cache):
    """A cache whose `update` returns only new rows; `layer_of` tells attention functions which layer stored them."""

    def __init__(self, layers: Sequence[Any]) -> None:
        super().__init__(layers=list(layers))
        self._layer_of: dict[int, tuple[Tensor, int]] = {}  # keeps the tensors alive, so that their ids stay unique

    def write(self, keys: Tensor, values: Tensor, layer_idx: int) -> None:
        """Write new rows `[1, heads, rows, dim]` of a layer to their places."""
        raise NotImplementedError

    def update(
        self, key_states: Tensor, value_states: Tensor, layer_idx: int, *args: Any, **kwargs: Any
    ) -> tuple[Tensor, Tensor]:
        """Write the new rows of a layer."""
        self.write(key_states, value_states, layer_idx)
        self._layer_of[id(key_states)] = key_states, layer_idx
        return key_states, value_states

    def layer_of(self, key_states: Tensor) -> int:
        """The layer that stored these new keys. Raises KeyError if the model changed them since."""
        return self._layer_of[id(key_states)][1]


class PackedKV(NewRowsKV):
    """The KV caches of several sequences, for one forward."""

    def __init__(self, sequences: Sequence[Rows], spans: Sequence[tuple[int, int]]) -> None:
        super().__init__(sequences[0].kv.layers)
        self._places = [(rows.kv, *span) for rows, span in zip(sequences, spans, strict=True)]

    def write(self, keys: Tensor, values: Tensor, layer_idx: int) -> None:
        """Write each sequence's rows into its own cache."""
        for cache, start, stop in self._places:
            cache.layer(layer_idx).write(keys[:, :, start:stop], values[:, :, start:stop])


_Value = TypeVar("_Value")


@contextmanager
def announced(variable: ContextVar[_Value], value: _Value) -> Iterator[None]:
    """Set a variable for the layers: neither the model nor transformers passes anything on to them."""
    token = variable.set(value)
    try:
        yield
    finally:
        variable.reset(token)


class RunningForward:
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

    def running(self) -> AbstractContextManager[None]:
        """Announce this forward to attention functions."""
        return announced(_RUNNING, self)


class ForwardPass(RunningForward):
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
        return rows.kv.layer(self.packed.layer_of(key)).rows(first, rows.kv.length + len(rows))

    def room_in_layer(self, index: int) -> list[tuple[Tensor, Tensor]]:
        """Each sequence's whole keys and values `[1, heads, capacity, dim]` of a layer, with room for its new rows."""
        return [rows.kv.layer(index).room_for(len(rows)) for rows in self.sequences]


_RUNNING: ContextVar[RunningForward | None] = ContextVar("precedent_forward", default=None)


def running_forward() -> RunningForward | None:
    """The forward that this thread is running; None outside of `RunningForward.running`."""
    return _RUNNING.get()


Found = TypeVar("Found")

Rule = Callable[..., Any]
"""transformers' mask function: (batch index, head index, query position, key position) -> visible."""


class Visible(NamedTuple):
    """What some rows see: all keys from `first` on, except the last ones, where `allowed` `[rows, columns]` decides.

    `causal`: the rows are the keys, and each row sees those up to itself.
    """

    first: int
    allowed: Tensor | None
    causal: bool


class RowMasks:
    """What the rows see in one kind of layer (full attention, or one with a window) of one forward, made at first use.

    `reach` is the most positions that the kind's window spans, None if unbounded.
    """

    def __init__(
        self, forward: ForwardPass, rule: Rule, reach: int | None, device: torch.device, rows: slice = slice(None)
    ) -> None:
        self.forward, self.device = forward, device
        self._rule, self._reach, self._rows = rule, reach, rows
        self._found: dict[Hashable, Any] = {}

    def once(self, key: Hashable, find: Callable[[], Found]) -> Found:
        """The result of `find`, computed once for all layers that share these masks."""
        if key not in self._found:
            self._found[key] = find()
        found: Found = self._found[key]
        return found

    def visible(self, index: int) -> Visible:
        """What sequence `index`'s rows see."""
        return self.once(("visible", index), lambda: self._visible(index))

    def additive(self, index: int, like: Tensor, repeats: int = 1) -> Tensor | None:
        """Sequence `index`'s mask (`additive`), with dtype and device of `like`; None if its rows see every key."""
        return self.once((index, repeats, like.dtype, like.device), lambda: self._additive(index, like, repeats))

    def __getitem__(self, index: tuple[slice, slice, slice, slice]) -> RowMasks:
        """The masks of a part of the rows: some models compute their last layers for the last row only (Gemma 4)."""
        rows = index[2]
        if rows.indices(self.forward.spans[-1][1]) == (0, self.forward.spans[-1][1], 1):
            return self
        if len(self.forward.sequences) > 1:
            raise TypeError("only the masks of a single sequence can be cut")
        return RowMasks(self.forward, self._rule, self._reach, self.device, rows)

    def _visible(self, index: int) -> Visible:
        rows = self.forward.sequences[index]
        visible = visible_keys(rows, self._rule, self._reach, self.device)
        if self._rows == slice(None):
            return visible
        allowed = within(rows, self.device) if visible.causal else visible.allowed
        return Visible(visible.first, None if allowed is None else allowed[self._rows], False)

    def _additive(self, index: int, like: Tensor, repeats: int) -> Tensor | None:
        rows, (first, allowed, _) = self.forward.sequences[index], self.visible(index)
        if allowed is None:
            return None
        return additive(allowed.to(like.device), rows.kv.length + len(rows) - first, like.dtype, repeats)


def visible_keys(rows: Rows, rule: Rule, reach: int | None, device: torch.device) -> Visible:
    """What `rows` see under a rule, which is evaluated only if it hides something, and only within its window."""
    length, positions = rows.kv.length, rows.positions
    plain = rule is causal_mask_function or (reach is not None and int(positions.max()) < reach)
    if plain and len(rows) == 1:
        return Visible(0, None, False)
    if plain and rows.ancestors is None and length == 0:
        return Visible(0, None, True)
    own = within(rows, device)
    if rows.causal_in_windows and reach is not None:
        own = own.tril()
    if plain:
        return Visible(0, own, False)
    first = 0 if reach is None else max(0, length - reach + 1)
    queries = placed(positions, device)
    keys = torch.cat([torch.arange(first, length, device=device), queries])
    batch = torch.zeros((1, 1, 1, 1), dtype=torch.long, device=device)
    ruled: Tensor = rule(batch, batch, queries[None, None, :, None], keys[None, None, None, :])
    allowed = ruled.expand(1, 1, len(queries), len(keys))[0, 0].clone()
    allowed[:, length - first :] &= own
    return Visible(first, allowed, False)


def additive(allowed: Tensor, num_keys: int, dtype: torch.dtype, repeats: int = 1) -> Tensor:
    """0 where a key may be seen and -inf elsewhere, for attention that adds its mask, `[repeats * rows, num_keys]`.

    `allowed` covers the last keys; every row sees the others, usually a long prefix.
    """
    mask = torch.zeros((repeats, len(allowed), num_keys), dtype=dtype, device=allowed.device)
    mask[:, :, num_keys - allowed.shape[1] :].masked_fill_(~allowed, float("-inf"))
    return mask.view(-1, num_keys)


def within(rows: Rows, device: torch.device) -> Tensor:
    """Which of each other the new rows see, `[rows, rows]`."""
    if rows.ancestors is not None:
        return placed(rows.ancestors, device)
    return torch.ones((len(rows), len(rows)), dtype=torch.bool, device=device).tril_()
