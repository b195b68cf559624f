"""How the rows of a forward descend from one another, and convolutions over them."""

from __future__ import annotations

from functools import cached_property

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.nn.functional import conv1d

from precedent.runtime.placing import placed
from precedent_models.recurrent.states import LayerStep, Path, State

BEFORE = -1
"""The parent of a first row: the committed text."""


class Branches:
    """Rows in topological order: `parents` `[rows]`, where `BEFORE` stands for the committed text; None for a chain."""

    def __init__(self, count: int, parents: NDArray[np.int64] | None, device: torch.device) -> None:
        self.count, self.device = count, device
        self.is_chain = parents is None
        self.parents = np.arange(-1, count - 1) if parents is None else parents

    @classmethod
    def of(cls, ancestors: NDArray[np.bool_] | None, count: int, device: torch.device) -> Branches:
        """From a mask `[rows, rows]`, true where the column is the row's ancestor or the row itself."""
        return cls(count, None if ancestors is None else parents_of(ancestors), device)

    @cached_property
    def seen(self) -> Tensor:
        """True where the column is the row's ancestor or the row itself, `[rows, rows]`."""
        seen = np.eye(self.count, dtype=np.bool_)
        for row, parent in enumerate(self.parents):
            if parent != BEFORE:
                seen[row] |= seen[parent]
        return placed(seen, self.device)

    @cached_property
    def levels(self) -> list[tuple[Tensor, Tensor | None]]:
        """For each depth in turn its rows and their parents, `[rows]` each; no parents at the first."""
        depths = np.zeros(self.count, dtype=np.int64)
        for row, parent in enumerate(self.parents):
            depths[row] = 0 if parent == BEFORE else depths[parent] + 1
        levels = [np.flatnonzero(depths == depth) for depth in range(int(depths.max(initial=-1)) + 1)]
        parents = [None, *(placed(self.parents[rows], self.device) for rows in levels[1:])]
        return [(placed(rows, self.device), above) for rows, above in zip(levels, parents, strict=True)]

    def windows(self, width: int) -> NDArray[np.int64]:
        """For each row where its last `width` inputs are, itself last, `[rows, width]`.

        They are in a line that begins with the `width - 1` inputs before the first row.
        """
        up = np.concatenate([np.arange(-1, width - 2), self.parents + width - 1])
        found = np.empty((self.count, width), dtype=np.int64)
        at = np.arange(self.count) + width - 1
        for column in reversed(range(width)):
            found[:, column] = at
            at = up[at]
        return found


def parents_of(ancestors: NDArray[np.bool_]) -> NDArray[np.int64]:
    """Each row's parent, `BEFORE` if it has none, `[rows]`: in topological order, the last of its ancestors."""
    above = np.tril(ancestors, -1)
    last = above.shape[1] - 1 - above[:, ::-1].argmax(axis=1)
    return np.where(above.any(axis=1), last, BEFORE)


class WindowStep(LayerStep):
    """What is kept of a forward: every row's input, `[channels, rows]`."""

    def __init__(self, inputs: Tensor, width: int) -> None:
        super().__init__(inputs)
        self._inputs, self._width = inputs, width

    def state_after(self, state: State | None, path: Path) -> State:
        """The last `width` inputs, `[channels, width]`, zeros before the first token."""
        rows = path.on(self._inputs.device)[-self._width :]
        new = self._inputs[:, rows]
        return (torch.cat([window_of(state, self._inputs, self._width)[:, new.shape[1] :], new], dim=1),)


def window_of(state: State | None, inputs: Tensor, width: int) -> Tensor:
    """The inputs before the first row, `[channels, width]`."""
    return inputs.new_zeros((inputs.shape[0], width)) if state is None else state[0]


def over_windows(line: Tensor, windows: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """Outputs `[channels, rows]`: each row's window of a line of inputs `[channels, inputs]`, times `weight`.

    `windows` `[rows, width]` tells where its inputs are; sums are in at least float32.
    """
    precise = torch.promote_types(weight.dtype, torch.float32)
    output = (line[:, windows].to(precise) * weight.to(precise)[:, None]).sum(-1)
    return output if bias is None else output + bias.to(precise)[:, None]


def over_line(line: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """Outputs `[channels, rows]` of a chain, whose inputs follow the window in `line` `[channels, width + rows]`."""
    return conv1d(line[None], weight[:, None], bias, groups=weight.shape[0])[0]
