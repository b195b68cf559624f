"""The target's output head for all or some tokens, and the hidden states that it reads."""

from __future__ import annotations

import copy
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import linear
from transformers import DynamicCache, PreTrainedModel

from precedent.errors import UnsupportedError
from precedent.runtime.instructions import native_bfloat16
from precedent.target import common_prefix
from precedent.target.fingerprints import name_of
from precedent.target.kv.layer_kinds import FULL_ATTENTION, attention_kinds
from precedent.target.load.first_layers import base_of, layers_of

PROBE = (0, 1, 1, 0, 1)
"""Token ids on which the head is compared with the model's own; valid in any vocabulary."""

TOLERANCE = 0.05
"""Accepted relative difference in that comparison: rounding in the lowest precision."""


class OutputHead:
    """`weight [tokens, hidden_size]`, followed by the logit scaling and capping of some architectures, in `dtype`."""

    def __init__(self, model: PreTrainedModel, dtype: torch.dtype, token_ids: Tensor | None = None) -> None:
        head: Any = model.get_output_embeddings()
        ids = slice(None) if token_ids is None else token_ids.to(head.weight.device)
        self.weight = head.weight.detach()[ids].to(dtype)
        self.bias = None if head.bias is None else head.bias.detach()[ids].to(dtype)
        config = model.config.get_text_config()
        scale, divisor = (float(getattr(config, name, 1.0) or 1.0) for name in ("logit_scale", "logits_scaling"))
        self._scale, self._cap = scale / divisor, getattr(config, "final_logit_softcapping", None)

    def __call__(self, hidden: Tensor) -> Tensor:
        """Hidden states `[rows, hidden_size]` to logits `[rows, tokens]`."""
        logits = linear(hidden.to(self.weight.dtype), self.weight, self.bias) * self._scale
        return logits if self._cap is None else torch.tanh(logits / self._cap) * self._cap


class Reader:
    """Runs a model over texts one after the other, reusing the KV cache of the prefix that a text shares with the last.

    An agent's texts share the system turn with all its tools, which is most of each text. A processor without bfloat16
    arithmetic reads a float32 copy of the model: it is much faster, and the same up to rounding.
    """

    def __init__(self, model: PreTrainedModel) -> None:
        slow = model.device.type == "cpu" and model.dtype == torch.bfloat16 and not native_bfloat16()
        self.model = copy.deepcopy(model).float() if slow else model
        self._cache, self._token_ids = DynamicCache(), tuple[int, ...]()
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
        ids = torch.tensor([token_ids[shared:]], device=self.model.device)
        hidden: Tensor = base_of(self.model)(input_ids=ids, past_key_values=self._cache, use_cache=True)[0]
        self._token_ids = tuple(token_ids)
        return hidden[0, -count:]


@torch.no_grad()
def check_trainable(target: PreTrainedModel) -> None:
    """Raise UnsupportedError if no draft can be trained on a target's embeddings, layers and head."""
    if getattr(target.config, "quantization_config", None) is not None:
        raise UnsupportedError(
            f"{name_of(target)} is quantised, so no layers can be copied from it; load it in full precision"
        )
    layers_of(target)
    ids = torch.tensor([PROBE], device=target.device)
    expected = target(input_ids=ids, use_cache=False).logits[0].float()
    found = OutputHead(target, torch.float32)(base_of(target)(input_ids=ids, use_cache=False).last_hidden_state[0])
    error = float((found - expected).norm() / (expected - expected.mean()).norm())
    if not error <= TOLERANCE:
        raise UnsupportedError(
            f"{type(target).__name__} does more to its logits than its output head ({error:.2g} off), so no draft can "
            "be trained for it; give a smaller model with the same tokenizer as the draft model"
        )
