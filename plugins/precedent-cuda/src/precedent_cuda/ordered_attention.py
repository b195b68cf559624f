"""Attention that sums keys in the order of their positions, so results do not depend on where a tree begins.

`split_attention` sums committed keys separately from a tree's keys, so a token's sums change when the keys before it
are committed. Here a row's keys are those at positions 0, 1, 2, ... up to its own, whether they are in the committed
prefix or among its ancestors in the tree. They are summed in pieces of `PIECE` positions, which begin at the same
positions for every row, and the pieces are merged from first to last. So a row is bit-identical in a tree, in a prompt
and alone, as long as products of one fixed size are (decision 0015).
"""

from __future__ import annotations

from functools import reduce

import torch
from torch import Tensor

from precedent_cuda.split_attention import (
    Partial,
    StaticRows,
    Variant,
    attend,
    chosen,
    kernels_serve,
    merge,
)

PIECE = 256
"""Positions per piece. A sequence's rows share the pieces of its prefix; every piece is one sum to merge."""


def ordered(query: Tensor, keys: Tensor, values: Tensor, rows: StaticRows, scale: float) -> Tensor:
    """The reference, in torch's own operations. Every row reads its own copy of the keys."""
    (_, heads, num_rows, dim), kv_heads = query.shape, keys.shape[0]
    own = query[0].view(kv_heads, heads // kv_heads, num_rows, dim).transpose(1, 2)

    def piece(first: int) -> Partial:
        places, seen = _piece(rows, first)
        return attend(own, keys[:, places], values[:, places], seen[:, None], scale)

    summed = reduce(merge, map(piece, range(0, rows.longest, PIECE)))
    return summed.output.to(query.dtype).transpose(0, 1).reshape(1, num_rows, heads, -1)


def _piece(rows: StaticRows, first: int) -> tuple[Tensor, Tensor]:
    """Arena rows `[R, PIECE]` of each row's keys from position `first` on, and which of them the row sees.

    Keys that the row does not see point to its sequence's first key, which is valid memory of its own.
    """
    slot = rows.slot_of.clamp(min=0)
    sequence, within = slot // rows.width, slot % rows.width
    length, start = rows.lengths[sequence, None], rows.starts[sequence, None]
    position = torch.arange(first, first + PIECE, device=length.device).expand(len(slot), -1)
    seen = (position < rows.seen[sequence, within, None]) & (rows.slot_of >= 0)[:, None]
    behind = (position - length).clamp(0, rows.width - 1)
    in_tree = length + rows.lineage[sequence, within].gather(1, behind)
    return start + torch.where(seen, torch.where(position < length, position, in_tree), 0), seen


def ordered_by_triton(query: Tensor, keys: Tensor, values: Tensor, rows: StaticRows, scale: float) -> Tensor:
    """Our own kernels (`triton_ordered`), which never read a key that does not exist."""
    from precedent_cuda.triton_ordered import attend_in_order

    return attend_in_order(query, keys, values, rows, scale)


ORDERED: dict[str, Variant] = {"ordered": ordered, "ordered-triton": ordered_by_triton}


def ordered_named(name: str, device: torch.device, dtype: torch.dtype) -> Variant:
    """The variant called `name`; "auto" is Triton on a GPU that supports it. Raises ConfigError for an unknown name."""
    return chosen(name, ORDERED, ordered_by_triton if kernels_serve(device, dtype) else ordered)
