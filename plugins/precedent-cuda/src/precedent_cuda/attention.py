"""Attention of several sequences' rows over one KV arena, with sequence lengths in device memory only.

Two kinds are here in torch's own operations; `triton_kernels` has both as Triton kernels.

`split` computes attention over the long committed prefix and over the small tree behind it separately and merges them
by log-sum-exp:

    lse = log(sum_i exp(lse_i)),  output = sum_i exp(lse_i - lse) * output_i

(the online softmax of FlashAttention, Dao et al. 2205.14135; over pieces of the keys as in Flash-Decoding; over shared
prefix and own suffix as in Hydragen, Juravsky et al. 2402.05099, and cascade inference, Ye et al. 2024). The query
heads of a group become further query rows, so that keys and values are neither repeated nor read once per head.

`ordered` sums keys in the order of their positions, so results do not depend on where a tree begins (decision 0015). A
row's keys are those at positions 0, 1, 2, ... up to its own, whether they are in the committed prefix or among its
ancestors in the tree. They are summed in pieces of `PIECE` positions, which begin at the same positions for every row,
and the pieces are merged from first to last. So a row is bit-identical in a tree, in a prompt and alone, as long as
products of one fixed size are.

Shapes: `sequences` (S) of at most `width` (W) rows each are packed into `rows` (R). Their KV rows are in the arena from
`starts` on: `lengths` committed ones, then those of this forward. A variant is called as `(query [1, heads, R, dim],
keys [kv_heads, arena, dim], values, StaticRows, scale)` and returns `[1, R, heads, value_dim]`. Padding rows give
finite results whatever the arena holds.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cached_property, reduce
from importlib.util import find_spec
from typing import NamedTuple

import torch
from torch import Tensor

from precedent.errors import ConfigError


@dataclass(frozen=True)
class StaticRows:
    """Where the rows of a forward and their keys are, all in device tensors; only the sizes are Python integers.

    `row_of` `[S, W]` is a row's index in the packed input (any index for padding); `slot_of` `[R]` its index in
    `[S * W]`, -1 for a padding row; `first_rows`, `counts`, `starts`, `lengths` are `[S]`; `ancestors` `[S, W, W]` is
    true where the column is the row's ancestor or the row itself. No sequence has more than `longest` keys, its new
    rows included.
    """

    row_of: Tensor
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
        return self.row_of.shape[0]

    @property
    def width(self) -> int:
        """The number of rows per sequence that there is room for."""
        return self.row_of.shape[1]

    @cached_property
    def prefix_places(self) -> Tensor:
        """Arena rows of each sequence's keys, `[S, longest]`; padded with its first key."""
        return self._places(torch.arange(self.longest, device=self.starts.device).expand(self.sequences, -1))

    @cached_property
    def tree_places(self) -> Tensor:
        """Arena rows of each sequence's new keys, `[S, W]`; padded with its first key."""
        new = torch.arange(self.width, device=self.starts.device).expand(self.sequences, -1)
        return self._places(self.lengths[:, None] + new)

    @cached_property
    def in_prefix(self) -> Tensor:
        """Which of `prefix_places` are committed, `[S, 1, 1, longest]`."""
        places = torch.arange(self.longest, device=self.lengths.device)
        return (places < self.lengths[:, None])[:, None, None]

    @cached_property
    def seen(self) -> Tensor:
        """How many keys a row sees, `[S, W]`: the prefix, its ancestors in the tree and itself."""
        return self.lengths[:, None] + self.ancestors.sum(-1)

    @cached_property
    def lineage(self) -> Tensor:
        """Each row's ancestors from the root on, then the row itself, then all other rows, `[S, W, W]`."""
        return self.ancestors.logical_not().to(torch.uint8).sort(dim=-1, stable=True).indices

    def _places(self, keys: Tensor) -> Tensor:
        """Arena rows of keys; missing keys point to the first one, so nothing reads another sequence's leftovers."""
        there = keys < (self.lengths + self.counts)[:, None]
        return self.starts[:, None] + torch.where(there, keys, 0)


Variant = Callable[[Tensor, Tensor, Tensor, StaticRows, float], Tensor]


class Partial(NamedTuple):
    """Attention over some of the keys: `output` `[..., rows, dim]` and the log of its summed weights `[..., rows]`.

    At least float32. Over no keys at all, the output is 0 and the log is -inf.
    """

    output: Tensor
    lse: Tensor


def attend(query: Tensor, keys: Tensor, values: Tensor, visible: Tensor, scale: float) -> Partial:
    """Attention over the keys that are `visible`; `[S, kv_heads, rows, dim]` over `[S, kv_heads, keys, dim]`."""
    precision = torch.promote_types(query.dtype, torch.float32)
    scores = (query.to(precision) @ keys.to(precision).transpose(2, 3)) * scale
    scores = scores.masked_fill(~visible, float("-inf"))
    lse = scores.logsumexp(-1)
    weights = (scores - finite(lse)[..., None]).exp()
    return Partial(weights @ values.to(precision), lse)


def merge(first: Partial, second: Partial) -> Partial:
    """Attention over the keys of both parts."""
    lse = torch.logaddexp(first.lse, second.lse)
    shares = ((part.lse - finite(lse)).exp()[..., None] * part.output for part in (first, second))
    return Partial(sum(shares, torch.zeros_like(first.output)), lse)


def finite(lse: Tensor) -> Tensor:
    """The same with 0 for -inf, which means no keys: a difference to it must not be NaN."""
    return lse.masked_fill(lse == float("-inf"), 0.0)


def split(query: Tensor, keys: Tensor, values: Tensor, rows: StaticRows, scale: float) -> Tensor:
    """The reference: prefix and tree separately, in torch's own operations, in any precision and on any device."""
    folded = by_sequence(query, rows, keys.shape[0])
    prefix = attend(folded, *_at(rows.prefix_places, keys, values), rows.in_prefix, scale)
    merged = merge(prefix, _tree(folded, keys, values, rows, scale))
    return packed(merged.output.to(query.dtype), rows)


def by_triton(query: Tensor, keys: Tensor, values: Tensor, rows: StaticRows, scale: float) -> Tensor:
    """Our own kernels (`triton_kernels`), which never read a key that does not exist."""
    from precedent_cuda.triton_kernels import attend_by_kernel

    return attend_by_kernel(query, keys, values, rows, scale)


VARIANTS: dict[str, Variant] = {"split": split, "triton": by_triton}


def variant_named(name: str, variants: Mapping[str, Variant], device: torch.device, dtype: torch.dtype) -> Variant:
    """The one of `VARIANTS` or `ORDERED` called `name`; "auto" is Triton on a GPU that supports it (decision 0018).

    Raises ConfigError for an unknown name.
    """
    in_torch, by_kernels = variants
    if name == "auto":
        name = by_kernels if kernels_serve(device, dtype) else in_torch
    if name not in variants:
        raise ConfigError(f"there is no attention called {name!r}; choose auto, {', '.join(variants)}")
    return variants[name]


def kernels_serve(device: torch.device, dtype: torch.dtype) -> bool:
    """Whether Triton is installed for this device and our kernels support this dtype."""
    return device.type == "cuda" and dtype != torch.float64 and find_spec("triton") is not None


def by_sequence(query: Tensor, rows: StaticRows, kv_heads: int) -> Tensor:
    """Packed queries `[1, heads, R, dim]` as `[S, kv_heads, group * W, dim]`."""
    heads, dim = query.shape[1], query.shape[3]
    picked = query[0].index_select(1, rows.row_of.flatten())
    grouped = picked.view(kv_heads, heads // kv_heads, rows.sequences, rows.width, dim)
    return grouped.permute(2, 0, 1, 3, 4).reshape(rows.sequences, kv_heads, -1, dim)


def packed(output: Tensor, rows: StaticRows) -> Tensor:
    """The reverse of `by_sequence`: `[S, kv_heads, group * W, dim]` as `[1, R, heads, dim]`."""
    sequences, kv_heads, _, dim = output.shape
    by_row = output.view(sequences, kv_heads, -1, rows.width, dim).permute(0, 3, 1, 2, 4)
    return by_row.reshape(sequences * rows.width, -1, dim).index_select(0, rows.slot_of.clamp(min=0))[None]


def _tree(folded: Tensor, keys: Tensor, values: Tensor, rows: StaticRows, scale: float) -> Partial:
    visible = rows.ancestors.repeat(1, folded.shape[2] // rows.width, 1)[:, None]
    return attend(folded, *_at(rows.tree_places, keys, values), visible, scale)


def _at(places: Tensor, keys: Tensor, values: Tensor) -> tuple[Tensor, Tensor]:
    """Arena rows at `places` `[S, keys]` of `[kv_heads, arena, dim]`, as `[S, kv_heads, keys, dim]`."""
    return _picked(places, keys), _picked(places, values)


def _picked(places: Tensor, buffer: Tensor) -> Tensor:
    kv_heads, _, dim = buffer.shape
    return buffer.index_select(1, places.flatten()).view(kv_heads, *places.shape, dim).transpose(0, 1)


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
    """Our own kernels (`triton_kernels`), which never read a key that does not exist."""
    from precedent_cuda.triton_kernels import attend_in_order

    return attend_in_order(query, keys, values, rows, scale)


ORDERED: dict[str, Variant] = {"ordered": ordered, "ordered-triton": ordered_by_triton}
