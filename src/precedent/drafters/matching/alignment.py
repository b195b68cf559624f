"""Tracks which known texts the output follows, and where, so that drafting continues after a differing value.

Suppose a completion agreed for twenty tokens and then names another order id. It is still useful: after its own id it
most likely continues as the output will after the new one. But right after the id only one or two tokens match, as they
do in a hundred other places. The trail remembers how well the completion matched before the gap.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from precedent.drafters.matching.context_order import MAX_MATCH, matched
from precedent.drafters.matching.occurrences import (
    LENGTH_WEIGHT,
    OCCURRENCE,
    Occurrences,
    Text,
    VoteWeights,
    fill,
)
from precedent.runtime.compiled import Int32s, compiled

POINTER = np.dtype([("position", "i4"), ("slot", "i4"), ("gap", "i4"), ("score", "f8")])
"""Where a sequence last agreed with the output: the position of its last agreeing token, how many tokens the output has
gained since (`gap`), and the number of matched tokens, carried over gaps (`score`)."""

Pointers = NDArray[np.void]

MAX_FOLLOWED = 16
MAX_GAP = 32
WINDOW = 40
CARRIED = 0.5
SKEW_COST = 0.15


class Trail:
    """Follows one output through an index of known texts. `pointers` say where the followed sequences are."""

    def __init__(self) -> None:
        self.pointers: Pointers = np.empty(0, POINTER)

    def advance(self, text: Text, aligned: Occurrences, committed: Sequence[int]) -> None:
        """Move along the committed tokens, following the heaviest of the occurrences that votes came from.

        A pointer that disagrees stays where it is, and its gap begins.
        """
        self.pointers = advance(text.tokens, aligned, self.pointers, np.array(committed, dtype=np.int32))


@compiled
def align(text: Text, recent: Int32s, found: Occurrences, pointers: Pointers, weights: VoteWeights) -> Occurrences:
    """The places found, those of agreeing pointers, and those where a pointer behind a gap may resume; each once.

    The place of an agreeing pointer keeps the pointer's score. A place behind a gap gets its match length plus a share
    of the pointer's score, reduced by the difference in length of the gap's two sides.
    """
    places, size = np.empty(found.size + pointers.size * WINDOW, OCCURRENCE), found.size
    places[:size] = found
    for pointer in pointers:
        if pointer.gap == 0:
            size = _join(places, size, text, recent, pointer.position, 0.0, pointer.score, weights)
            continue
        for offset in range(1, WINDOW + 1):
            position = pointer.position + offset
            if text.tokens[position] < 0:
                break
            if text.tokens[position] == recent[0]:
                carried = max(0.0, CARRIED * pointer.score - SKEW_COST * abs(offset - pointer.gap))
                size = _join(places, size, text, recent, position, carried, 0.0, weights)
    return places[:size]


@compiled
def _join(
    places: Occurrences,
    size: int,
    text: Text,
    recent: Int32s,
    position: int,
    carried: float,
    at_least: float,
    weights: VoteWeights,
) -> int:
    """Add a place, or raise the score of an existing one; returns the new number of places."""
    if text.tokens[position + 1] < 0:
        return size
    at = 0
    while at < size and places[at].position != position:
        at += 1
    if at == size:
        length = matched(text.tokens, position, recent)
        fill(places[at], text, position, text.owners[position], length, weights)
        size += 1
    place = places[at]
    place.score = min(float(MAX_MATCH), max(place.score, place.length + carried, at_least))
    return size


@compiled
def follow(aligned: Occurrences, pointers: Pointers) -> Pointers:
    """The pointers to advance: the heaviest occurrences, one per sequence, and the pointers behind a gap.

    Of more than `MAX_FOLLOWED`, those with the highest scores stay; a pointer behind a gap counts half.
    """
    chosen = np.empty(MAX_FOLLOWED, POINTER)
    weights = np.empty(aligned.size)
    for i in range(aligned.size):
        weights[i] = LENGTH_WEIGHT * aligned[i].score + aligned[i].weight
    size = 0
    for _ in range(min(MAX_FOLLOWED, aligned.size)):
        heaviest = weights.argmax()
        weights[heaviest] = -np.inf
        place = aligned[heaviest]
        size = _keep(chosen, size, place.position, place.slot, 0, place.score)
    for pointer in pointers:
        if pointer.gap > 0:
            size = _keep(chosen, size, pointer.position, pointer.slot, pointer.gap, pointer.score)
    return chosen[:size]


@compiled
def _strength(gap: int, score: float) -> float:
    return score if gap == 0 else CARRIED * score


@compiled
def _keep(chosen: Pointers, size: int, position: int, slot: int, gap: int, score: float) -> int:
    """Add a pointer, in place of its sequence's or of the weakest one if needed; returns the new number of pointers."""
    at = 0
    while at < size and chosen[at].slot != slot:
        at += 1
    if at == MAX_FOLLOWED:
        at = 0
        for i in range(size):
            if _strength(chosen[i].gap, chosen[i].score) < _strength(chosen[at].gap, chosen[at].score):
                at = i
    if at < size and _strength(chosen[at].gap, chosen[at].score) >= _strength(gap, score):
        return size
    pointer = chosen[at]
    pointer.position, pointer.slot, pointer.gap, pointer.score = position, slot, gap, score
    return max(size, at + 1)


@compiled
def advance(tokens: Int32s, aligned: Occurrences, before: Pointers, committed: Int32s) -> Pointers:
    """Follow the heaviest occurrences, and move along the committed tokens as far as they agree.

    Pointers that fall too far behind are dropped.
    """
    pointers = follow(aligned, before)
    kept = np.empty(pointers.size, POINTER)
    size = 0
    for pointer in pointers:
        agreed = 0
        if pointer.gap == 0:
            while agreed < committed.size and tokens[pointer.position + 1 + agreed] == committed[agreed]:
                agreed += 1
        gap = pointer.gap + committed.size - agreed
        if gap <= MAX_GAP:
            moved = kept[size]
            moved.position, moved.slot, moved.gap = pointer.position + agreed, pointer.slot, gap
            moved.score = min(float(MAX_MATCH), pointer.score + agreed)
            size += 1
    return kept[:size]
