"""A sealed batch of completions as plain arrays, ready to be searched: what drafting reads instead of the rows."""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from precedent.cache.store.arrays import Ids, Mask

COMPLETION = np.dtype([("id", "<i8"), ("checksum", "<u8"), ("begin", "<i4")])
"""A completion in a segment: its id, the checksum of its row, and where its tokens begin."""

TOKEN = np.dtype("<i4")

BYTES_PER_TOKEN = 8
"""Of a segment's arrays: the token and its place in the order; each completion adds a mark and a `COMPLETION`."""

PIECE = 1 << 16
"""Positions that are summed at once: few enough to stay in the processor's cache."""

_WRAP = 1 << 64

Int32s = NDArray[np.int32]


class Segment(NamedTuple):
    """Completions one behind the other, and the positions in their tokens in a sorted order.

    `tokens` holds a mark below zero before each completion's tokens; `order` holds every position but the last of each
    completion. How the order is sorted is the affair of whoever searches it.
    """

    completions: NDArray[np.void]
    tokens: Int32s
    order: Int32s

    @property
    def ids(self) -> Ids:
        """The completions' ids, `[n]`."""
        return np.asarray(self.completions["id"])

    @property
    def lengths(self) -> NDArray[np.int64]:
        """How many tokens each completion takes with its mark, `[n]`."""
        return np.diff(self.completions["begin"], append=self.tokens.size)

    @property
    def owners(self) -> Int32s:
        """For each token the number of its completion."""
        return np.repeat(np.arange(self.completions.size, dtype=np.int32), self.lengths)


def kept(segment: Segment, stays: Mask) -> Segment:
    """The segment without the completions for which `stays` is false; the order stays sorted."""
    owners = segment.owners
    completions, lengths = segment.completions[stays].copy(), segment.lengths
    shift = np.cumsum(np.where(stays, 0, lengths)).astype(np.int32)
    completions["begin"] -= shift[stays]
    order = segment.order[stays[owners[segment.order]]]
    return Segment(completions, segment.tokens[stays[owners]], order - shift[owners[order]])


def is_sound(segment: Segment) -> bool:
    """Whether nobody who follows the arrays can leave them: compiled code checks no index."""
    begins, size, order = segment.completions["begin"], segment.tokens.size, segment.order
    if not begins.size:
        return size == 0 and segment.order.size == 0
    if begins[0] != 0 or (segment.lengths <= 0).any() or order.size != size - begins.size:
        return False
    if not (segment.tokens[begins] < 0).all() or np.count_nonzero(segment.tokens < 0) != begins.size:
        return False
    if order.size and not 0 <= order.min() <= order.max() < size:
        return False
    last = np.append(begins[1:], size) - 1
    of_all, of_ends = (size * (size - 1) // 2, (size - 1) * size * (2 * size - 1) // 6), power_sums(last)
    return power_sums(order) == tuple((whole - part) % _WRAP for whole, part in zip(of_all, of_ends, strict=True))


def power_sums(positions: NDArray[np.integer[Any]]) -> tuple[int, int]:
    """The sum of some numbers and that of their squares, modulo 2^64: two sets that differ by a slip do not share both.

    Piece by piece, so that reading memory is all it costs.
    """
    total = squares = 0
    for begin in range(0, positions.size, PIECE):
        piece = positions[begin : begin + PIECE].astype(np.uint64)
        total += int(piece.sum())
        squares += int((piece * piece).sum())
    return total % _WRAP, squares % _WRAP
