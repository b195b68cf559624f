"""The parts of a block draft around its layers: masked inputs, the head, the Markov term and the fusion of states."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn


class MaskedInputs(nn.Module):
    """The target's embeddings, and one learned vector for masked positions, whose token id is `mask_id`."""

    def __init__(self, embeddings: Any, hidden_size: int, place: torch.device, dtype: torch.dtype) -> None:
        super().__init__()
        self.mask_id = int(embeddings.weight.shape[0])
        self.mask = nn.Parameter(torch.zeros(hidden_size, device=place, dtype=dtype))
        self._embeddings = (embeddings,)  # in a tuple: the target's, no part of this module's state

    @property
    def weight(self) -> Tensor:
        """The learned vector, whose device is where token ids go."""
        return self.mask

    def forward(self, input_ids: Tensor) -> Tensor:
        """Embeddings of token ids, `[..., hidden_size]`."""
        masked, (embeddings,) = input_ids == self.mask_id, self._embeddings
        known: Tensor = embeddings(input_ids.masked_fill(masked, 0)).to(self.mask.dtype)
        return torch.where(masked[..., None], self.mask, known)


class BlockHead(nn.Module):
    """Logits of the tokens that `rows` covers, and the logit of the confidence as one column more."""

    token_ids: Tensor

    def __init__(self, rows: Any, token_ids: Tensor, dtype: torch.dtype) -> None:
        super().__init__()
        self.rows, place = rows, rows.weight.device
        self.confidence = nn.Linear(rows.weight.shape[1], 1, device=place, dtype=dtype)
        self.register_buffer("token_ids", token_ids.to(place, torch.long), persistent=False)

    @property
    def weight(self) -> Tensor:
        """The rows of the head, `[num_head_tokens, hidden_size]`."""
        weight: Tensor = self.rows.weight
        return weight

    def forward(self, hidden: Tensor) -> Tensor:
        """`[..., hidden_size]` to `[..., num_head_tokens + 1]`."""
        return torch.cat([self.rows(hidden), self.confidence(hidden)], dim=-1)


class MarkovTerm(nn.Module):
    """What the token before adds to a row of logits: `left[previous] @ right`, of low rank.

    Tokens that the head does not cover share the last row of `left`.
    """

    def __init__(self, num_tokens: int, rank: int, place: torch.device, dtype: torch.dtype) -> None:
        super().__init__()
        self.left = nn.Parameter(torch.empty(num_tokens + 1, rank, device=place, dtype=dtype))
        self.right = nn.Parameter(torch.zeros(rank, num_tokens, device=place, dtype=dtype))

    def forward(self, previous: Tensor) -> Tensor:
        """Columns of the previous tokens in the head `[...]` to what they add, `[..., num_tokens]`."""
        return self.left[previous] @ self.right


class StateFusion(nn.Module):
    """The outputs of the target's layers as one vector per token: a linear map, then a norm."""

    def __init__(self, num_read: int, norm: nn.Module, hidden_size: int, place: torch.device, dtype: torch.dtype):
        super().__init__()
        self.linear = nn.Linear(num_read * hidden_size, hidden_size, bias=False, device=place, dtype=dtype)
        self.norm = norm

    def forward(self, states: Tensor) -> Tensor:
        """`[..., num_read * hidden_size]` to `[..., hidden_size]`."""
        fused: Tensor = self.norm(self.linear(states))
        return fused
