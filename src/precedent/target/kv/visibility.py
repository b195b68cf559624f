"""Which keys a row may see: its sequence's prefix within the layer's window, its ancestors, and itself."""

from __future__ import annotations

from collections.abc import Callable, Hashable
from typing import Any, NamedTuple, TypeVar

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from transformers.masking_utils import causal_mask_function

from precedent.runtime.placing import placed
from precedent.target.kv.rows import Forward, Rows

Found = TypeVar("Found")

Rule = Callable[..., Any]
"""transformers' mask function: (batch index, head index, query position, key position) -> visible."""


class View(NamedTuple):
    """What the rows of one sequence see: keys from `first` on that the additive `mask` `[rows, keys]` allows.

    Without a mask they see all of them. `causal`: the rows are the keys, and each row sees those up to itself.
    """

    first: int
    mask: Tensor | None
    causal: bool


class RowMasks:
    """The views of one kind of layer (full attention, or one with a window) in one forward, made at first use.

    `reach` is the most positions that the kind's window spans, None if unbounded.
    """

    def __init__(
        self, forward: Forward, rule: Rule, reach: int | None, device: torch.device, rows: slice = slice(None)
    ) -> None:
        self.forward = forward
        self._rule, self._reach, self._rows = rule, reach, rows
        self.device = device
        self._found: dict[Hashable, Any] = {}

    def once(self, key: Hashable, find: Callable[[], Found]) -> Found:
        """The result of `find`, computed once for all layers that share these masks."""
        if key not in self._found:
            self._found[key] = find()
        found: Found = self._found[key]
        return found

    def view(self, index: int, like: Tensor, repeats: int = 1) -> View:
        """Sequence `index`'s view, its mask with dtype and device of `like`, rows repeated `repeats` times."""
        return self.once((index, repeats, like.dtype, like.device), lambda: self._view(index, like, repeats))

    def _view(self, index: int, like: Tensor, repeats: int) -> View:
        rows, (first, allowed, causal) = self.forward.sequences[index], self.visible(index)
        num_keys = rows.kv.length + len(rows) - first
        mask = None if allowed is None else additive(allowed.to(like.device), num_keys, like.dtype, repeats)
        return View(first, mask, causal)

    def __getitem__(self, index: tuple[slice, slice, slice, slice]) -> RowMasks:
        """The masks of a part of the rows: some models compute their last layers for the last row only (Gemma 4)."""
        rows = index[2]
        if rows.indices(self.forward.spans[-1][1]) == (0, self.forward.spans[-1][1], 1):
            return self
        if len(self.forward.sequences) > 1:
            raise TypeError("only the masks of a single sequence can be cut")
        return RowMasks(self.forward, self._rule, self._reach, self.device, rows)

    def visible(self, index: int) -> Visible:
        """What sequence `index`'s rows see."""
        return self.once(("visible", index), lambda: self._visible(index))

    def _visible(self, index: int) -> Visible:
        rows = self.forward.sequences[index]
        visible = visible_keys(rows, self._rule, self._reach, self.device)
        if self._rows == slice(None):
            return visible
        allowed = within(rows, self.device) if visible.causal else visible.allowed
        return Visible(visible.first, None if allowed is None else allowed[self._rows], False)


class Visible(NamedTuple):
    """What some rows see: all keys from `first` on, except the last ones, where `allowed` `[rows, columns]` decides.

    `causal`: the rows are the keys, and each row sees those up to itself.
    """

    first: int
    allowed: Tensor | None
    causal: bool


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
    allowed = _ruled(rule, positions, first, length, device)
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


def _ruled(rule: Rule, positions: NDArray[np.int64], first: int, length: int, device: torch.device) -> Tensor:
    """What the rule allows by position alone, `[rows, keys from first on]`."""
    queries = placed(positions, device)
    keys = torch.cat([torch.arange(first, length, device=device), queries])
    batch = torch.zeros((1, 1, 1, 1), dtype=torch.long, device=device)
    allowed: Tensor = rule(batch, batch, queries[None, None, :, None], keys[None, None, None, :])
    return allowed.expand(1, 1, len(queries), len(keys))[0, 0].clone()
