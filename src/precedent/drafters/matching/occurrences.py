"""Places where the current context occurs, with the weights of their sequences: the source of the votes for a tree."""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from precedent.drafters.matching.context_order import LENGTHS_BELOW_BEST, longest_matches, matched
from precedent.runtime.compiled import Floats, Int32s, compiled

OCCURRENCE = np.dtype(
    [("position", "i4"), ("slot", "i4"), ("length", "i4"), ("bin", "i4"), ("score", "f8"), ("weight", "f8")]
)
"""One place. `position` is that of the context's last token, `slot` the number of its sequence, `length` the number of
matching tokens (a `START` mark counts), `score` the same plus a share carried over a gap, `bin` the similarity bin of
the sequence and `weight` its log weight."""

HIT = np.dtype([("slot", "i4"), ("bin", "i4"), ("weight", "f8")])
"""A sequence with known similarity: its slot, similarity bin and log weight. An array of hits is sorted by slot; its
first entry, with slot -1, stands for every sequence that is not a hit."""

Occurrences = NDArray[np.void]
NO_OCCURRENCES: Occurrences = np.empty(0, OCCURRENCE)
Hits = NDArray[np.void]

ROOM = 256
"""Places collected from each order before the best are chosen."""

SHORT_MATCH = 8
"""Longer matches than this count as equally good when the best places are chosen."""

SCATTER = 40503
"""Odd factor that spreads neighbouring numbers over a table."""

LENGTH_WEIGHT = 0.7
"""Log weight of each matched token."""


class Text(NamedTuple):
    """Concatenated sequences: the tokens and, for each token, the slot of its sequence; `size` of them are in use."""

    tokens: Int32s
    owners: Int32s
    size: int


class VoteWeights(NamedTuple):
    """The log weight of a place: its hit's, plus `log_counts[slot]`, plus a share of `recency` (all for the newest).

    Each matched token adds `length`.
    """

    hits: Hits
    log_counts: Floats
    recency: float
    length: float = LENGTH_WEIGHT


@compiled
def hit_of(hits: Hits, slot: int) -> int:
    """Index of the slot's hit, 0 if it is not a hit."""
    low, high = 1, hits.size
    while low < high:
        middle = (low + high) // 2
        if hits[middle].slot < slot:
            low = middle + 1
        else:
            high = middle
    return low if low < hits.size and hits[low].slot == slot else 0


@compiled
def fill(place: Any, text: Text, position: int, slot: int, length: int, weights: VoteWeights) -> None:
    """Set the fields of an occurrence at `position` in sequence `slot`, with `length` matching tokens."""
    hit = weights.hits[hit_of(weights.hits, slot)]
    place.position, place.slot, place.length = position, slot, length
    place.score, place.bin = place.length, hit.bin
    place.weight = hit.weight + weights.log_counts[slot] + weights.recency * position / text.size


@compiled
def _seen(table: Int32s, position: int) -> bool:
    """Whether the position is in an open-addressing table (size a power of two, -1 for empty); adds it if not."""
    at = (position * SCATTER) & (table.size - 1)
    while table[at] >= 0:
        if table[at] == position:
            return True
        at = (at + 1) & (table.size - 1)
    table[at] = position
    return False


@compiled
def find(
    text: Text,
    near: Int32s,
    order: Int32s,
    recent: Int32s,
    weights: VoteWeights,
    limit: int,
) -> Occurrences:
    """At most `limit` places where `recent` (newest first) continues; heavier and longer matches win.

    `near` and `order` are sorted and hold only places with a following token. `near` is searched first and completely,
    so that a large index cannot hide its hits.
    """
    found, lengths = np.empty(2 * ROOM, np.int32), np.empty(2 * ROOM, np.int32)
    num_near = longest_matches(text.tokens, near, recent, found, lengths, 0, ROOM)
    count = longest_matches(text.tokens, order, recent, found, lengths, num_near, ROOM)
    for i in range(num_near):  # `near` was sorted when the request began; some of it may be forgotten by now
        lengths[i] = matched(text.tokens, found[i], recent) if text.tokens[found[i] + 1] >= 0 else 0
    slots = text.owners[found[:count]]
    longest = lengths[:count].max() if count else 0
    table, places, size = np.full(4 * ROOM, -1, np.int32), np.empty(count, OCCURRENCE), 0
    for i in range(count):
        wanted = lengths[i] > 0 and (i < num_near or lengths[i] >= longest - LENGTHS_BELOW_BEST)
        if wanted and not _seen(table, found[i]):
            fill(places[size], text, found[i], slots[i], lengths[i], weights)
            size += 1
    return places[:size] if size <= limit else _best(places[:size], limit, weights.length)


@compiled
def _best(places: Occurrences, limit: int, length: float) -> Occurrences:
    """The `limit` heaviest places in their original order; of equal ones at the border, the first."""
    weights = np.empty(places.size)
    for i in range(places.size):
        weights[i] = length * min(places[i].length, SHORT_MATCH) + places[i].weight
    border = np.partition(weights, places.size - limit)[places.size - limit]
    equal = limit
    for i in range(places.size):
        equal -= weights[i] > border
    best, size = np.empty(limit, OCCURRENCE), 0
    for i in range(places.size):
        if weights[i] > border or (weights[i] == border and equal > 0):
            equal -= weights[i] == border
            best[size] = places[i]
            size += 1
    return best
