"""What `custom_generate` cannot keep is refused by name, and so are settings that are none."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from helpers.generating import PROMPT, VOCABULARY, Listener, both, made, prompts
from torch import Tensor
from transformers import LogitsProcessor, LogitsProcessorList, PreTrainedModel, SynthIDTextWatermarkingConfig
from transformers.cache_utils import DynamicCache

import precedent
from precedent.cache import SpeculationCache
from precedent.errors import ConfigError, UnsupportedError
from precedent_testing.embedders import HashEmbedder
from precedent_testing.tiny_models import tiny_causal_lm, tiny_seq2seq_lm


class Counting(LogitsProcessor):
    """A processor that counts its calls."""

    def __init__(self) -> None:
        self.calls = 0

    def __call__(self, input_ids: Tensor, scores: Tensor) -> Tensor:
        self.calls += 1
        return scores


class Noisy(LogitsProcessor):
    """A processor with coins of its own."""

    def __call__(self, input_ids: Tensor, scores: Tensor) -> Tensor:
        return scores + torch.rand_like(scores)


class Lazy(LogitsProcessor):
    """A processor that sets itself up at its first call, as transformers' own sequence bias does."""

    ready = False

    def __call__(self, input_ids: Tensor, scores: Tensor) -> Tensor:
        self.ready = True
        return scores


def test_a_processor_that_is_set_up_at_its_first_call_is_no_stateful_one(model: PreTrainedModel) -> None:
    settings = {"max_new_tokens": 4, "do_sample": False}
    alone, ours = both(model, prompts(PROMPT), **settings, logits_processor=LogitsProcessorList([Lazy()]))
    assert ours.tolist() == alone.tolist()


def filled_cache() -> DynamicCache:
    cache = DynamicCache()
    cache.update(torch.zeros(1, 2, 3, 12), torch.zeros(1, 2, 3, 12), 0)
    return cache


REFUSED: dict[str, tuple[Callable[[], dict[str, Any]], str]] = {
    "beams": (lambda: {"num_beams": 2}, "^num_beams=2 asks for beam search"),
    "contrastive": (lambda: {"penalty_alpha": 0.6, "top_k": 4}, "penalty_alpha=0.6 asks for contrastive search"),
    "dola": (lambda: {"dola_layers": "low"}, "dola_layers='low' asks for dola generation"),
    "prompt lookup": (lambda: {"prompt_lookup_num_tokens": 5}, "prompt_lookup_num_tokens=5 asks for assisted"),
    "mtp": (lambda: {"use_mtp": True}, "^use_mtp=True asks for assisted"),
    "assistant": (lambda: {"assistant_model": tiny_causal_lm(vocab_size=VOCABULARY)}, "assistant_model= is"),
    "attentions": (lambda: {"output_attentions": True}, "output_attentions=True"),
    "hidden states": (lambda: {"output_hidden_states": True}, "output_hidden_states=True"),
    "cache": (lambda: {"past_key_values": filled_cache()}, "past_key_values="),
    "static cache": (lambda: {"cache_implementation": "static"}, "cache_implementation='static'"),
    "no cache": (lambda: {"use_cache": False}, "use_cache=False"),
    "guidance": (lambda: {"guidance_scale": 1.5}, "UnbatchedClassifierFreeGuidanceLogitsProcessor keeps state"),
    "synthid": (
        lambda: {"watermarking_config": SynthIDTextWatermarkingConfig(keys=[1, 2, 3], ngram_len=3)},
        "SynthIDTextWatermarkLogitsProcessor keeps state",
    ),
    "counting": (lambda: {"logits_processor": LogitsProcessorList([Counting()])}, "Counting gives different results"),
    "noisy": (lambda: {"logits_processor": LogitsProcessorList([Noisy()])}, "Noisy gives different results"),
    "holes": (lambda: {"attention_mask": torch.tensor([[1] * 4 + [0] + [1] * 5])}, "attention_mask= hides more"),
    "positions": (lambda: {"position_ids": torch.arange(3, 13)[None]}, "position_ids= other than"),
    "synced": (lambda: {"synced_gpus": True}, "synced_gpus=True"),
    "labels": (lambda: {"inputs_embeds": torch.zeros(1, 10, 48, dtype=torch.float64)}, "inputs_embeds= is not"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_cannot_be_kept_is_refused_by_name(model: PreTrainedModel, name: str) -> None:
    settings, says = REFUSED[name]
    arguments = {**prompts(PROMPT), "max_new_tokens": 4, "do_sample": False, **settings()}
    with pytest.raises(UnsupportedError, match=says):
        model.generate(**arguments, custom_generate=precedent.generate)


def test_several_prompts_are_refused_where_generate_would_couple_them(model: PreTrainedModel) -> None:
    two = prompts(PROMPT, PROMPT)
    with pytest.raises(UnsupportedError, match="streamer= with several prompts"):
        model.generate(**two, max_new_tokens=4, custom_generate=precedent.generate, streamer=Listener())
    with pytest.raises(UnsupportedError, match="but no end token"):
        model.generate(**two, max_new_tokens=4, max_time=60.0, custom_generate=precedent.generate)


def test_an_encoder_decoder_model_is_refused_by_name() -> None:
    with pytest.raises(UnsupportedError, match=r"t5 is an encoder-decoder model.*PrecedentLLM"):
        tiny_seq2seq_lm("t5").generate(**prompts(PROMPT), max_new_tokens=4, custom_generate=precedent.generate)


def test_a_model_in_training_mode_is_refused() -> None:
    model = made()
    model.train()
    with pytest.raises(UnsupportedError, match="training mode"):
        model.generate(**prompts(PROMPT), max_new_tokens=4, custom_generate=precedent.generate)
    assert model.training


@pytest.mark.parametrize(
    ("settings", "says"),
    [
        ({"drafters": ["recall"]}, "drafter 'recall' has nothing to draft from here: give speculation_cache"),
        ({"drafters": ["draft-model"]}, "DraftModelDrafter"),
        ({"drafters": ["promt"]}, "no drafter is called 'promt'"),
        ({"drafters": "prompt"}, "give a list"),
        ({"speculation_cache": SpeculationCache.open(None, embedder=HashEmbedder())}, "needs speculation_tokenizer="),
    ],
)
def test_wrong_settings_say_what_to_write(model: PreTrainedModel, settings: dict[str, Any], says: str) -> None:
    with pytest.raises(ConfigError, match=says):
        model.generate(**prompts(PROMPT), max_new_tokens=4, custom_generate=precedent.generate, **settings)
