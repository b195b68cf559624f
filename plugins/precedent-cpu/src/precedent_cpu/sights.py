"""Translates a forward's masks into what the CPU kernels for few rows need."""

from __future__ import annotations

import numpy as np
import torch

from precedent.target.kv.visibility import RowMasks, within
from precedent_cpu.kernel_code import LANES
from precedent_cpu.row_attention import Sight
from precedent_cpu.row_layer import LayerShape, Part, RowLayers


def sight_of(masks: RowMasks, index: int) -> Sight | None:
    """What sequence `index`'s rows see; None unless each sees its path from some key on, as within a window."""
    return masks.once(("sight", index), lambda: _sight(masks, index))


def _sight(masks: RowMasks, index: int) -> Sight | None:
    (first, allowed, causal), rows = masks.visible(index), masks.forward.sequences[index]
    count, length = len(rows), rows.kv.length
    own = within(rows, masks.device).numpy()
    if allowed is None:
        return Sight(own, count) if causal or count == 1 else None
    seen = allowed.numpy()
    before = seen.shape[1] - count
    if len(seen) != count:
        return None
    if length and first == before == 0:  # nothing is hidden in the prefix
        return Sight(seen, count)
    path = np.concatenate([np.ones((count, before), dtype=np.bool_), own], axis=1)
    hidden = (path & ~np.logical_or.accumulate(seen, axis=1)).sum(axis=1)
    if not np.array_equal(hidden + seen.sum(axis=1), path.sum(axis=1)):
        return None
    skipped = first // LANES * LANES
    return Sight(own, count, skipped, (hidden + first - skipped).astype(np.int64))


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
