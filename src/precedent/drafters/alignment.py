"""Which stored completions the live output follows, and where: the memory that carries drafting over a differing slot.

A completion that was followed for twenty tokens and then names another order id has not become worthless: right behind
its own id it most likely goes on as the live output will behind the new one. After the slot only one or two tokens
match, as they do in a hundred other places; the trail remembers how well the completion fitted before the gap.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from precedent.drafters.token_index import MAX_DEPTH, MAX_MATCH, Occurrences, Positions, TokenIndex, reversed_context

_MAX_FOLLOWED = 16
_MAX_GAP = 32
_WINDOW = 40
_CARRIED = 0.5
_SKEW_COST = 0.15


@dataclass(frozen=True, slots=True)
class _Pointers:
    """Where completions were last in step with the live output.

    `positions` are those of the last token in step, `scores` the matched tokens (gaps included), `gaps` how many tokens
    the live output has run on since; all `[n]`.
    """

    positions: Positions
    scores: NDArray[np.float64]
    gaps: NDArray[np.int64]


_NO_POINTERS = _Pointers(np.empty(0, np.int64), np.empty(0), np.empty(0, np.int64))


@dataclass(frozen=True, slots=True)
class AlignedOccurrences:
    """Occurrences with their `scores`: the match length, plus what is carried over a gap; `[n]`, in tokens."""

    occurrences: Occurrences
    scores: NDArray[np.float64]


class Trail:
    """Follows one live output through the index of its tenant."""

    def __init__(self) -> None:
        self._pointers = _NO_POINTERS

    def advance(self, index: TokenIndex, committed: Sequence[int]) -> None:
        """Move the pointers along the committed tokens; one that disagrees stops and its gap begins."""
        for begin in range(0, len(committed), MAX_DEPTH):
            if self._pointers.positions.size:
                self._advance(index, np.array(committed[begin : begin + MAX_DEPTH], dtype=np.int32))

    def align(self, index: TokenIndex, context: Sequence[int], found: Occurrences) -> AlignedOccurrences:
        """Join what the index found with the places at which a followed completion goes on or may be resumed."""
        if not self._pointers.positions.size:
            return AlignedOccurrences(found, found.lengths.astype(np.float64))
        recent = reversed_context(context)
        ahead, carried = self._resumptions(index, context[-1])
        in_step = self._pointers.gaps == 0
        positions = np.concatenate([found.positions, ahead, self._pointers.positions[in_step]])
        lengths = index.lengths(positions, recent)
        scores = lengths.astype(np.float64)
        scores[len(found) : len(found) + ahead.size] += carried
        scores[len(found) + ahead.size :] = self._pointers.scores[in_step]
        kept = _best_of_equals(positions, np.where(lengths > 0, scores, 0.0))
        joined = Occurrences(positions[kept], lengths[kept], index.slots(positions[kept]))
        return AlignedOccurrences(joined, np.minimum(scores[kept], MAX_MATCH))

    def follow(self, index: TokenIndex, aligned: AlignedOccurrences, log_weights: NDArray[np.float64]) -> None:
        """Remember the heaviest occurrences, one per completion, beside the pointers that wait behind a gap."""
        heaviest = np.argsort(-log_weights, kind="stable")[:_MAX_FOLLOWED]
        waiting = self._pointers.gaps > 0
        positions = np.concatenate([aligned.occurrences.positions[heaviest], self._pointers.positions[waiting]])
        scores = np.concatenate([aligned.scores[heaviest], self._pointers.scores[waiting]])
        gaps = np.concatenate([np.zeros(heaviest.size, np.int64), self._pointers.gaps[waiting]])
        worth = np.where(gaps == 0, scores, _CARRIED * scores)
        kept = _best_of_equals(index.slots(positions), worth)
        kept = kept[np.argsort(-worth[kept], kind="stable")[:_MAX_FOLLOWED]]
        self._pointers = _Pointers(positions[kept], scores[kept], gaps[kept])

    def _advance(self, index: TokenIndex, committed: NDArray[np.int32]) -> None:
        old = self._pointers
        agreed = _leading_agreement(index.continuations(old.positions, committed.size), committed)
        agreed = np.where(old.gaps == 0, agreed, 0)
        gaps = old.gaps + committed.size - agreed
        kept = gaps <= _MAX_GAP
        scores = np.minimum(old.scores + agreed, MAX_MATCH)
        self._pointers = _Pointers((old.positions + agreed)[kept], scores[kept], gaps[kept])

    def _resumptions(self, index: TokenIndex, last: int) -> tuple[Positions, NDArray[np.float64]]:
        """Places soon behind the waiting pointers where the last token stands, and the score carried there."""
        waiting = self._pointers.gaps > 0
        positions, scores = self._pointers.positions[waiting], self._pointers.scores[waiting]
        gaps = self._pointers.gaps[waiting]
        rows, offsets = np.nonzero(index.continuations(positions, _WINDOW) == last)
        skew = np.abs(offsets + 1 - gaps[rows])
        return positions[rows] + offsets + 1, np.maximum(0.0, _CARRIED * scores[rows] - _SKEW_COST * skew)


def _best_of_equals(keys: NDArray[np.int64], worth: NDArray[np.float64]) -> NDArray[np.int64]:
    """Indices of the most valuable entry of every key, in order of the keys; worthless ones are left out."""
    order = np.lexsort((-worth, keys))
    first = np.ones(order.size, dtype=np.bool_)
    first[1:] = np.diff(keys[order]) != 0
    kept = order[first]
    return kept[worth[kept] > 0]


def _leading_agreement(following: NDArray[np.int32], committed: NDArray[np.int32]) -> NDArray[np.int64]:
    differs = np.ones((following.shape[0], committed.size + 1), dtype=np.bool_)
    np.not_equal(following[:, : committed.size], committed, out=differs[:, :-1])
    agreed: NDArray[np.int64] = differs.argmax(axis=1)
    return agreed
