"""Tiny encoder-decoder models, every family that works, and what transformers' own `generate` answers with them."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache
from typing import Any

import torch
from transformers import PreTrainedModel

from precedent.engine.engine import Engine
from precedent.planning.costs import CostCurve
from precedent_models.encoder_decoder.target import EncoderDecoderTarget
from precedent_testing.tiny_models import byte_tokenizer, tiny_seq2seq_lm

FAMILIES: dict[str, tuple[str, dict[str, Any]]] = {
    "t5": ("t5", {"relative_attention_num_buckets": 8, "relative_attention_max_distance": 20}),
    "t5, gated and untied": ("t5", {"feed_forward_proj": "gated-gelu", "tie_word_embeddings": False}),
    "mt5": ("mt5", {}),
    "umt5": ("umt5", {"relative_attention_num_buckets": 8, "relative_attention_max_distance": 20}),
    "longt5": ("longt5", {}),
    "bart": ("bart", {}),
    "mbart": ("mbart", {"scale_embedding": True}),
    "pegasus": ("pegasus", {}),
    "marian": ("marian", {}),
    "blenderbot": ("blenderbot", {}),
    "m2m_100": ("m2m_100", {}),
    "plbart": ("plbart", {}),
    "t5gemma": ("t5gemma", {}),
}
"""Model type and settings of each family. T5's buckets are few, so that short texts reach the last of them."""

PROMPT = tuple(b"order 17 leaves on monday, order 18 on friday")


def model_of(family: str, **settings: Any) -> PreTrainedModel:
    """A random model in float64; equal arguments give equal weights."""
    model_type, own = FAMILIES[family]
    return tiny_seq2seq_lm(model_type, **{**own, **settings})


@cache
def target_of(family: str) -> EncoderDecoderTarget:
    """The model as a target."""
    return EncoderDecoderTarget(model_of(family))


def plain_logits(model: PreTrainedModel, prompt: Sequence[int], decoded: Sequence[int]) -> torch.Tensor:
    """Logits after the last of the `decoded` tokens, `[vocab_size]`."""
    return plain_rows(model, prompt, decoded)[-1]


def plain_rows(model: PreTrainedModel, prompt: Sequence[int], decoded: Sequence[int]) -> torch.Tensor:
    """Logits after each of the `decoded` tokens, by the whole model without any cache."""
    with torch.inference_mode():
        inputs = {"input_ids": torch.tensor([list(prompt)]), "decoder_input_ids": torch.tensor([list(decoded)])}
        rows: torch.Tensor = model(**inputs, use_cache=False).logits[0]
    return rows


def generated(model: PreTrainedModel, prompt: Sequence[int], max_tokens: int, **settings: Any) -> tuple[int, ...]:
    """What transformers' greedy `generate` answers, without the tokens before the answer."""
    given = {
        "do_sample": False,
        "num_beams": 1,
        "eos_token_id": 258,
        "pad_token_id": 258,
        "use_cache": False,
        **settings,
    }
    output = model.generate(input_ids=torch.tensor([list(prompt)]), max_new_tokens=max_tokens, **{**given, **settings})
    return tuple(output[0].tolist()[1:])


def two_sided_engine(family: str = "t5", *, model: PreTrainedModel | None = None, **settings: Any) -> Engine:
    """An engine on such a model, for which width is free."""
    engine = Engine.load(model or model_of(family), **{"tokenizer": byte_tokenizer(), **settings})
    engine.planner.cost = CostCurve()
    return engine
