"""Attention of several sequences' rows over one KV arena, with sequence lengths in device memory only.

A row's keys are those at positions 0, 1, 2, ... up to its own, whether they are in the committed prefix or among its
ancestors in the tree. They are summed in pieces of `PIECE` positions, which begin at the same positions for every row,
and the pieces are merged from first to last by log-sum-exp:

    lse = log(sum_i exp(lse_i)),  output = sum_i exp(lse_i - lse) * output_i

(the online softmax of FlashAttention, Dao et al. 2205.14135; over pieces of the keys as in Flash-Decoding). So results
do not depend on where a tree begins: a row is bit-identical in a tree, in a prompt and alone, as long as products of
one fixed size are (decision 0015).

Shapes: `sequences` (S) of at most `width` (W) rows each are packed into `rows` (R). Their KV rows are in the arena from
`starts` on: `lengths` committed ones, then those of this forward.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property, reduce
from importlib.util import find_spec
from typing import NamedTuple

import torch
from torch import Tensor

PIECE = 256
"""Positions per piece. A sequence's rows share the pieces of its prefix; every piece is one sum to merge."""


@dataclass(frozen=True)
class StaticRows:
    """Where the rows of a forward and their keys are, all in device tensors; only the sizes are Python integers.

    `slot_of` `[R]` is a row's index in `[S * W]`, -1 for a padding row; `first_rows`, `counts`, `starts`, `lengths` are
    `[S]`; `ancestors` `[S, W, W]` is true where the column is the row's ancestor or the row itself. No sequence has
    more than `longest` keys, its new rows included.
    """

    slot_of: Tensor
    first_rows: Tensor
    counts: Tensor
    starts: Tensor
    lengths: Tensor
    ancestors: Tensor
    longest: int

    @property
    def sequences(self) -> int:
        """The number of sequences that there is room for."""
        return self.ancestors.shape[0]

    @property
    def width(self) -> int:
        """The number of rows per sequence that there is room for."""
        return self.ancestors.shape[1]

    @cached_property
    def seen(self) -> Tensor:
        """How many keys a row sees, `[S, W]`: the prefix, its ancestors in the tree and itself."""
        return self.lengths[:, None] + self.ancestors.sum(-1)

    @cached_property
    def lineage(self) -> Tensor:
        """Each row's ancestors from the root on, then the row itself, then all other rows, `[S, W, W]`."""
        return self.ancestors.logical_not().to(torch.uint8).sort(dim=-1, stable=True).indices


def attend(query: Tensor, keys: Tensor, values: Tensor, rows: StaticRows, scale: float) -> Tensor:
    """Attention of `query [1, heads, R, dim]` over a layer's `keys [kv_heads, arena, dim]`, as `[1, R, heads, dim]`.

    Padding rows give finite results whatever the arena holds. On a GPU it runs as Triton kernels, in float64 and
    without Triton in torch's own operations.
    """
    if query.device.type == "cuda" and query.dtype != torch.float64 and find_spec("triton") is not None:
        from precedent_cuda.triton_kernels import attend_in_order

        return attend_in_order(query, keys, values, rows, scale)
    return ordered(query, keys, values, rows, scale)


class Partial(NamedTuple):
    """Attention over some of the keys: `output` `[..., rows, dim]` and the log of its summed weights `[..., rows]`.

    At least float32. Over no keys at all, the output is 0 and the log is -inf.
    """

    output: Tensor
    lse: Tensor


def ordered(query: Tensor, keys: Tensor, values: Tensor, rows: StaticRows, scale: float) -> Tensor:
    """The reference, in torch's own operations. Every row reads its own copy of the keys."""
    (_, heads, num_rows, dim), kv_heads = query.shape, keys.shape[0]
    own = query[0].view(kv_heads, heads // kv_heads, num_rows, dim).transpose(1, 2)

    def piece(first: int) -> Partial:
        places, seen = _piece(rows, first)
        return partial_over(own, keys[:, places], values[:, places], seen[:, None], scale)

    summed = reduce(merge, map(piece, range(0, rows.longest, PIECE)))
    return summed.output.to(query.dtype).transpose(0, 1).reshape(1, num_rows, heads, -1)


def partial_over(query: Tensor, keys: Tensor, values: Tensor, visible: Tensor, scale: float) -> Partial:
    """Attention over the keys that are `visible`; `[..., rows, dim]` over `[..., keys, dim]`."""
    precision = torch.promote_types(query.dtype, torch.float32)
    scores = (query.to(precision) @ keys.to(precision).transpose(2, 3)) * scale
    scores = scores.masked_fill(~visible, float("-inf"))
    lse = scores.logsumexp(-1)
    weights = (scores - _finite(lse)[..., None]).exp()
    return Partial(weights @ values.to(precision), lse)


def merge(first: Partial, second: Partial) -> Partial:
    """Attention over the keys of both parts."""
    lse = torch.logaddexp(first.lse, second.lse)
    shares = ((part.lse - _finite(lse)).exp()[..., None] * part.output for part in (first, second))
    return Partial(sum(shares, torch.zeros_like(first.output)), lse)


def _finite(lse: Tensor) -> Tensor:
    """The same with 0 for -inf, which means no keys: a difference to it must not be NaN."""
    return lse.masked_fill(lse == float("-inf"), 0.0)


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
