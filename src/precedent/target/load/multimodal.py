"""Multimodal checkpoints that serve as text models: their language model, without towers for images or sound."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from transformers import (
    AutoModelForCausalLM,
    AutoModelForImageTextToText,
    AutoModelForSeq2SeqLM,
    PreTrainedConfig,
    PreTrainedModel,
)

from precedent.errors import UnsupportedError


def auto_class(config: PreTrainedConfig) -> Any:
    """The class of transformers that loads a model of this config. Raises UnsupportedError if none generates text."""
    if config.is_encoder_decoder:
        return AutoModelForSeq2SeqLM
    for auto in (AutoModelForCausalLM, AutoModelForImageTextToText):
        if type(config) in auto._model_mapping:
            return auto
    raise UnsupportedError(
        f"{config.model_type} is not a model that generates text in this version of transformers: give a causal "
        "language model, or a multimodal one that AutoModelForImageTextToText loads"
    )


def language_model_of(model: PreTrainedModel) -> PreTrainedModel:
    """The language model of a multimodal model, as a causal LM of its own family that shares its weights.

    A model whose text part is not of a family of its own, such as Qwen-VL's, is returned whole: it takes text alone.
    """
    text: PreTrainedConfig = model.config.get_text_config()
    parts = [part for part in model.modules() if isinstance(part, PreTrainedModel) and part.config is text]
    head = model.get_output_embeddings()
    if text is model.config or head is None or not parts or type(text) not in AutoModelForCausalLM._model_mapping:
        return model
    with torch.device("meta"):  # no memory: all of its parts are replaced
        causal: Any = AutoModelForCausalLM.from_config(text)
    if type(parts[0]) is type(causal):
        return _named(parts[0], model)
    if type(parts[0]) is not type(causal.base_model):
        return model
    setattr(causal, causal.base_model_prefix, parts[0])
    causal.set_output_embeddings(head)
    if any(tensor.is_meta for tensor in (*causal.parameters(), *causal.buffers())):
        return model
    causal.generation_config = model.generation_config
    return _named(causal, model)


def _named(causal: Any, whole: nn.Module) -> PreTrainedModel:
    causal.config._name_or_path = getattr(whole.config, "_name_or_path", "")
    found: PreTrainedModel = causal
    return found
