"""Tiny random Hugging Face models and a byte tokenizer: every code path of the engine without a download."""

from __future__ import annotations

import copy
from typing import Any

import torch
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    AutoModelForSeq2SeqLM,
    GenerationConfig,
    PreTrainedModel,
    PreTrainedTokenizerFast,
)

SPECIAL_TOKENS = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")

CHATML = (
    "{% for message in messages %}{{ '<|im_start|>' + message['role'] + '\n' + message['content'] + '<|im_end|>\n' }}"
    "{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)

_SHAPE: dict[str, Any] = {
    "hidden_size": 48,
    "intermediate_size": 64,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 1024,
}

_TWO_SIDED: dict[str, dict[str, Any]] = {
    "t5": {"d_model": 48, "d_kv": 12, "d_ff": 64, "num_layers": 2, "num_decoder_layers": 3, "num_heads": 4},
    "bart": {
        "d_model": 48,
        "encoder_layers": 2,
        "decoder_layers": 3,
        "pad_token_id": 0,
        "encoder_attention_heads": 4,
        "decoder_attention_heads": 4,
        "encoder_ffn_dim": 64,
        "decoder_ffn_dim": 64,
        "max_position_embeddings": 512,
    },
}

_T5GEMMA_SIDE: dict[str, Any] = {
    "hidden_size": 48,
    "intermediate_size": 64,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 12,
    "query_pre_attn_scalar": 12,
    "attn_logit_softcapping": 5.0,
    "sliding_window": 6,
    "max_position_embeddings": 512,
    "layer_types": ["sliding_attention", "full_attention"] * 2,
}


def byte_tokenizer(merges: tuple[tuple[str, str], ...] = ()) -> PreTrainedTokenizerFast:
    """A tokenizer with one token per byte (plus `merges`), ChatML control tokens, and a template without tools."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocabulary = {symbol: i for i, symbol in enumerate([*alphabet, *(left + right for left, right in merges)])}
    backend = Tokenizer(models.BPE(vocab=vocabulary, merges=list(merges)))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    backend.decoder = decoders.ByteLevel()
    backend.add_special_tokens([AddedToken(text, special=True) for text in SPECIAL_TOKENS])
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=backend, eos_token="<|im_end|>", pad_token="<|endoftext|>", bos_token="<|endoftext|>"
    )
    tokenizer.chat_template = CHATML
    return tokenizer


def tiny_causal_lm(
    model_type: str = "llama",
    *,
    vocab_size: int = 259,
    dtype: torch.dtype = torch.float64,
    seed: int = 0,
    scale: float = 1.0,
    **settings: Any,
) -> PreTrainedModel:
    """A random causal LM of any architecture in transformers, small enough for exact tests on a CPU.

    `scale` multiplies the output head; larger values make the next token more certain.
    """
    config = AutoConfig.for_model(model_type, vocab_size=vocab_size, **{**_SHAPE, **settings})
    config._experts_implementation = "eager"  # the only implementation that computes in float64
    config.eos_token_id = config.bos_token_id = config.pad_token_id = None
    return _random(AutoModelForCausalLM, config, dtype, seed, scale)


def tiny_seq2seq_lm(
    model_type: str = "t5",
    *,
    vocab_size: int = 259,
    start: int = 256,
    dtype: torch.dtype = torch.float64,
    seed: int = 0,
    scale: float = 1.0,
    **settings: Any,
) -> PreTrainedModel:
    """A random encoder-decoder model of T5's or BART's family; its decoder begins with the token `start`."""
    if model_type == "t5gemma":
        side = {**_T5GEMMA_SIDE, "vocab_size": vocab_size, "pad_token_id": vocab_size - 1, **settings}
        shape = {"encoder": side, "decoder": dict(side)}
    else:
        shape = {**_TWO_SIDED["t5" if model_type.endswith("t5") else "bart"], **settings}
    config = AutoConfig.for_model(model_type, vocab_size=vocab_size, **shape)
    config.eos_token_id = config.bos_token_id = None
    config.pad_token_id = vocab_size - 1
    model = _random(AutoModelForSeq2SeqLM, config, dtype, seed, scale)
    model.generation_config = GenerationConfig(decoder_start_token_id=start)
    return model


MOST_KEPT = 32
"""Models that are kept to be copied."""

_MADE: dict[tuple[Any, ...], PreTrainedModel] = {}


def _random(kind: Any, config: Any, dtype: torch.dtype, seed: int, scale: float) -> PreTrainedModel:
    """A copy of one that was made before, which takes a third of the time, or a new one."""
    key = (kind, config.to_json_string(use_diff=False), config._attn_implementation, dtype, seed, scale)
    if key not in _MADE:
        if len(_MADE) == MOST_KEPT:
            _MADE.pop(next(iter(_MADE)))
        _MADE[key] = _made(kind, config, dtype, seed, scale)
    return copy.deepcopy(_MADE[key])


def _made(kind: Any, config: Any, dtype: torch.dtype, seed: int, scale: float) -> PreTrainedModel:
    """Random weights; transformers initialises with a spread of 0.02, too flat to tell positions apart."""
    with torch.random.fork_rng(devices=[]), torch.no_grad():
        torch.manual_seed(seed)
        model: PreTrainedModel = kind.from_config(config, dtype=dtype)
        for name, parameter in model.named_parameters():
            if parameter.dim() > 1:  # T5's biases are few numbers that must tell distances apart
                wide = config.is_encoder_decoder and "relative" in name
                parameter.normal_(0.0, 1.0 if wide else parameter.shape[-1] ** -0.5)
        model.get_output_embeddings().weight.mul_(scale * 4.0)
    model.eval()
    return model
