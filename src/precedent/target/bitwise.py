"""Bit-identical logits, whatever else is computed in the same forward: the requirements, and a check at load.

Greedy text in bfloat16 depends on rounding, and rounding depends on the order of sums. That order must not change
whether a row stands alone, in a candidate tree, in a piece of a prompt or beside other requests. There are two ways to
ensure this. On a CPU, the kernels for few rows (`cpu.row_products`, `cpu.norm`, `cpu.row_attention`, `cpu.row_layer`,
`all_layers`) compute every row alike. On a GPU, every forward has the same number of rows, so that libraries choose the
same kernels, and attention sums keys in the order of their positions (`cuda.static_runner`, `cuda.ordered_attention`).
A model that uses nothing else, and never more than `MOST_ROWS` rows at a time, stores and returns the same bits
whatever was drafted, reused or answered beside it.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from precedent.errors import UnsupportedError
from precedent.runtime.failures import OutOfMemory
from precedent.target.cpu.fused_layer import FusedLayer
from precedent.target.cpu.linear import FEW_ROWS, PackedLinear
from precedent.target.cpu.swapped import is_swapped
from precedent.target.cuda.ordered_attention import PIECE
from precedent.target.cuda.static_runner import StaticRunner, StaticSettings
from precedent.target.cuda.static_shape import LEAST_KEYS
from precedent.target.fixed_sizes import Hindrance, use_fixed_sizes
from precedent.target.kv.layer_kinds import (
    FULL_ATTENTION,
    SLIDING_ATTENTION,
    attention_kinds,
    has_indexers,
    is_recurrent,
)
from precedent.tree import EMPTY_TREE, ROOT, TreeBuilder

if TYPE_CHECKING:
    from transformers import PreTrainedModel

    from precedent.target.kv.shape import KVShape
    from precedent.target.model import TargetModel
    from precedent.target.runner import Runner
    from precedent.target.slot import Slot

MOST_ROWS = FEW_ROWS
"""Rows of one forward, prompts included: the most that the kernels for few rows support."""

_TRIED = (3, 1, 4, 1, 5, 9, 2, 6, 5, 3, 5, 8, 9, 7, 9, 3, 2, 3, 8)
"""Token ids of the check, reduced to the vocabulary: a prompt, then the path of a tree."""

_PATH = 3

_WINDOWS = (5, len(_TRIED) - _PATH + 2, 2 * len(_TRIED))
"""Windows of the check, in tokens: those of a model, if wider, are narrowed to these."""

_DECODED = 15
"""Prompt tokens that the check decodes one by one, at most."""


def by_rows(model: PreTrainedModel, *, packed: bool) -> None:
    """Let the kernels for few rows do all the work. Raises UnsupportedError for a model that also needs others."""
    widen(model)
    check_fit(model, packed=packed)


def by_size(runner: Runner, shape: KVShape, settings: StaticSettings) -> StaticRunner:
    """Give all forwards `MOST_ROWS` rows; returns the runner. Raises UnsupportedError, naming the model."""
    try:
        return use_fixed_sizes(runner, shape, settings, MOST_ROWS)
    except Hindrance as hindrance:
        raise _refusal(runner.model, str(hindrance)) from hindrance


def widen(model: PreTrainedModel) -> None:
    """Let the kernels for few rows do all the work up to `MOST_ROWS` rows, even where others would be faster."""
    for module in model.modules():
        if isinstance(module, PackedLinear) and module.few_rows:
            module.few_rows = max(module.few_rows, MOST_ROWS)
        fused: FusedLayer | None = getattr(module, "fused", None)
        if fused is not None:
            layer: Any = module
            layer.fused = fused._replace(few_rows=max(fused.few_rows, MOST_ROWS))


def check_fit(model: PreTrainedModel, *, packed: bool) -> None:
    """Raise UnsupportedError for a model that needs more than the kernels for few rows, and say which part does.

    `packed` says that the model uses our attention; a layer with its own attention cannot be fused.
    """
    config = model.config.get_text_config()
    layers = config.num_hidden_layers
    fused = sum(is_swapped(module) and hasattr(module, "fused") for module in model.modules())
    if is_recurrent(config):
        raise _refusal(model, "the sums of its recurrent layers depend on what is computed beside a row")
    others = sorted(attention_kinds(config) - {FULL_ATTENTION, SLIDING_ATTENTION})
    if has_indexers(config):
        raise _refusal(model, f"it has {', '.join(others)} layers, and what their indexers choose depends on rounding")
    if others:
        raise _refusal(model, f"it has {', '.join(others)} layers, which have no row-wise kernels")
    if not packed:
        raise _refusal(model, f"it does not use our attention ({config._attn_implementation})")
    if fused < layers:
        where = f"on {model.device.type} in {str(model.dtype).removeprefix('torch.')}"
        raise _refusal(model, f"{layers - fused} of its {layers} layers have no row-wise kernels {where}")
    for name, module in model.named_modules():
        if next(module.parameters(recurse=False), None) is not None and not _by_rows(module):
            raise _refusal(model, f"{name} ({type(module).__name__}) has no row-wise kernels")


def prove(target: TargetModel) -> None:
    """Raise UnsupportedError if a tree and plain decoding differ in any bit, at lengths where sums are split anew.

    Those are the lengths at which a piece of keys, and a bucket of keys, overflows. Windows are tried narrowed, to end
    within the prompt, within the tree and not at all: a text as long as a real one would take minutes to read.
    """
    config = target.model.config.get_text_config()
    if SLIDING_ATTENTION not in attention_kinds(config):
        _prove_lengths(target)
        return
    window = config.sliding_window
    try:
        for narrowed in sorted({min(window, tried) for tried in _WINDOWS}):
            config.sliding_window = narrowed
            _prove_lengths(target)
    finally:
        config.sliding_window = window


def _prove_lengths(target: TargetModel) -> None:
    tokens = [token % target.vocab_size for token in _TRIED]
    lengths = [len(tokens), *((PIECE + 1, LEAST_KEYS + 1) if target.static else ())]
    for length in lengths:
        if length + _PATH < target.context_length:
            try:
                _prove(target, [*(tokens * length)[: length - len(tokens)], *tokens])
            except OutOfMemory as error:
                raise _refusal(target.model, f"its arena has no room to test three texts of {length} tokens") from error


def _prove(target: TargetModel, tokens: list[int]) -> None:
    """Score a tree beside another request and decode its path plainly, with prompts computed in three ways."""
    prompt, path = tokens[:-_PATH], tokens[-_PATH:]
    whole, pieces, decoded = (target.new_slot() for _ in range(3))
    read = max(1, len(prompt) - _DECODED)
    target.prefill(whole, prompt)
    target.prefill(pieces, prompt[:5])
    target.prefill(pieces, prompt)
    target.prefill(decoded, prompt[:read])
    _decode(target, decoded, prompt[read:])
    builder, node = TreeBuilder(), ROOT
    for token in path:
        builder.add_fixed(node, (token + 1) % target.vocab_size, "proof")
        node = builder.add_fixed(node, token, "proof")
    tree = builder.build()
    scored, plain = target.score([(whole, tree), (pieces, tree)]), _decode(target, decoded, path)
    if not all(torch.equal(rows[::2], plain) for rows in scored):
        raise _refusal(target.model, "a scored tree and plain decoding round differently on this machine")


def _decode(target: TargetModel, slot: Slot, path: list[int]) -> Tensor:
    """Logits of plain decoding along `path`, `[1 + len(path), vocab_size]`; its last token is pending afterwards."""
    rows = []
    for token in path:
        rows.append(target.plain_step(slot))
        target.commit(slot, EMPTY_TREE, (), token)
    rows.append(target.plain_step(slot))
    target.discard(slot)
    return torch.cat(rows)


def _by_rows(module: nn.Module) -> bool:
    """Whether a module with weights of its own computes row by row, or only looks rows up."""
    if isinstance(module, PackedLinear):
        return module.few_rows >= MOST_ROWS
    return isinstance(module, nn.Embedding) or is_swapped(module)


def _refusal(model: PreTrainedModel, reason: str) -> UnsupportedError:
    return UnsupportedError(
        f"bitwise=True is not available for this {model.config.model_type}: {reason}. It supports Llama-like layers "
        "(Llama, Mistral, Qwen 2 and 3, SmolLM), on a CPU in bfloat16 or float32, or on a GPU, and those of Gemma, "
        "Gemma 2 and Gemma 3 on a CPU; without it, float32 leaves only rounding differences far below any probability "
        "that matters"
    )
