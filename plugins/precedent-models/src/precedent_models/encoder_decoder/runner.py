"""Runs an encoder once for each prompt and the decoder rows of several requests together; examines a model at load."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel

from precedent.runtime.team import fitted_team
from precedent.target.examine import attempt, check_error, tree_error
from precedent.target.kv.rows import ForwardPass, Rows
from precedent.target.kv.shape import KVShape, ShapeObserver
from precedent.target.runner import Runner
from precedent_models.encoder_decoder.kv import (
    CrossKV,
    DecoderForward,
    DecoderKV,
    on_device,
    recorded_cross,
)
from precedent_models.encoder_decoder.positions import NAME, count_by_depth, first_row

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

    def observe(self, token_ids: Sequence[int]) -> KVShape:
        """What the decoder's layers store of the tokens of a text."""
        observer = ShapeObserver(self.num_layers)
        recorded_cross(self.model, self._like, token_ids, observer)
        return observer.shape

    def _encoded(self, prompt_ids: Sequence[int]) -> Tensor:
        with torch.inference_mode():
            states: Tensor = self._encoder(input_ids=on_device(prompt_ids, self.device)).last_hidden_state
        return states

    def forward_of(self, sequences: Sequence[Rows]) -> DecoderForward:
        """One forward over the decoder's rows of some requests."""
        gives_positions = "decoder_position_ids" in self._parameters
        return DecoderForward(sequences, self._like, self.num_layers, gives_positions=gives_positions)

    def own(self, forward: ForwardPass, **settings: Any) -> Tensor:
        """Logits of the model's own forward, `[rows, vocab_size]`."""
        return self.without_never(super().own(forward, **settings))

    def without_never(self, logits: Tensor) -> Tensor:
        """Logits `[rows, vocab_size]` of a forward, changed in place: tokens that no answer may hold get -inf."""
        if self._never:
            logits[:, self._never] = -torch.inf
        return logits


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


@torch.inference_mode()
def examine(model: PreTrainedModel, start: int, never: Iterable[int]) -> tuple[DecoderRunner, KVShape, int]:
    """Observe a model; returns how it runs, what its decoder stores, and the size of its vocabulary.

    Raises UnsupportedError, naming it, when a candidate tree cannot be scored.
    """
    runner = attempt(model, lambda: DecoderRunner(model, start, never))
    return attempt(model, lambda: _examined(runner, start))


def _examined(runner: DecoderRunner, start: int) -> tuple[DecoderRunner, KVShape, int]:
    text = _text(runner.model.config, start)
    cross, shape = runner.encode(text[:3]), runner.observe(text)
    prompt_ids, token_ids = (on_device(ids, runner.device) for ids in (text[:3], text))
    logits: Tensor = runner.model(input_ids=prompt_ids, decoder_input_ids=token_ids, use_cache=False).logits[0]

    def new_kv() -> DecoderKV:
        kv = DecoderKV(shape)
        kv.cross = cross
        return kv

    check_error(runner, tree_error(runner, new_kv, runner.without_never(logits), text))
    return runner, shape, logits.shape[-1]


def _text(config: Any, start: int) -> tuple[int, ...]:
    """The decoder's first token and four others: neither padding, which some models skip, nor all the same."""
    padding = {getattr(each, "pad_token_id", None) for each in (config, config.get_text_config(decoder=True))}
    one, other = [token for token in range(5) if token not in padding | {start}][:2]
    return start, other, one, one, other
