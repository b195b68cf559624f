"""Where the live text continues: occurrences of its last tokens in many token sequences, and what followed them there.

Sequences lie one behind the other in one array, each behind a `START` mark. The mark makes two things simple: no match
crosses from one sequence into another, and the beginning of a completion is a context that can be matched like any
other (at step 0 the live context is `START` alone, which stands before every stored completion).
"""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

START = -1
"""Stands before the first token of every sequence; as a continuation it means that the sequence has ended."""

MAX_MATCH = 24
"""Longest suffix that is told apart, in tokens."""

MAX_DEPTH = 64
"""Longest continuation that is read, in tokens."""

_FORGOTTEN = -2
_SHORT_MATCH = 8
_MAX_SCANNED = 4096
_SCAN_WINDOW = 1 << 17
_LENGTH_WEIGHT = 0.7

Positions = NDArray[np.int64]


@dataclass(frozen=True, slots=True)
class Occurrences:
    """Places where the live context occurs, oldest first.

    `positions[i]` is where the context's last token stands, `lengths[i]` how many tokens match from there backwards
    (the `START` mark counts as one), `slots[i]` the number of the sequence, whose id is `sequence_ids[slots[i]]`.
    """

    positions: Positions
    lengths: NDArray[np.int64]
    slots: NDArray[np.int64]

    def __len__(self) -> int:
        return int(self.positions.size)


class TokenIndex:
    """Token sequences that grow, can be forgotten, and are searched for the longest suffix of a context.

    Postings are kept per bigram; a bigram that never occurred falls back to its last token in the newest 131,072.
    Not thread-safe: callers that share an index hold a lock.
    """

    def __init__(self) -> None:
        self._tokens = np.full(1024, START, dtype=np.int32)  # padded on both sides, so that no gather leaves it
        self._owners = np.full(1024, -1, dtype=np.int32)
        self._size = MAX_MATCH
        self._postings: dict[int, array[int]] = {}
        self._spans: list[tuple[int, int]] = []
        self._slot_of: dict[int, int] = {}
        self.sequence_ids: list[int] = []
        self.num_tokens = 0
        self.num_forgotten = 0

    def __contains__(self, sequence_id: int) -> bool:
        return sequence_id in self._slot_of

    def slot(self, sequence_id: int) -> int | None:
        """The slot of a sequence, None when it is not here."""
        return self._slot_of.get(sequence_id)

    def append(self, sequence_id: int, tokens: Sequence[int] | NDArray[np.int32]) -> None:
        """Add a sequence, or more tokens at the end of one that is here already."""
        slot = self._slot_of.get(sequence_id)
        if slot is not None and slot != len(self._spans) - 1:  # no room behind it: it moves to the end
            tokens = np.concatenate([self.tokens(sequence_id), np.asarray(tokens, dtype=np.int32)])
            self.forget(sequence_id)
            slot = None
        if slot is None:
            slot = self._open(sequence_id)
        self._write(slot, np.asarray(tokens, dtype=np.int32))

    def tokens(self, sequence_id: int) -> NDArray[np.int32]:
        """A copy of a sequence's tokens. Raises KeyError when it is not here."""
        begin, end = self._spans[self._slot_of[sequence_id]]
        return self._tokens[begin + 1 : end].copy()

    def forget(self, sequence_id: int) -> None:
        """Remove a sequence and overwrite its tokens; an unknown id is ignored."""
        slot = self._slot_of.pop(sequence_id, None)
        if slot is None:
            return
        begin, end = self._spans[slot]
        for position, key in zip(range(begin, end), self._keys(begin, end), strict=True):
            places = self._postings[key]
            places.remove(position)
            if not places:
                del self._postings[key]
        self._tokens[begin:end] = _FORGOTTEN
        self.num_tokens -= end - begin - 1
        self.num_forgotten += end - begin - 1

    def match(
        self, context: Sequence[int], limit: int = 256, preference: NDArray[np.float64] | None = None
    ) -> Occurrences:
        """At most `limit` occurrences of the longest known ends of `context`.

        When there are more, those with a longer match win, weighed against `preference` (log weight per slot,
        `[num_slots]`), newer before older ones.
        """
        recent = reversed_context(context)
        positions = self._candidates(recent)
        if positions.size > limit:
            positions = self._best(positions, recent, limit, preference)
        return Occurrences(positions, self.lengths(positions, recent), self.slots(positions))

    def lengths(self, positions: Positions, recent: NDArray[np.int32]) -> NDArray[np.int64]:
        """How many tokens before and at each position equal `recent` (newest token first), `[n]`."""
        differs = np.ones((positions.size, recent.size + 1), dtype=np.bool_)
        reach = np.arange(recent.size)
        np.not_equal(self._tokens[positions[:, None] - reach], recent, out=differs[:, : recent.size])
        lengths: NDArray[np.int64] = differs.argmax(axis=1)
        return lengths

    def slots(self, positions: Positions) -> NDArray[np.int64]:
        """The slot in which each position lies, `[n]`."""
        return self._owners[positions].astype(np.int64)

    def continuations(self, positions: Positions, depth: int) -> NDArray[np.int32]:
        """The tokens after each position, `[n, depth]`; negative from the end of the sequence on."""
        following = self._tokens[positions[:, None] + np.arange(1, min(depth, MAX_DEPTH) + 1)]
        return np.where(np.logical_or.accumulate(following < 0, axis=1), START, following)

    def _open(self, sequence_id: int) -> int:
        slot = len(self._spans)
        self._slot_of[sequence_id] = slot
        self.sequence_ids.append(sequence_id)
        self._spans.append((self._size, self._size))
        self._write(slot, np.array([START], dtype=np.int32))
        self.num_tokens -= 1  # the mark is no token
        return slot

    def _write(self, slot: int, tokens: NDArray[np.int32]) -> None:
        begin, end = self._size, self._size + tokens.size
        self._reserve(end + MAX_DEPTH + 1)
        self._tokens[begin:end] = tokens
        self._owners[begin:end] = slot
        self._size = end
        self._spans[slot] = (self._spans[slot][0], end)
        self.num_tokens += tokens.size
        postings = self._postings
        for position, key in zip(range(begin, end), self._keys(begin, end), strict=True):
            places = postings.get(key)
            if places is None:
                postings[key] = array("i", (position,))
            else:
                places.append(position)

    def _keys(self, begin: int, end: int) -> list[int]:
        """The bigram key of every position; a `START` mark forms its bigram with another mark."""
        tokens = self._tokens[begin - 1 : end].astype(np.int64)
        before = np.where(tokens[1:] == START, START, tokens[:-1])
        keys: list[int] = (before << 32 | tokens[1:]).tolist()
        return keys

    def _reserve(self, size: int) -> None:
        if size > self._tokens.size:
            room = max(size, 2 * self._tokens.size) - self._tokens.size
            self._tokens = np.concatenate([self._tokens, np.full(room, START, dtype=np.int32)])
            self._owners = np.concatenate([self._owners, np.full(room, -1, dtype=np.int32)])

    def _candidates(self, recent: NDArray[np.int32]) -> Positions:
        if not recent.size:
            return np.empty(0, dtype=np.int64)
        last = int(recent[0])
        before = START if last == START else int(recent[1]) if recent.size > 1 else _FORGOTTEN
        places = self._postings.get(before << 32 | last)
        if places is not None:
            return np.frombuffer(places, dtype=np.int32)[-_MAX_SCANNED:].astype(np.int64)
        begin = max(0, self._size - _SCAN_WINDOW)
        found = np.flatnonzero(self._tokens[begin : self._size] == last) if last >= 0 else np.empty(0, np.int64)
        return found[-_MAX_SCANNED:] + begin

    def _best(
        self, positions: Positions, recent: NDArray[np.int32], limit: int, preference: NDArray[np.float64] | None
    ) -> Positions:
        score = _LENGTH_WEIGHT * self.lengths(positions, recent[:_SHORT_MATCH])
        if preference is not None:
            score += preference[self._owners[positions]]
        score += np.linspace(0.0, 1e-3, positions.size)
        return positions[np.sort(np.argpartition(score, -limit)[-limit:])]


def reversed_context(context: Sequence[int]) -> NDArray[np.int32]:
    """The last `MAX_MATCH` tokens of a context, newest first."""
    return np.array(context[-MAX_MATCH:], dtype=np.int32)[::-1]
