"""Runs an encoder once for each prompt and the decoder rows of several requests together; examines a model at load."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor
from transformers import PreTrainedModel

from precedent.runtime.team import fitted_team
from precedent.target.examine import attempt, check_error, relative
from precedent.target.kv.rows import Forward, Rows, chain_rows, tree_rows
from precedent.target.kv.shape import KVShape, ShapeObserver
from precedent.target.runner import Runner
from precedent.tree import ROOT, TreeBuilder
from precedent_models.encoder_decoder.kv import (
    CrossKV,
    DecoderForward,
    DecoderKV,
    bytes_per_prompt_token,
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

    def own(self, forward: Forward, **settings: Any) -> Tensor:
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


class Examined(NamedTuple):
    """What the rest of the library needs to know; `prompt_token_bytes` are kept of each token of a prompt."""

    runner: DecoderRunner
    kv_shape: KVShape
    vocab_size: int
    prompt_token_bytes: int


@torch.inference_mode()
def examine(model: PreTrainedModel, start: int, never: Iterable[int]) -> Examined:
    """Observe a model. Raises UnsupportedError, naming it, when a candidate tree cannot be scored."""
    runner = attempt(model, lambda: DecoderRunner(model, start, never))
    return attempt(model, lambda: _examined(runner, start))


def _examined(runner: DecoderRunner, start: int) -> Examined:
    text = _text(runner.model.config, start)
    cross, shape = runner.encode(text[:3]), runner.observe(text)
    check_error(runner, _tree_error(runner, shape, text))
    return Examined(runner, shape, _plain(runner, text[:3], text).shape[-1], bytes_per_prompt_token(cross))


def _text(config: Any, start: int) -> tuple[int, ...]:
    """The decoder's first token and four others: neither padding, which some models skip, nor all the same."""
    padding = {getattr(each, "pad_token_id", None) for each in (config, config.get_text_config(decoder=True))}
    one, other = [token for token in range(5) if token not in padding | {start}][:2]
    return start, other, one, one, other


def _plain(runner: DecoderRunner, prompt: tuple[int, ...], text: tuple[int, ...]) -> Tensor:
    """Logits `[tokens, vocab_size]` in a forward of transformers' own."""
    prompt_ids, token_ids = (on_device(ids, runner.device) for ids in (prompt, text))
    logits: Tensor = runner.model(input_ids=prompt_ids, decoder_input_ids=token_ids, use_cache=False).logits[0]
    return runner.without_never(logits)


def _tree_error(runner: DecoderRunner, shape: KVShape, text: tuple[int, ...]) -> float:
    """Score `text` beside another request and with a sibling in its way; returns the largest relative difference."""
    (long_prompt, short_prompt), builder = (text[:3], text[:1]), TreeBuilder()
    builder.add_fixed(ROOT, text[1], "examination")
    node = builder.add_fixed(ROOT, text[3], "examination")
    builder.add_fixed(node, text[4], "examination")
    long, short = _filled(runner, shape, long_prompt, text[:2]), _filled(runner, shape, short_prompt, text[:1])
    scored, beside = runner.logits([tree_rows(long, text[2], builder.build()), chain_rows(short, text[1:3])])
    expected = _plain(runner, long_prompt, text)[2:], _plain(runner, short_prompt, text)[1:3]
    pairs = [*zip(scored[[0, 2, 3]], expected[0], strict=True), *zip(beside, expected[1], strict=True)]
    return max(relative(*(row.float() for row in pair)) for pair in pairs)


def _filled(runner: DecoderRunner, shape: KVShape, prompt: tuple[int, ...], text: tuple[int, ...]) -> DecoderKV:
    kv = DecoderKV(shape)
    kv.cross = runner.encode(prompt)
    runner.fill(chain_rows(kv, text))
    kv.keep(range(len(text)))
    return kv
