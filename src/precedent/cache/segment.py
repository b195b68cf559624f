"""A sealed batch of completions as plain arrays, ready to be searched: what drafting reads instead of the rows."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

COMPLETION = np.dtype([("id", "<i8"), ("checksum", "<u8"), ("begin", "<i4")])
"""A completion in a segment: its id, the checksum of its row, and where its tokens begin."""

TOKEN = np.dtype("<i4")

BYTES_PER_TOKEN = 8
"""Of a segment's arrays: the token and its place in the order; each completion adds a mark and a `COMPLETION`."""

Ids = NDArray[np.int64]
Int32s = NDArray[np.int32]
Mask = NDArray[np.bool_]


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
    def owners(self) -> NDArray[np.int64]:
        """For each token the number of its completion."""
        return np.repeat(np.arange(self.completions.size), self.lengths)


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
    begins, size = segment.completions["begin"], segment.tokens.size
    if not begins.size:
        return size == 0 and segment.order.size == 0
    if begins[0] != 0 or (segment.lengths <= 0).any() or segment.order.size != size - begins.size:
        return False
    marks = np.zeros(size, dtype=bool)
    marks[begins] = True
    if ((segment.tokens < 0) != marks).any():
        return False
    places = np.zeros(size, dtype=bool)
    if segment.order.size and not 0 <= segment.order.min() <= segment.order.max() < size:
        return False
    places[segment.order] = True
    last = np.append(begins[1:], size) - 1
    return bool(not places[last].any() and np.count_nonzero(places) == segment.order.size)
