"""What drafts borrow of their target: its embeddings, and rows of its head."""

from __future__ import annotations

from typing import Any, Self

import torch
from torch import Tensor, nn
from torch.nn.functional import embedding
from transformers import PreTrainedModel

from precedent.errors import UnsupportedError

HEAD_TOKENS = "head.token_ids"
"""The tensor of a draft's folder with the token ids of its head, `[num_head_tokens]`, in increasing order."""


class RawEmbeddings(nn.Module):
    """A table of embeddings as it is stored: some models (Gemma) scale what they read from it.

    The module that holds the table is no part of this module's state.
    """

    def __init__(self, module: Any) -> None:
        super().__init__()
        self._module = (module,)

    @property
    def weight(self) -> Tensor:
        """The table, `[vocab_size, hidden_size]`."""
        weight: Tensor = self._module[0].weight
        return weight

    def or_own(self, table: Tensor) -> RawEmbeddings:
        """Embeddings of this table, `[vocab_size, hidden_size]`; these where it equals theirs in their dtype."""
        theirs = self.weight
        own = table.to(theirs.device, theirs.dtype)
        if own.shape == theirs.shape and torch.equal(own, theirs):
            return self
        made = nn.Embedding(own.shape[0], own.shape[1], device="meta")
        made.weight = nn.Parameter(own, requires_grad=False)
        return RawEmbeddings(made)

    def forward(self, input_ids: Tensor) -> Tensor:
        """Token ids `[...]` to their rows, `[..., hidden_size]`."""
        return embedding(input_ids, self.weight)


def linear(weight: Tensor, bias: Tensor | None = None) -> nn.Linear:
    """A linear layer of these weights, `[out_features, in_features]`, which are not trained."""
    made = nn.Linear(weight.shape[1], weight.shape[0], bias=bias is not None, device="meta")
    made.weight = nn.Parameter(weight, requires_grad=False)
    if bias is not None:
        made.bias = nn.Parameter(bias, requires_grad=False)
    return made


class RestrictedHead(nn.Module):
    """An output head for some tokens only; all others get probability 0. Logits stay `[..., width]`."""

    token_ids: Tensor

    def __init__(self, rows: nn.Module, token_ids: Tensor, width: int) -> None:
        super().__init__()
        self.rows, self.width = rows, width
        self.register_buffer("token_ids", token_ids, persistent=False)

    @classmethod
    def of(cls, head: Any, token_ids: Tensor) -> Self:
        """Some rows of a target's head, copied."""
        ids = token_ids.to(head.weight.device, torch.long)
        bias = None if head.bias is None else head.bias.detach()[ids]
        return cls(linear(head.weight.detach()[ids], bias), ids, head.weight.shape[0])

    def forward(self, hidden: Tensor) -> Tensor:
        """`[..., hidden_size]` to `[..., width]`, minus infinity for tokens that the head does not cover."""
        kept = self.rows(hidden)
        logits: Tensor = kept.new_full((*kept.shape[:-1], self.width), float("-inf"))
        return logits.index_copy_(-1, self.token_ids, kept)


def restrict_head(draft: PreTrainedModel, target: PreTrainedModel, token_ids: Tensor) -> None:
    """Give a draft the target's head for these tokens only: most of a small draft's work is its head."""
    draft.set_output_embeddings(RestrictedHead.of(target.get_output_embeddings(), token_ids))


def check_on_one_device(target: PreTrainedModel, what: str) -> None:
    """Raise UnsupportedError, naming what would go beside it, for a target that is spread over devices."""
    if len({parameter.device for parameter in target.parameters()}) > 1:
        raise UnsupportedError(f"{what} needs the whole target on one device: load it there, or leave it out")
