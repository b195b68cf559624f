"""A forward on a CPU that runs every decoder layer in one call, for few rows.

transformers calls a model's layers one by one, and a small model waits for Python between them. This module bypasses
that loop: it computes the embeddings, hands all layers to `row_layer` at once, and applies the final norm and head.
It applies to models whose layers are all fused (`fused_layer`) and whose forward does nothing else. A test at load
requires bit-identical logits. Later changes (hooks, replaced modules, training) go through the model's own forward.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from typing import Any
from weakref import WeakKeyDictionary

import numpy as np
import torch
from torch import Tensor
from transformers import PreTrainedModel

from precedent.runtime.compiled import Int64s
from precedent.runtime.patched_modules import is_swapped
from precedent.target.examine import score_text
from precedent.target.hidden_states import watching
from precedent.target.kv.cache import KVBlock, KVCache
from precedent.target.kv.layer_kinds import FULL_ATTENTION, MISFITS, attention_kinds
from precedent.target.kv.rows import ForwardPass, Rows
from precedent.target.kv.shape import KVShape
from precedent.target.runner import Runner
from precedent.target.support import Backend
from precedent_cpu.fused_layer import FusedLayer, Watched
from precedent_cpu.row_attention import Sight
from precedent_cpu.row_layer import Part, RowLayers

_ALONE = Sight(None, 1)

log = logging.getLogger(__name__)


def all_layers(runner: Runner, kv_shape: KVShape) -> RowForward | None:
    """What computes few rows with all layers in one call; None unless that gives bit-identical logits."""
    try:
        found = _found(runner, kv_shape)
        if found is not None and found.untouched() and _agrees(runner, found, kv_shape):
            return found
    except torch.OutOfMemoryError:
        raise
    except MISFITS as misfit:
        log.debug("%s runs layer by layer: %r", type(runner.model).__name__, misfit)
    return None


class RowForward(Backend):
    """A model whose layers run together. Made by `all_layers`."""

    def __init__(self, model: PreTrainedModel, layers: Sequence[FusedLayer]) -> None:
        base: Any = model.base_model
        self._model, self._embed, self._rotary, self._norm = model, base.embed_tokens, base.rotary_emb, base.norm
        self._head: Any = model.get_output_embeddings()
        self._layers, self._shape = tuple(layers), layers[0].shape
        self._dtype = layers[0].dtype
        self._few_rows = min(one.few_rows for one in layers)
        self._jobs: Int64s = np.concatenate([layer.job[None] for layer in layers])
        holders = (model, base, base.get_submodule("layers"))
        self._watched = Watched(holders, (*holders, *holders[-1].children()), [one.watched for one in layers])
        self._kinds = tuple((layer, type(layer)) for layer in base.layers)

    def logits(self, forward: ForwardPass) -> Tensor | None:
        """Logits `[rows, vocab_size]`; None for rows that it does not support."""
        hidden = self._hidden(forward)
        if hidden is None:
            return None
        logits: Tensor = self._head(self._norm(hidden))[0]
        return logits

    def fill(self, forward: ForwardPass) -> bool:
        """Compute keys and values only; False for rows that it does not support."""
        return self._hidden(forward) is not None

    def untouched(self) -> bool:
        """Whether the model and its layers are unchanged."""
        return all(type(layer) is kind for layer, kind in self._kinds) and self._watched.untouched()

    def _hidden(self, forward: ForwardPass) -> Tensor | None:
        """Output of the last layer, `[1, rows, hidden]`; None for rows that it does not support."""
        if forward.spans[-1][1] > self._few_rows or torch.is_grad_enabled() or self._model.training:
            return None
        if not self.untouched():
            return None
        inputs = forward.inputs(torch.device("cpu"))
        hidden: Tensor = self._embed(inputs["input_ids"]).clone(memory_format=torch.contiguous_format)
        turns: tuple[Tensor, Tensor] = self._rotary(hidden, position_ids=inputs["position_ids"])
        if not self._layers[0].takes(hidden, turns):
            return None
        parts = [Part(len(rows), rows.kv.length, _sight(rows)) for rows in forward.sequences]
        places = np.stack([_places(rows.kv)[: len(self._jobs)] for rows in forward.sequences], axis=1)
        rows, first, seen = self._row_layers(parts), 0, watching()
        for number in (*(() if seen is None else sorted(seen.numbers)), len(self._jobs)):
            if number > first:  # the layers run together up to the next one whose output a drafter reads
                rows.layers(self._jobs[first:number], hidden, turns, places[first:number])
            if seen is not None:
                seen.see(number, hidden)
            first = number
        return hidden

    def _row_layers(self, parts: Sequence[Part]) -> RowLayers:
        return RowLayers(self._shape, self._dtype, parts, quantised=self._layers[0].quantised)


_PLACES: WeakKeyDictionary[KVBlock, tuple[tuple[int, ...], Int64s]] = WeakKeyDictionary()


def _places(kv: KVCache) -> Int64s:
    """Where each layer's keys, then its values, are: address and strides in bytes of heads and rows, `[layers, 6]`."""
    for block in kv.blocks:
        buffers = block.keys.data_ptr(), block.values.data_ptr(), block.capacity
        if block not in _PLACES or _PLACES[block][0] != buffers:
            numbers, sides = np.arange(block.num_layers, dtype=np.int64)[:, None], []
            for stored in (block.keys, block.values):
                by_layer, *others = (step * stored.element_size() for step in stored.stride()[:3])
                places = [stored.data_ptr() + numbers * by_layer, np.tile(others, (block.num_layers, 1))]
                sides.append(np.hstack(places))
            _PLACES[block] = buffers, np.hstack(sides)
    return np.concatenate([_PLACES[block][1] for block in kv.blocks])


def _sight(rows: Rows) -> Sight:
    if len(rows) == 1:
        return _ALONE
    return Sight(np.tri(len(rows), dtype=np.bool_) if rows.ancestors is None else rows.ancestors, len(rows))


def _found(runner: Runner, kv_shape: KVShape) -> RowForward | None:
    """The combined forward; None unless every layer is fused, all have one shape, and each sees the whole prefix."""
    model: Any = runner.model
    layers: list[Any] = list(model.base_model.layers)
    right = (
        runner.packed
        and attention_kinds(model.config.get_text_config()) == {FULL_ATTENTION}
        and all(is_swapped(one) and hasattr(one, "fused") for one in layers)
        and len({layer.fused.shape for layer in layers}) == 1
        and len({(layer.fused.dtype, layer.fused.quantised) for layer in layers}) == 1
        and [layer.fused.layer_idx for layer in layers] == list(range(len(kv_shape.layers)))
        and all(layer is not None for layer in kv_shape.layers)
    )
    return RowForward(model, [layer.fused for layer in layers]) if right else None


@torch.inference_mode()
def _agrees(runner: Runner, found: RowForward, kv_shape: KVShape) -> bool:
    """Whether a tree beside a second sequence gives bit-identical logits both ways."""
    results = []
    for backends in ((), (found,)):
        with runner.using(*backends):
            results.append(torch.stack([row for _, row in score_text(runner, lambda: KVCache(kv_shape))]))
    return torch.equal(*results)
