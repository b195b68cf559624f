"""Recurrences that treat every channel alone: Mamba-1 (Gu and Dao 2312.00752) and RG-LRU (De et al. 2402.19427).

With a factor `a` and an addend `b` for each token, both of the state's shape, the state is `h = a * h_parent + b`.
A state is computed for every row, level by level: each level gathers its parents' states. Only one level's states are
kept while the next is computed, and none afterwards: the accepted path runs once more, from the rows' inputs.
"""

from __future__ import annotations

from typing import NamedTuple, Protocol

import torch
from torch import Tensor

from precedent_models.recurrent.branches import Branches
from precedent_models.recurrent.states import Path, State

LONG = 64
"""Of a chain of more tokens, a piece of a prompt, only the last state is kept."""


class Inputs(Protocol):
    """The inputs of some rows, from which factors, addends and outputs follow."""

    def at(self, rows: Tensor | slice) -> Inputs:
        """The inputs of these rows."""

    def factors(self) -> tuple[Tensor, Tensor]:
        """`a` and `b`, `[rows, ...state]`."""

    @property
    def nbytes(self) -> int:
        """Bytes of the inputs of the rows."""

    def outputs(self, states: Tensor) -> Tensor:
        """From each row's state `[rows, ...state]`, `[rows, channels]`."""


class Gated(NamedTuple):
    """RG-LRU: `a` and `b` are the inputs, `[rows, channels]`, and the state is the output."""

    kept: Tensor
    added: Tensor

    def at(self, rows: Tensor | slice) -> Gated:
        """The inputs of these rows."""
        return Gated(self.kept[rows], self.added[rows])

    def factors(self) -> tuple[Tensor, Tensor]:
        """`[rows, channels]` each."""
        return self.kept, self.added

    @property
    def nbytes(self) -> int:
        """Bytes of both."""
        return self.kept.nbytes + self.added.nbytes

    def outputs(self, states: Tensor) -> Tensor:
        """The states."""
        return states


class Selective(NamedTuple):
    """Mamba-1: `value` and `step` (after softplus) `[rows, channels]`, `key` and `query` `[rows, state_size]`.

    `rate` `[channels, state_size]` belongs to the layer.
    """

    value: Tensor
    step: Tensor
    key: Tensor
    query: Tensor
    rate: Tensor

    def at(self, rows: Tensor | slice) -> Selective:
        """The inputs of these rows."""
        return Selective(self.value[rows], self.step[rows], self.key[rows], self.query[rows], self.rate)

    def factors(self) -> tuple[Tensor, Tensor]:
        """`[rows, channels, state_size]` each."""
        return (self.step[:, :, None] * self.rate).exp(), (self.step * self.value)[:, :, None] * self.key[:, None]

    @property
    def nbytes(self) -> int:
        """Bytes of all but the layer's own."""
        return self.value.nbytes + self.step.nbytes + self.key.nbytes + self.query.nbytes

    def outputs(self, states: Tensor) -> Tensor:
        """The product of each channel's state with the query."""
        return (states @ self.query[:, :, None])[:, :, 0]


class ChannelStep:
    """What is kept of a forward: the rows' inputs, and the last state."""

    divisible = True

    def __init__(self, inputs: Inputs, last: Tensor, count: int) -> None:
        self._inputs, self._last, self._count = inputs, last, count

    @property
    def nbytes(self) -> int:
        """Bytes of the inputs and the last state."""
        return self._inputs.nbytes + self._last.nbytes

    def state_after(self, state: State | None, path: Path) -> State:
        """The state after a path, whose rows are computed once more."""
        kept, added = self._inputs.at(path.on(self._last.device)).factors()
        found = torch.zeros_like(added[0]) if state is None else state[0]
        for factor, addend in zip(kept, added, strict=True):
            found = torch.addcmul(addend, factor, found)
        return (found,)


class LastState(ChannelStep):
    """What is kept of a long chain: its last state."""

    divisible = False

    def state_after(self, state: State | None, path: Path) -> State:
        """The last state. Raises ValueError for a path that is not the whole chain."""
        if len(path.rows) != self._count:
            raise ValueError("a long chain of tokens is kept whole or not at all")
        return (self._last,)


def over_tree(inputs: Inputs, state: State | None, branches: Branches) -> tuple[Tensor, ChannelStep]:
    """Outputs `[rows, channels]` of all rows behind `state`, and what is kept of them."""
    before, outputs, places = None if state is None else state[0], list[Tensor](), list[Tensor]()
    level = torch.empty(0)
    for rows, parents in branches.levels:
        part = inputs.at(rows)
        kept, added = part.factors()
        if parents is None:
            level = added if before is None else torch.addcmul(added, kept, before)
        else:
            level = torch.addcmul(added, kept, level[torch.searchsorted(places[-1], parents)])
        outputs.append(part.outputs(level))
        places.append(rows)
    made = torch.cat(outputs)
    output = torch.empty_like(made).index_copy_(0, torch.cat(places), made)
    step = LastState if branches.is_chain and branches.count > LONG else ChannelStep
    return output, step(inputs, level[-1], branches.count)


def prepare(channels: Tensor) -> Tensor:
    """Rows first, in at least float32, `[rows, channels]`, from `[channels, rows]`."""
    return channels.transpose(0, 1).to(torch.promote_types(channels.dtype, torch.float32))
