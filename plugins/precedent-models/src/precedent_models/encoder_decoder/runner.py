"""Runs an encoder once for each prompt, and the decoder rows of several requests together."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel
from transformers.cache_utils import Cache

from precedent.runtime.team import fitted_team
from precedent.target.kv.rows import Rows
from precedent.target.runner import Runner
from precedent_models.encoder_decoder.attention import NAME
from precedent_models.encoder_decoder.forward import DecoderForward, recorded_cross
from precedent_models.encoder_decoder.kv import CrossKV, on_device
from precedent_models.encoder_decoder.positions import count_by_depth, first_row

PREPARED = "_precedent_decoder"
"""Marks a decoder that counts by depth already, so that a model wrapped twice is prepared once."""


class DecoderRunner(Runner):
    """An encoder-decoder model and how it is called; `never` are tokens whose logits become -inf.

    `start` is the first token that the decoder sees.
    """

    def __init__(self, model: PreTrainedModel, start: int, never: Iterable[int] = ()) -> None:
        super().__init__(model, packed=True)
        self._start, self._never = start, sorted(never)
        self._encoder: Any = model.get_encoder()
        self._decoder: Any = model.get_decoder()
        prepare(self._decoder, start, self.device)
        self._like = self._encoded((start,))[:, :1].clone()
        self.num_layers = len(self.encode((start,)))

    @torch.inference_mode()
    def encode(self, prompt_ids: Sequence[int]) -> CrossKV:
        """Run the encoder over a whole prompt; returns what each decoder layer keeps of it."""
        with fitted_team(self.team) as self.threads:
            return recorded_cross(self.model, self._encoded(prompt_ids), (self._start,))

    def observe(self, token_ids: Sequence[int], observer: Cache) -> None:
        """Run the decoder over a text; `observer` sees what its layers store of it."""
        recorded_cross(self.model, self._like, token_ids, observer)

    def _encoded(self, prompt_ids: Sequence[int]) -> Tensor:
        with torch.inference_mode():
            states: Tensor = self._encoder(input_ids=on_device(prompt_ids, self.device)).last_hidden_state
        return states

    def _together(self, sequences: Sequence[Rows]) -> list[Tensor]:
        forward = DecoderForward(
            sequences, self._like, self.num_layers, gives_positions="decoder_position_ids" in self._parameters
        )
        with forward.running():
            logits = self.without_never(self.model(**forward.inputs(self.device)).logits[0])
        return [logits[start:stop] for start, stop in forward.spans]

    def without_never(self, logits: Tensor) -> Tensor:
        """Logits `[rows, vocab_size]` of a forward, changed in place: tokens that no answer may hold get -inf."""
        if self._never:
            logits[:, self._never] = -torch.inf
        return logits

    def _fill(self, rows: Rows) -> None:
        self._together([rows])


@torch.inference_mode()
def prepare(decoder: Any, start: int, device: torch.device) -> None:
    """Switch a decoder to our attention and to positions by depth; every other forward of it stays as it was."""
    if getattr(decoder, PREPARED, False):
        return
    table = getattr(decoder, "embed_positions", None)
    seen: list[Tensor] = []
    if table is not None:
        hook = table.register_forward_hook(lambda module, args, output: seen.append(output))
        try:
            decoder(input_ids=on_device((start,), device), use_cache=False)
        finally:
            hook.remove()
    count_by_depth(decoder, first_row(table, seen[0]) if table is not None else 0)
    decoder.config._attn_implementation = NAME
    setattr(decoder, PREPARED, True)
