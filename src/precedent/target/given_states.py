"""What stands in for a draft's embeddings where it also reads states of its target, row by row."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Sequence
from contextvars import ContextVar
from typing import Any

import torch
from torch import Tensor, nn


class GivenStates(nn.Module):
    """Turns token ids into what the draft's first layer reads, `[1, rows, width]`.

    `give` hands in the states for the rows of the next forwards of this thread, in order; without any they are
    zero. Engines that share a draft run on threads of their own.
    """

    def __init__(self, embeddings: nn.Module) -> None:
        super().__init__()
        self.embeddings = embeddings

    @property
    def weight(self) -> Any:
        """The embeddings' weight, whose device is where token ids go."""
        return self.embeddings.weight

    def give(self, states: Sequence[Tensor]) -> None:
        """Hand in the states `[rows, hidden_size]` of each sequence; replaces what is left of earlier ones."""
        _GIVEN.set((self, torch.cat(list(states))) if states else None)

    @abstractmethod
    def fused(self, embedded: Tensor, states: Tensor) -> Tensor:
        """Embeddings and states, each `[..., hidden_size]`, as what the first layer reads."""

    def forward(self, input_ids: Tensor) -> Tensor:
        """The inputs of these rows."""
        embedded: Tensor = self.embeddings(input_ids)
        given = _GIVEN.get()
        if given is None or given[0] is not self:
            return self.fused(embedded, torch.zeros_like(embedded))
        rows, left = given[1].tensor_split([input_ids.shape[1]])
        _GIVEN.set((self, left))
        return self.fused(embedded, rows[None])


_GIVEN: ContextVar[tuple[GivenStates, Tensor] | None] = ContextVar("given hidden states", default=None)
