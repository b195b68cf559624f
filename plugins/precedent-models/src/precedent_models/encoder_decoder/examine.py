"""Examines an encoder-decoder model at load: what its layers store, and whether a scored tree equals plain forwards."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor
from transformers import PreTrainedModel

from precedent.target.examine import attempt, check_error, relative
from precedent.target.kv.rows import chain_rows, tree_rows
from precedent.target.kv.shape import KVShape, ShapeObserver
from precedent.tree import ROOT, TreeBuilder
from precedent_models.encoder_decoder.kv import DecoderKV, bytes_per_prompt_token, on_device
from precedent_models.encoder_decoder.runner import DecoderRunner
from precedent_models.encoder_decoder.settings import AnswerSettings


class Examined(NamedTuple):
    """What the rest of the library needs to know; `prompt_token_bytes` are kept of each token of a prompt."""

    runner: DecoderRunner
    kv_shape: KVShape
    vocab_size: int
    prompt_token_bytes: int


@torch.inference_mode()
def examine(model: PreTrainedModel, settings: AnswerSettings) -> Examined:
    """Observe a model. Raises UnsupportedError, naming it, when a candidate tree cannot be scored."""
    start = settings.start[0]
    runner = attempt(model, lambda: DecoderRunner(model, start, settings.never))
    return attempt(model, lambda: _examined(runner, start))


def _examined(runner: DecoderRunner, start: int) -> Examined:
    text = _text(runner.model.config, start)
    cross, shape = runner.encode(text[:3]), _observed(runner, text)
    check_error(runner, _tree_error(runner, shape, text))
    return Examined(runner, shape, _plain(runner, text[:3], text).shape[-1], bytes_per_prompt_token(cross))


def _text(config: Any, start: int) -> tuple[int, ...]:
    """The decoder's first token and four others: neither padding, which some models skip, nor all the same."""
    padding = {getattr(each, "pad_token_id", None) for each in (config, config.get_text_config(decoder=True))}
    one, other = [token for token in range(5) if token not in padding | {start}][:2]
    return start, other, one, one, other


def _observed(runner: DecoderRunner, text: tuple[int, ...]) -> KVShape:
    """What the decoder's layers store of their own tokens."""
    observer = ShapeObserver(runner.num_layers)
    runner.observe(text, observer)
    return observer.shape


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
