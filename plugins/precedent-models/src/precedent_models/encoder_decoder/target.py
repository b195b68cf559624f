"""An encoder-decoder model as a target: its encoder reads the prompt once, its decoder scores candidate trees."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from typing import Any

import torch
from transformers import MODEL_FOR_SEQ_TO_SEQ_CAUSAL_LM_MAPPING, GenerationConfig, PreTrainedModel

from precedent.errors import ContextOverflowError, PromptError, UnsupportedError
from precedent.target.contract import NOTHING_PENDING, Slot
from precedent.target.kv.layer_kinds import check_type
from precedent.target.model import TargetModel, check_one_process
from precedent.target.support import TargetOptions
from precedent_models.encoder_decoder.kv import DecoderKV
from precedent_models.encoder_decoder.runner import DecoderRunner, examine

UNLIMITED = 16_384
"""Longest prompt, and longest answer, in tokens, of a model whose positions are relative (T5)."""

NOT_APPLIED = (
    "num_beams", "repetition_penalty", "no_repeat_ngram_size", "encoder_no_repeat_ngram_size", "min_length",
    "min_new_tokens",
)  # fmt: skip
"""Settings of a generation config that an engine does not apply; the log names those that are set."""

WHY_NOT = {
    "bitwise": "its attention does not round a row the same way in every forward",
    "cuda_graphs": "its forwards have no fixed size",
    "keep_prefixes": "its encoder reads a prompt whole, so the beginning of one cannot be kept",
}
"""Options that need a decoder-only model, and the reason."""

log = logging.getLogger(__name__)


class EncoderDecoderTarget(TargetModel):
    """Wraps an `AutoModelForSeq2SeqLM`. Raises UnsupportedError for one whose decoder cannot score a tree.

    A slot holds the decoder's tokens: `answer_start`, then the answer. `context_length` bounds the prompt alone.
    """

    encodes_prompt = True

    def __init__(self, model: PreTrainedModel) -> None:
        check_encoder_decoder(model.config)
        check_one_process(model)
        self.model, self.bitwise = model.eval(), False
        said: Any = model.generation_config or GenerationConfig()
        self.answer_start = start = _start(model, said)
        never = {*(said.suppress_tokens or ()), *(words[0] for words in said.bad_words_ids or () if len(words) == 1)}
        self.runner: DecoderRunner
        self.runner, self.kv_shape, self.vocab_size = examine(model, start[0], never)
        self._read_model()
        cross = self.runner.encode(start[:1])
        self._prompt_token_bytes = sum(part.nbytes for pair in cross for part in pair)
        text = model.config.get_text_config(decoder=True)
        self.context_length = int(getattr(text, "max_position_embeddings", None) or UNLIMITED)

    def _check_keeps(self) -> None:
        """Raise UnsupportedError: no drafter reads those of an encoder-decoder model."""
        raise UnsupportedError(
            f"{self.model.config.model_type} is an encoder-decoder model, which keeps no hidden states for drafters: "
            "leave out those that read them"
        )

    def most_answer_tokens(self, prompt_tokens: int) -> int:
        """The longest answer: the decoder's positions do not depend on the prompt."""
        return self.context_length - len(self.answer_start)

    def request_bytes(self, prompt_tokens: int, answer_tokens: int, tree_tokens: int, num_rows: int = 0) -> int:
        """Bytes of a request: the decoder's keys and values, and what its layers keep of the encoder's output."""
        own = len(self.answer_start) + answer_tokens + tree_tokens
        return self.kv_bytes(own, num_rows) + prompt_tokens * self._prompt_token_bytes

    def _empty_cache(self) -> DecoderKV:
        return DecoderKV(self.kv_shape)

    def begin_prefill(self, slot: Slot, prompt_ids: Sequence[int]) -> int:
        """Forget what the slot held; returns 0. Raises PromptError or ContextOverflowError."""
        if not prompt_ids:
            raise PromptError("the prompt is empty: give at least one token")
        if len(prompt_ids) > self.context_length:
            raise ContextOverflowError(
                f"the prompt is too long: {len(prompt_ids)} tokens, the encoder reads {self.context_length}: shorten it"
            )
        self.rewind(slot, 0)
        slot.kv.cross, slot.pending = (), NOTHING_PENDING
        return 0

    @torch.inference_mode()
    def continue_prefill(self, slot: Slot, prompt_ids: Sequence[int], max_tokens: int) -> bool:
        """Run the encoder over the whole prompt, whatever `max_tokens`: each of its tokens sees all others."""
        *begun, pending = self.answer_start
        slot.kv.cross = self.runner.encode(prompt_ids)
        if begun:
            self._prefill_chunk(slot, begun)
        slot.pending = pending
        return True

    def identity(self) -> dict[str, object]:
        """Raises UnsupportedError: the beginning of a prompt has no keys and values of its own."""
        raise refusal(self.config, "keep_prefixes")


def _start(model: PreTrainedModel, said: Any) -> tuple[int, ...]:
    """The tokens before an answer's first. Raises UnsupportedError without a first token for the decoder.

    They are where transformers' `generate` looks for them, in its order.
    """
    named = [(each, name) for name in ("decoder_start_token_id", "bos_token_id") for each in (said, model.config)]
    start = next((token for each, name in named if (token := getattr(each, name, None)) is not None), None)
    if start is None:
        raise UnsupportedError(
            f"{model.config.model_type} names no decoder_start_token_id: set it in the model's generation_config"
        )
    ignored = [name for name in NOT_APPLIED if getattr(said, name, None) not in (None, 0, 1)]
    if ignored:
        log.warning("the generation config's %s is not applied", ", ".join(ignored))
    return (start,) if said.forced_bos_token_id is None else (start, said.forced_bos_token_id)


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
