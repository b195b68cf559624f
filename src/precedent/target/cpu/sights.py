"""Translates a forward's masks into what the CPU kernels for few rows need."""

from __future__ import annotations

import torch

from precedent.target.cpu.row_attention import Sight
from precedent.target.cpu.row_layer import LayerShape, Part, RowLayers
from precedent.target.kv.visibility import RowMasks, within


def sight_of(masks: RowMasks, index: int) -> Sight | None:
    """Which of each other sequence `index`'s rows see; None unless all of them also see the whole prefix."""
    return masks.once(("sight", index), lambda: _sight(masks, index))


def _sight(masks: RowMasks, index: int) -> Sight | None:
    (first, allowed, causal), rows = masks.visible(index), masks.forward.sequences[index]
    count = len(rows)
    if causal:
        allowed = within(rows, masks.device)
    fits = count == 1 if allowed is None else tuple(allowed.shape) == (count, count)
    own = None if allowed is None else allowed.numpy()
    return Sight(own, count) if first == 0 and fits else None


def row_layers_of(masks: RowMasks, shape: LayerShape, dtype: torch.dtype) -> RowLayers | None:
    """The rows of all sequences, ready for layers of this shape; None unless every sequence has a sight."""
    return masks.once((shape, dtype), lambda: _row_layers(masks, shape, dtype))


def _row_layers(masks: RowMasks, shape: LayerShape, dtype: torch.dtype) -> RowLayers | None:
    parts = []
    for index, rows in enumerate(masks.forward.sequences):
        sight = sight_of(masks, index)
        if sight is None:
            return None
        parts.append(Part(len(rows), rows.kv.length, sight))
    return RowLayers(shape, dtype, parts)
