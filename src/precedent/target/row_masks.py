"""Which keys a row may see: its sequence's prefix, as far as the layer's window reaches, its ancestors, and itself."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from transformers.masking_utils import causal_mask_function

from precedent.target.packing import Forward, Rows

Rule = Callable[..., Any]
"""transformers' mask function: (batch index, head index, query position, key position) -> visible."""


class View(NamedTuple):
    """What the rows of one sequence see: keys from `first` on, of these what `mask` `[rows, keys]` (additive) allows.

    Without a mask they see all of them; `causal` says that the rows are the keys, each seeing those up to itself.
    """

    first: int
    mask: Tensor | None
    causal: bool


class RowMasks:
    """The views of one kind of layer (full attention, or one with a window) for one forward, made when first asked for.

    `reach` is the number of positions that the kind's window spans at most, None when it may be any.
    """

    def __init__(
        self, forward: Forward, rule: Rule, reach: int | None, device: torch.device, rows: slice = slice(None)
    ) -> None:
        self.forward = forward
        self._rule, self._reach, self._device, self._rows = rule, reach, device, rows
        self._allowed: dict[int, tuple[int, Tensor | None, bool]] = {}
        self._views: dict[tuple[int, int, torch.dtype, torch.device], View] = {}

    def view(self, index: int, like: Tensor, repeats: int = 1) -> View:
        """Sequence `index`'s view, its mask in dtype and on device of `like`, rows repeated `repeats` times."""
        key = index, repeats, like.dtype, like.device
        view = self._views.get(key)
        if view is None:
            first, allowed, causal = self._visible(index)
            if self._rows != slice(None):
                allowed, causal = self._of_rows(index, allowed, causal), False
            mask = None if allowed is None else additive(allowed, like.dtype).to(like.device).repeat(repeats, 1)
            view = self._views[key] = View(first, mask, causal)
        return view

    def __getitem__(self, index: tuple[slice, slice, slice, slice]) -> RowMasks:
        """The masks of a part of the rows: some models compute their last layers for the last row alone (Gemma 4)."""
        rows = index[2]
        if rows.indices(self.forward.spans[-1][1]) == (0, self.forward.spans[-1][1], 1):
            return self
        if len(self.forward.sequences) > 1:
            raise TypeError("only the masks of a single sequence can be cut")
        return RowMasks(self.forward, self._rule, self._reach, self._device, rows)

    def _of_rows(self, index: int, allowed: Tensor | None, causal: bool) -> Tensor | None:
        allowed = _within(self.forward.sequences[index]).to(self._device) if causal else allowed
        return None if allowed is None else allowed[self._rows]

    def _visible(self, index: int) -> tuple[int, Tensor | None, bool]:
        if index not in self._allowed:
            rows = self.forward.sequences[index]
            self._allowed[index] = visible_keys(rows, self._rule, self._reach, self._device)
        return self._allowed[index]


def visible_keys(rows: Rows, rule: Rule, reach: int | None, device: torch.device) -> tuple[int, Tensor | None, bool]:
    """First key that any row sees, what each row sees from there on (`[rows, keys]`, None: everything), whether causal.

    Only a rule that hides something of these positions is evaluated, and only where its window may reach.
    """
    length, positions = rows.kv.length, rows.positions
    plain = rule is causal_mask_function or (reach is not None and int(positions.max()) < reach)
    if plain and len(rows) == 1:
        return 0, None, False
    if plain and rows.ancestors is None and length == 0:
        return 0, None, True
    first = 0 if plain or reach is None else max(0, length - reach + 1)
    allowed = torch.ones((len(rows), length - first + len(rows)), dtype=torch.bool, device=device)
    allowed[:, length - first :] = _within(rows).to(device)
    if not plain:
        allowed &= _ruled(rule, positions, first, length, device)
    return first, allowed, False


def additive(allowed: Tensor, dtype: torch.dtype) -> Tensor:
    """0 where a key is allowed and -inf elsewhere, for attention that adds its mask."""
    return torch.zeros(allowed.shape, dtype=dtype, device=allowed.device).masked_fill_(~allowed, float("-inf"))


def _within(rows: Rows) -> Tensor:
    """Which of each other the new rows see, `[rows, rows]`."""
    if rows.ancestors is not None:
        return torch.from_numpy(rows.ancestors)
    return torch.ones((len(rows), len(rows)), dtype=torch.bool).tril_()


def _ruled(rule: Rule, positions: NDArray[np.int64], first: int, length: int, device: torch.device) -> Tensor:
    """What the rule allows, by position alone, `[rows, keys from first on]`."""
    queries = torch.from_numpy(positions).to(device)
    keys = torch.cat([torch.arange(first, length, device=device), queries])
    batch = torch.zeros((1, 1, 1, 1), dtype=torch.long, device=device)
    allowed: Tensor = rule(batch, batch, queries[None, None, :, None], keys[None, None, None, :])
    return allowed.expand(1, 1, len(queries), len(keys))[0, 0]
