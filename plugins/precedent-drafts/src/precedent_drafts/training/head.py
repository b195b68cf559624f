"""The target's output head for all or some tokens: hidden states to logits, as in the target's own forward pass."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import linear
from transformers import DynamicCache, PreTrainedModel

from precedent.errors import UnsupportedError
from precedent.target import common_prefix
from precedent.target.kv.layer_kinds import FULL_ATTENTION, attention_kinds
from precedent.target.load.first_layers import base_of

PROBE = (0, 1, 1, 0, 1)
"""Token ids on which the head is compared with the model's own; valid in any vocabulary."""

TOLERANCE = 0.05
"""Accepted relative difference in that comparison: rounding in the lowest precision."""


class OutputHead:
    """`weight [tokens, hidden_size]`, followed by the logit scaling and capping of some architectures, in `dtype`."""

    def __init__(self, model: PreTrainedModel, dtype: torch.dtype, token_ids: Tensor | None = None) -> None:
        head: Any = model.get_output_embeddings()
        weight, bias = head.weight.detach(), None if head.bias is None else head.bias.detach()
        if token_ids is not None:
            chosen = token_ids.to(weight.device)
            weight, bias = weight[chosen], None if bias is None else bias[chosen]
        self.weight, self.bias = weight.to(dtype), None if bias is None else bias.to(dtype)
        config = model.config.get_text_config()
        self._scale = float(getattr(config, "logit_scale", 1.0) or 1.0) / float(
            getattr(config, "logits_scaling", 1.0) or 1.0
        )
        self._cap = getattr(config, "final_logit_softcapping", None)

    def __call__(self, hidden: Tensor) -> Tensor:
        """Hidden states `[rows, hidden_size]` to logits `[rows, tokens]`."""
        logits = linear(hidden.to(self.weight.dtype), self.weight, self.bias) * self._scale
        return logits if self._cap is None else torch.tanh(logits / self._cap) * self._cap


class Reader:
    """Runs a model over texts one after the other, reusing the KV cache of the prefix that a text shares with the last.

    An agent's texts share the system turn with all its tools, which is most of each text.
    """

    def __init__(self, model: PreTrainedModel) -> None:
        self._model, self._cache = model, DynamicCache()
        self._token_ids: Sequence[int] = ()
        self._rewinds = attention_kinds(model.config.get_text_config()) == {FULL_ATTENTION}

    @torch.no_grad()
    def last(self, token_ids: Sequence[int], count: int) -> Tensor:
        """The final hidden states of the last `count` tokens of a text, `[count, hidden_size]`."""
        shared = min(common_prefix(self._token_ids, token_ids), len(token_ids) - count) if self._rewinds else 0
        if not shared:
            self._cache = DynamicCache()
        elif shared < len(self._token_ids):
            self._cache.crop(shared - len(self._token_ids))  # a negative number says how many to remove
        self._token_ids = ()  # if the forward pass fails, the cache holds no whole text
        ids = torch.tensor([token_ids[shared:]], device=self._model.device)
        hidden: Tensor = base_of(self._model)(input_ids=ids, past_key_values=self._cache, use_cache=True)[0]
        self._token_ids = tuple(token_ids)
        return hidden[0, -count:]


@torch.no_grad()
def final_hidden(model: PreTrainedModel, token_ids: Tensor) -> Tensor:
    """The final hidden states of one text `[tokens]`, `[tokens, hidden_size]`."""
    hidden: Tensor = base_of(model)(input_ids=token_ids[None], use_cache=False).last_hidden_state
    return hidden[0]


@torch.no_grad()
def check_head(model: PreTrainedModel) -> None:
    """Raise UnsupportedError if a model computes its logits differently from `OutputHead`."""
    token_ids = torch.tensor(PROBE, device=model.device)
    expected = model(input_ids=token_ids[None], use_cache=False).logits[0].float()
    found = OutputHead(model, torch.float32)(final_hidden(model, token_ids))
    error = float((found - expected).norm() / (expected - expected.mean()).norm())
    if not error <= TOLERANCE:
        raise UnsupportedError(
            f"{type(model).__name__} does more to its logits than its output head ({error:.2g} off), so no draft can "
            "be trained for it; give a smaller model with the same tokenizer as the draft model"
        )
