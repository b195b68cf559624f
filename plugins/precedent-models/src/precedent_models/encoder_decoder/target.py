"""An encoder-decoder model as a target: its encoder reads the prompt once, its decoder scores candidate trees."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from transformers import PreTrainedModel

from precedent.errors import ContextOverflowError, PromptError, UnsupportedError
from precedent.target.contract import NOTHING_PENDING, Slot
from precedent.target.model import TargetModel, check_one_process
from precedent_models.encoder_decoder.kv import DecoderKV
from precedent_models.encoder_decoder.runner import DecoderRunner, examine
from precedent_models.encoder_decoder.settings import answer_settings, check_encoder_decoder, longest, refusal


class EncoderDecoderTarget(TargetModel):
    """Wraps an `AutoModelForSeq2SeqLM`. Raises UnsupportedError for one whose decoder cannot score a tree.

    A slot holds the decoder's tokens: `answer_start`, then the answer. `context_length` bounds the prompt alone.
    """

    encodes_prompt = True

    def __init__(self, model: PreTrainedModel) -> None:
        check_encoder_decoder(model.config)
        check_one_process(model)
        self.model, self.bitwise = model.eval(), False
        settings = answer_settings(model)
        self.answer_start = settings.start
        self.runner: DecoderRunner
        self.runner, self.kv_shape, self.vocab_size, self._prompt_token_bytes = examine(model, settings)
        self.context_length = longest(model.config)

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
                f"the prompt has {len(prompt_ids)} tokens, the encoder reads {self.context_length}: shorten it"
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
