"""Which stored completions the live output follows, and where: the memory that carries drafting over a differing slot.

A completion that was followed for twenty tokens and then names another order id has not become worthless: right behind
its own id it most likely goes on as the live output will behind the new one. After the slot only one or two tokens
match, as they do in a hundred other places; the trail remembers how well the completion fitted before the gap.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from precedent.drafters.matching.context_order import MAX_MATCH, matched
from precedent.drafters.matching.occurrences import LENGTH_WEIGHT, OCCURRENCE, Occurrences, Text, Weights, fill
from precedent.runtime.compiled import Int32s, compiled

POINTER = np.dtype([("position", "i4"), ("slot", "i4"), ("gap", "i4"), ("score", "f8")])
"""Where a completion was last in step with the live output: the position of the last token in step, how many tokens
the live output has run on since, and the matched tokens, gaps included."""

Pointers = NDArray[np.void]

MAX_FOLLOWED = 16
MAX_GAP = 32
WINDOW = 40
CARRIED = 0.5
SKEW_COST = 0.15


class Trail:
    """Follows one live output through the text of its tenant's completions."""

    def __init__(self) -> None:
        self._pointers: Pointers = np.empty(0, POINTER)

    def align(self, text: Text, recent: Int32s, found: Occurrences, weights: Weights) -> Occurrences:
        """Join what a search found with the places at which a followed completion goes on or may be resumed."""
        return align(text, recent, found, self._pointers, weights) if self._pointers.size else found

    def advance(self, text: Text, aligned: Occurrences, committed: Sequence[int]) -> None:
        """Follow the heaviest of the occurrences that were proposed from along the committed tokens.

        A pointer that disagrees stops where it is, and its gap begins.
        """
        self._pointers = advance(text.tokens, follow(aligned, self._pointers), np.array(committed, dtype=np.int32))


@compiled
def align(text: Text, recent: Int32s, found: Occurrences, pointers: Pointers, weights: Weights) -> Occurrences:
    """The places found, those of pointers in step, and those where a waiting pointer may be resumed; each once.

    A place in step keeps the score of its pointer; one behind a gap gets its match length plus a share of what the
    pointer had, less the more the two sides of the gap differ in length.
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
    weights: Weights,
) -> int:
    """Add a place, or raise the score of the one that is there; returns the new number of places."""
    if text.tokens[position + 1] < 0:
        return size
    at = 0
    while at < size and places[at].position != position:
        at += 1
    if at == size:
        fill(places[at], text, position, text.owners[position], matched(text.tokens, position, recent), weights)
        size += 1
    place = places[at]
    place.score = min(float(MAX_MATCH), max(place.score, place.length + carried, at_least))
    return size


@compiled
def follow(aligned: Occurrences, pointers: Pointers) -> Pointers:
    """The pointers to move on: the heaviest occurrences, one per sequence, beside those that wait behind a gap.

    Where there are more than `MAX_FOLLOWED`, those with the higher score stay, a waiting one counting half.
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
def _worth(gap: int, score: float) -> float:
    return score if gap == 0 else CARRIED * score


@compiled
def _keep(chosen: Pointers, size: int, position: int, slot: int, gap: int, score: float) -> int:
    """Put a pointer in, over the one of its sequence or the least worthy one; returns the new number."""
    at = 0
    while at < size and chosen[at].slot != slot:
        at += 1
    if at == MAX_FOLLOWED:
        at = 0
        for i in range(size):
            if _worth(chosen[i].gap, chosen[i].score) < _worth(chosen[at].gap, chosen[at].score):
                at = i
    if at < size and _worth(chosen[at].gap, chosen[at].score) >= _worth(gap, score):
        return size
    pointer = chosen[at]
    pointer.position, pointer.slot, pointer.gap, pointer.score = position, slot, gap, score
    return max(size, at + 1)


@compiled
def advance(tokens: Int32s, pointers: Pointers, committed: Int32s) -> Pointers:
    """Pointers moved along the committed tokens as far as they agree; those left too far behind are dropped."""
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
