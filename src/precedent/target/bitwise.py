"""Bit-identical logits, whatever else is computed in the same forward: who provides them, and a test at load.

Greedy text in bfloat16 depends on rounding, and rounding depends on the order of sums. That order must not change
whether a row stands alone, in a candidate tree, in a piece of a prompt or beside other requests. torch does not promise
that; packages of the group `precedent.models` do. On a CPU, their kernels for few rows compute every row alike. On a
GPU, every forward has the same number of rows, so that libraries choose the same kernels, and attention sums keys in
the order of their positions. A model that uses nothing else, and never more than `MOST_ROWS` rows at a time, stores and
returns the same bits whatever was drafted, reused or answered beside it.
"""

from __future__ import annotations

from collections.abc import Collection
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from precedent.errors import UnsupportedError
from precedent.runtime.failures import OutOfMemory
from precedent.target import support
from precedent.target.kv.layer_kinds import SLIDING_ATTENTION, attention_kinds
from precedent.target.support import TargetOptions, missing
from precedent.tree import EMPTY_TREE, ROOT, TreeBuilder

if TYPE_CHECKING:
    from transformers import PreTrainedModel

    from precedent.target.contract import Slot
    from precedent.target.kv.shape import KVShape
    from precedent.target.model import TargetModel
    from precedent.target.runner import Runner

MOST_ROWS = 64
"""Rows of one forward, prompts included."""

_TRIED = (3, 1, 4, 1, 5, 9, 2, 6, 5, 3, 5, 8, 9, 7, 9, 3, 2, 3, 8)
"""Token ids of the check, reduced to the vocabulary: a prompt, then the path of a tree."""

_PATH = 3

_WINDOWS = (5, len(_TRIED) - _PATH + 2, 2 * len(_TRIED))
"""Windows of the check, in tokens: those of a model, if wider, are narrowed to these."""

_DECODED = 15
"""Prompt tokens that the check decodes one by one, at most."""


def settle(runner: Runner, kv_shape: KVShape, options: TargetOptions) -> Collection[int]:
    """Let the package for the model's device round all rows alike; returns the lengths of text at which to test it.

    Raises UnsupportedError for a model that needs other kernels, ConfigError if there is no package for the device.
    """
    if runner.layer_state.why_irregular is not None:
        raise refusal(runner.model, runner.layer_state.why_irregular)
    for package in support.installed():
        lengths = package.bitwise(runner, kv_shape, options)
        if lengths is not None:
            return lengths
    device = runner.device.type
    if device not in ("cpu", "cuda"):
        raise refusal(runner.model, f"it is on {device}, for which there are no row-wise kernels")
    raise missing("bitwise on cuda" if device == "cuda" else "bitwise", "bitwise=True")


def prove(target: TargetModel, lengths: Collection[int]) -> None:
    """Raise UnsupportedError if a tree and plain decoding differ in any bit, in a short text and in these lengths.

    Windows are tried narrowed, to end within the prompt, within the tree and not at all: a text as long as a real one
    would take minutes to read.
    """
    config = target.model.config.get_text_config()
    if SLIDING_ATTENTION not in attention_kinds(config):
        _prove_lengths(target, lengths)
        return
    window = config.sliding_window
    try:
        for narrowed in sorted({min(window, tried) for tried in _WINDOWS}):
            config.sliding_window = narrowed
            _prove_lengths(target, lengths)
    finally:
        config.sliding_window = window


def _prove_lengths(target: TargetModel, lengths: Collection[int]) -> None:
    tokens = [token % target.vocab_size for token in _TRIED]
    for length in (len(tokens), *lengths):
        if length + _PATH < target.context_length:
            try:
                _prove(target, [*(tokens * length)[: length - len(tokens)], *tokens])
            except OutOfMemory as error:
                raise refusal(target.model, f"its arena has no room to test three texts of {length} tokens") from error


def _prove(target: TargetModel, tokens: list[int]) -> None:
    """Score a tree beside another request and decode its path plainly, with prompts computed in three ways."""
    prompt, path = tokens[:-_PATH], tokens[-_PATH:]
    whole, pieces, decoded = (target.new_slot() for _ in range(3))
    read = max(1, len(prompt) - _DECODED)
    target.prefill(whole, prompt)
    target.prefill(pieces, prompt[:5])
    target.prefill(pieces, prompt)
    target.prefill(decoded, prompt[:read])
    decode_plainly(target, decoded, prompt[read:])
    builder, node = TreeBuilder(), ROOT
    for token in path:
        builder.add_fixed(node, (token + 1) % target.vocab_size, "proof")
        node = builder.add_fixed(node, token, "proof")
    tree = builder.build()
    scored, plain = target.score([(whole, tree), (pieces, tree)]), decode_plainly(target, decoded, path)
    if not all(torch.equal(rows[::2], plain) for rows in scored):
        raise refusal(target.model, "a scored tree and plain decoding round differently on this machine")


def decode_plainly(target: TargetModel, slot: Slot, path: list[int]) -> Tensor:
    """Logits of plain decoding along `path`, `[1 + len(path), vocab_size]`; its last token is pending afterwards."""
    rows = []
    for token in path:
        rows.append(target.plain_step(slot))
        target.commit(slot, EMPTY_TREE, (), token)
    rows.append(target.plain_step(slot))
    target.discard(slot)
    return torch.cat(rows)


def refusal(model: PreTrainedModel, reason: str) -> UnsupportedError:
    """The error for a model that does not round alike."""
    return UnsupportedError(
        f"bitwise=True is not available for this {model.config.model_type}: {reason}. It supports Llama-like layers "
        "(Llama, Mistral, Qwen 2 and 3, SmolLM), on a CPU in bfloat16, float32 or quantised, or on a GPU, and those of "
        "Gemma, Gemma 2 and Gemma 3 on a CPU; without it, float32 leaves only rounding differences far below any "
        "probability that matters"
    )
