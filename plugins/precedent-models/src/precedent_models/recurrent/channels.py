"""Recurrences that treat every channel alone: Mamba-1 (Gu and Dao 2312.00752) and RG-LRU (De et al. 2402.19427).

With a factor `a` and an addend `b` for each token, both of the state's shape, the state is `h = a * h_parent + b`.
A state is computed for every row, level by level: each level gathers its parents' states. Only one level's states are
kept while the next is computed, and none afterwards: the accepted path runs once more, from the rows' inputs.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from precedent_models.recurrent.branches import Branches
from precedent_models.recurrent.states import LayerStep, Path, State, WholeChain

LONG = 64
"""Of a chain of more tokens, a piece of a prompt, only the last state is kept."""


class Gated(NamedTuple):
    """RG-LRU: `a` and `b` are the inputs, `[rows, channels]`, and the state is the output."""

    kept: Tensor
    added: Tensor

    def at(self, rows: Tensor | slice) -> Gated:
        """The inputs of these rows."""
        return Gated(self.kept[rows], self.added[rows])

    def factors(self) -> tuple[Tensor, Tensor]:
        """`a` and `b`, `[rows, channels]` each."""
        return self.kept, self.added

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
        """`a` and `b`, `[rows, channels, state_size]` each."""
        return (self.step[:, :, None] * self.rate).exp(), (self.step * self.value)[:, :, None] * self.key[:, None]

    def outputs(self, states: Tensor) -> Tensor:
        """The product of each channel's state `[rows, channels, state_size]` with the query, `[rows, channels]`."""
        return (states @ self.query[:, :, None])[:, :, 0]


class ChannelStep(LayerStep):
    """What is kept of a forward: the rows' inputs."""

    def __init__(self, inputs: Gated | Selective) -> None:
        super().__init__(*(inputs if isinstance(inputs, Gated) else inputs[:4]))
        self._inputs = inputs

    def state_after(self, state: State | None, path: Path) -> State:
        """The state after a path, whose rows are computed once more."""
        kept, added = self._inputs.at(path.on(self._kept[0].device)).factors()
        found = torch.zeros_like(added[0]) if state is None else state[0]
        for factor, addend in zip(kept, added, strict=True):
            found = torch.addcmul(addend, factor, found)
        return (found,)


def over_tree(inputs: Gated | Selective, state: State | None, branches: Branches) -> tuple[Tensor, LayerStep]:
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
    long = branches.is_chain and branches.count > LONG
    return output, WholeChain(level[-1], branches.count) if long else ChannelStep(inputs)


def prepare(channels: Tensor) -> Tensor:
    """Rows first, in at least float32, `[rows, channels]`, from `[channels, rows]`."""
    return channels.transpose(0, 1).to(torch.promote_types(channels.dtype, torch.float32))
