"""What an encoder-decoder model's configuration says about its answers: how they begin, and what they never hold."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from typing import Any, NamedTuple

from transformers import MODEL_FOR_SEQ_TO_SEQ_CAUSAL_LM_MAPPING, GenerationConfig, PreTrainedModel

from precedent.errors import UnsupportedError
from precedent.target.kv.layer_kinds import check_type
from precedent.target.support import TargetOptions

UNLIMITED = 16_384
"""Longest prompt, and longest answer, in tokens, of a model whose positions are relative (T5)."""

NOT_APPLIED = (
    "num_beams",
    "repetition_penalty",
    "no_repeat_ngram_size",
    "encoder_no_repeat_ngram_size",
    "min_length",
    "min_new_tokens",
)
"""Settings of a generation config that an engine does not apply; the log names those that are set."""

WHY_NOT = {
    "bitwise": "its attention does not round a row the same way in every forward",
    "cuda_graphs": "its forwards have no fixed size",
    "keep_prefixes": "its encoder reads a prompt whole, so the beginning of one cannot be kept",
}
"""Options that need a decoder-only model, and the reason."""

log = logging.getLogger(__name__)


class AnswerSettings(NamedTuple):
    """`start` are the tokens before an answer's first; `never` those that no answer holds."""

    start: tuple[int, ...]
    never: frozenset[int]


def check_options(config: Any, options: TargetOptions) -> None:
    """Raise UnsupportedError, naming option and reason, for the first option that these models cannot have."""
    for option in ("bitwise", "cuda_graphs"):
        if getattr(options, option):
            raise refusal(config, option)


def refusal(config: Any, option: str) -> UnsupportedError:
    """Why an option cannot be had."""
    return UnsupportedError(
        f"{option}=True does not work with the encoder-decoder model {config.model_type} ({WHY_NOT[option]}): "
        "leave it out"
    )


def check_encoder_decoder(config: Any) -> None:
    """Raise UnsupportedError, naming the model, if it does not turn text into text, or cannot be a target."""
    check_type(config.model_type)
    if type(config) not in MODEL_FOR_SEQ_TO_SEQ_CAUSAL_LM_MAPPING:
        raise UnsupportedError(
            f"{config.model_type} is no text-to-text model; give one that AutoModelForSeq2SeqLM loads (T5, BART, ...)"
        )


def answer_settings(model: PreTrainedModel) -> AnswerSettings:
    """How answers begin, by the generation config. Raises UnsupportedError without a first token for the decoder."""
    said: Any = model.generation_config or GenerationConfig()
    start = next((token for token in _first_tokens(model.config, said) if token is not None), None)
    if start is None:
        raise UnsupportedError(
            f"{model.config.model_type} names no decoder_start_token_id: set it in the model's generation_config"
        )
    forced = said.forced_bos_token_id
    ignored = [name for name in NOT_APPLIED if getattr(said, name, None) not in (None, 0, 1)]
    if ignored:
        log.warning("the generation config's %s is not applied", ", ".join(ignored))
    return AnswerSettings((start,) if forced is None else (start, forced), frozenset(_never(said)))


def longest(config: Any) -> int:
    """Most tokens of a prompt, and of an answer with the tokens before it."""
    text = config.get_text_config(decoder=True)
    return int(getattr(text, "max_position_embeddings", None) or UNLIMITED)


def _first_tokens(config: Any, said: Any) -> Iterator[int | None]:
    """Where transformers' `generate` looks for the decoder's first token, in its order."""
    yield said.decoder_start_token_id
    yield getattr(config, "decoder_start_token_id", None)
    yield said.bos_token_id
    yield getattr(config, "bos_token_id", None)


def _never(said: Any) -> Iterator[int]:
    """Single tokens that the generation config forbids everywhere: Marian's padding token."""
    yield from said.suppress_tokens or ()
    yield from (words[0] for words in said.bad_words_ids or () if len(words) == 1)
