"""What stands in for a draft's embeddings where it also reads hidden states of its target, row by row."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn


class GivenStates(nn.Module):
    """Turns token ids into what the draft's first layer reads, `[1, rows, hidden_size]`.

    `give` hands in the hidden states for the rows of the next forwards, in order; without any they are zero.
    """

    def __init__(self, embeddings: nn.Module) -> None:
        super().__init__()
        self.embeddings = embeddings
        self._given: Tensor | None = None

    @property
    def weight(self) -> Any:
        """The embeddings' weight, whose device is where token ids go."""
        return self.embeddings.weight

    def give(self, hidden: Sequence[Tensor]) -> None:
        """Hand in the hidden states `[rows, hidden_size]` of each sequence; replaces what is left of earlier ones."""
        self._given = torch.cat(list(hidden)) if hidden else None

    @abstractmethod
    def fused(self, embedded: Tensor, hidden: Tensor) -> Tensor:
        """Embeddings and hidden states `[..., hidden_size]` as one input."""

    def forward(self, input_ids: Tensor) -> Tensor:
        """The inputs of these rows."""
        embedded: Tensor = self.embeddings(input_ids)
        hidden = torch.zeros_like(embedded) if self._given is None else self._taken(input_ids.shape[1])[None]
        return self.fused(embedded, hidden)

    def _taken(self, rows: int) -> Tensor:
        assert self._given is not None
        taken, self._given = self._given[:rows], self._given[rows:]
        return taken
