"""The target's output head for some tokens only: most of a small draft's work is its head."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

HEAD_TOKENS = "head.token_ids"
"""The tensor of a draft's folder with the token ids of its head, `[num_head_tokens]`, in increasing order."""


class RestrictedHead(nn.Module):
    """The target's output head for some tokens only; all others get probability 0. Logits stay `[..., width]`."""

    token_ids: Tensor

    def __init__(self, head: Any, token_ids: Tensor) -> None:
        super().__init__()
        weight = head.weight.detach()
        self.width, place = weight.shape[0], weight.device
        ids = token_ids.to(place, torch.long)
        self.rows = nn.Linear(weight.shape[1], ids.numel(), bias=head.bias is not None, device="meta")
        self.rows.weight = nn.Parameter(weight[ids], requires_grad=False)
        if head.bias is not None:
            self.rows.bias = nn.Parameter(head.bias.detach()[ids], requires_grad=False)
        self.register_buffer("token_ids", ids, persistent=False)

    def forward(self, hidden: Tensor) -> Tensor:
        """`[..., hidden_size]` to `[..., width]`, minus infinity for tokens that the head does not cover."""
        kept = self.rows(hidden)
        logits: Tensor = kept.new_full((*kept.shape[:-1], self.width), float("-inf"))
        return logits.index_copy_(-1, self.token_ids, kept)


def restrict_head(draft: PreTrainedModel, target: PreTrainedModel, token_ids: Tensor) -> None:
    """Give a draft the target's head for these tokens only."""
    draft.set_output_embeddings(RestrictedHead(target.get_output_embeddings(), token_ids))
