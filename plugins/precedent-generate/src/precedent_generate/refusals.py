"""Refuses by name, before any work is done, what `generate` can do and our loop cannot."""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from typing import Any, NamedTuple

import torch
from torch import Tensor
from transformers import GenerationConfig, GenerationMixin
from transformers.generation.logits_process import LogitsProcessorList
from transformers.generation.stopping_criteria import StoppingCriteriaList

from precedent.errors import ConfigError, PromptError, UnsupportedError
from precedent_generate.processors import CRITERIA, check_criteria, check_processors, end_token_ids

PLAIN_MODES = ("greedy_search", "sample")

MODE_SETTINGS = (
    "num_beams",
    "num_beam_groups",
    "constraints",
    "force_words_ids",
    "penalty_alpha",
    "dola_layers",
    "prompt_lookup_num_tokens",
    "assistant_early_exit",
    "use_mtp",
)
"""Settings that make `generate` choose a mode other than greedy search or sampling."""

REFUSED_SETTINGS = ("output_attentions", "output_hidden_states", "cache_implementation", "is_assistant")
"""Further settings of a GenerationConfig that must be None or False."""

KNOWN_INPUTS = ("attention_mask", "position_ids", "past_key_values", "use_cache", "logits_to_keep")
"""Model inputs that `generate` itself passes on."""


class Dropped(NamedTuple):
    """Arguments of `generate` that it does not pass on to a callable."""

    streamer: Any = None
    assistant_model: Any = None
    synced_gpus: bool | None = None


def dropped_by_generate(model: Any) -> Dropped:
    """Read the dropped arguments from the frame of the `generate` call that called us.

    transformers 5.23 pushes the prompt into the streamer and then drops the streamer, so its reader would wait forever.
    """
    code = inspect.unwrap(GenerationMixin.generate).__code__
    frame = inspect.currentframe()
    while frame is not None and not (frame.f_code is code and frame.f_locals.get("self") is model):
        frame = frame.f_back
    return Dropped() if frame is None else Dropped(*(frame.f_locals.get(name) for name in Dropped._fields))


def check_call(
    model: Any,
    prompts: Tensor,
    processors: LogitsProcessorList,
    criteria: StoppingCriteriaList,
    config: GenerationConfig,
    inputs: Mapping[str, Any],
    dropped: Dropped,
) -> None:
    """Raise UnsupportedError, ConfigError or PromptError for a call that our loop cannot serve."""
    if model.config.is_encoder_decoder:
        raise UnsupportedError(
            f"{model.config.model_type} is an encoder-decoder model, which custom_generate=precedent.generate does not "
            "decode: use precedent.Engine or PrecedentLLM"
        )
    if model.training:
        raise UnsupportedError("in training mode, dropout changes the model's distribution: call model.eval()")
    if dropped.assistant_model is not None:
        raise UnsupportedError(
            "assistant_model= is transformers' own speculation: give the draft model as "
            "drafters=[DraftModelDrafter(TargetModel(draft_model))], or leave out custom_generate"
        )
    if dropped.synced_gpus:
        raise UnsupportedError("synced_gpus=True (ZeRO stage 3, FSDP): our loop steps on one process only")
    if dropped.streamer is not None and len(prompts) > 1:
        raise UnsupportedError("streamer= with several prompts or num_return_sequences: stream one answer at a time")
    _check_config(config)
    _check_inputs(prompts, inputs)
    check_criteria(criteria)
    _check_batch(len(prompts), criteria, config)
    check_processors(processors, prompts, num_logits(model))


def num_logits(model: Any) -> int:
    """The width of a model's rows of logits; a quantised head may have no `weight` that tells it."""
    head = model.get_output_embeddings()
    width = getattr(head, "out_features", None)
    return int(head.weight.shape[0] if width is None else width)


def _check_config(config: GenerationConfig) -> None:
    mode = config.get_generation_mode()
    if mode not in PLAIN_MODES:
        values = ((name, getattr(config, name, None)) for name in MODE_SETTINGS)
        given = ", ".join(f"{name}={value!r}" for name, value in values if value and (value is True or value != 1))
        raise UnsupportedError(
            f"{given} asks for {mode.value.replace('_', ' ')}: custom_generate=precedent.generate decodes greedily or "
            "by sampling"
        )
    for name in REFUSED_SETTINGS:
        if value := getattr(config, name, None):
            raise UnsupportedError(f"{name}={value!r} is not supported by our custom_generate: leave it out")


def _check_inputs(prompts: Tensor, inputs: Mapping[str, Any]) -> None:
    for name, value in inputs.items():
        if name not in KNOWN_INPUTS and value is not None and value is not False:
            raise UnsupportedError(f"{name}= is not an input of our loop, which takes token ids only: leave it out")
    if inputs.get("use_cache") is False:
        raise UnsupportedError("use_cache=False: our loop needs its KV cache; leave it out")
    given = inputs.get("past_key_values")
    if given is not None and (getattr(given, "_is_user_defined", False) or given.get_seq_length() > 0):
        raise UnsupportedError("past_key_values=: our loop has its own KV cache; give the whole prompt instead")
    if prompts.dim() != 2 or prompts.shape[1] == 0:
        raise PromptError("give the prompt as input_ids, at least one token (inputs_embeds alone cannot be decoded)")
    _check_padding(prompts, inputs.get("attention_mask"), inputs.get("position_ids"))


def _check_padding(prompts: Tensor, mask: Tensor | None, positions: Tensor | None) -> None:
    """Check that rows are padded on the left only, and that positions count from the first real token."""
    seen = torch.ones_like(prompts) if mask is None else (mask != 0).long()
    if seen.shape != prompts.shape or bool((seen.diff(dim=1) < 0).any()) or bool((seen[:, -1] == 0).any()):
        raise UnsupportedError("attention_mask= hides more than left padding: pad on the left, mask nothing else")
    if positions is not None:
        expected = (seen.cumsum(1) - 1).clamp(min=0)
        if not torch.equal((positions.to(seen.device) * seen).expand_as(seen), expected * seen):
            raise UnsupportedError("position_ids= other than 0, 1, 2, … from the first token: leave them out")


def _check_batch(rows: int, criteria: StoppingCriteriaList, config: GenerationConfig) -> None:
    if rows == 1:
        return
    if end_token_ids(criteria):
        if config._pad_token_tensor is None:
            raise ConfigError("several prompts need pad_token_id to fill up the rows that end first")
    elif any(type(one).__name__ != CRITERIA[0] for one in criteria):
        # without an end token, generate keeps writing into stopped rows until the last row stops
        raise UnsupportedError(
            "several prompts that stop early, but no end token: set eos_token_id, or give one prompt"
        )
