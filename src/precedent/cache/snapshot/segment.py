"""A sealed batch of completions as plain arrays, ready to be searched, which drafting reads instead of the rows."""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from precedent.cache.store.arrays import Ids, Mask

COMPLETION = np.dtype([("id", "<i8"), ("checksum", "<u8"), ("begin", "<i4")])
"""A completion in a segment: its id, its row's checksum, and where its tokens begin."""

TOKEN = np.dtype("<i4")

BYTES_PER_TOKEN = 8
"""Bytes per token of a segment: token and its place in the order. Each completion adds a mark and a `COMPLETION`."""

PIECE = 1 << 16
"""Positions summed at a time: few enough to stay in the processor's cache."""

_WRAP = 1 << 64

Int32s = NDArray[np.int32]


class Segment(NamedTuple):
    """Completions one after another, and the positions in their tokens in a sorted order.

    `tokens` holds a negative mark before each completion's tokens; `order` holds every position except the last of each
    completion. The code that searches a segment defines the sort order.
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
        """Tokens per completion, its mark included, `[n]`."""
        return np.diff(self.completions["begin"], append=self.tokens.size)

    @property
    def owners(self) -> Int32s:
        """The number of its completion for each token."""
        return np.repeat(np.arange(self.completions.size, dtype=np.int32), self.lengths)


def kept(segment: Segment, stays: Mask) -> Segment:
    """The segment reduced to the completions for which `stays` is true; the order stays sorted."""
    owners = segment.owners
    completions, lengths = segment.completions[stays].copy(), segment.lengths
    shift = np.cumsum(np.where(stays, 0, lengths)).astype(np.int32)
    completions["begin"] -= shift[stays]
    order = segment.order[stays[owners[segment.order]]]
    return Segment(completions, segment.tokens[stays[owners]], order - shift[owners[order]])


def is_sound(segment: Segment) -> bool:
    """Whether following the arrays stays within them: compiled code does not check indices."""
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
    """The sums of some numbers and of their squares, modulo 2^64; an accidental difference changes at least one.

    Works piece by piece, so it takes no longer than reading the memory.
    """
    total = squares = 0
    for begin in range(0, positions.size, PIECE):
        piece = positions[begin : begin + PIECE].astype(np.uint64)
        total += int(piece.sum())
        squares += int((piece * piece).sum())
    return total % _WRAP, squares % _WRAP
