"""An index of many token sequences that finds where the current text continues: the longest suffixes of a context.

Sequences are concatenated in one array, each after a `START` mark. The mark keeps matches within one sequence, and
makes the beginning of a sequence a context like any other: at step 0 the current context is `START` alone, which
precedes every stored completion.

All positions except the last of each sequence, which nothing follows, are kept in sorted orders (see `context_order`):
a long one that is only replaced as a whole, and a short tail into which new tokens are merged. A full tail is merged
into the long order. Sequences that were sorted apart (`SortedText`) are added unchanged; the long order then consists
of several runs until they are merged.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from precedent.drafters.matching.context_order import (
    MAX_MATCH,
    START,
    merge,
    merge_runs,
    sort_positions,
    sorted_by_context,
)
from precedent.drafters.matching.occurrences import Occurrences, Text, VoteWeights, find
from precedent.drafters.matching.vote_tree import MAX_DEPTH
from precedent.runtime.compiled import Int32s, Int64s

MIN_TAIL = 4096
"""Most positions of the tail; a large index gives it 1 / `TAIL_SHARE` of its order."""

TAIL_SHARE = 256

MAX_RUNS = 16
"""Most runs of the long order; more are merged immediately."""

MUCH = 2**20
"""Arrays with room for more tokens than this grow by an eighth; smaller ones double."""

_FORGOTTEN = -2
NOWHERE = np.empty(0, dtype=np.int32)


class SortedText(NamedTuple):
    """Sequences one after another, sorted without holding an index: see `sorted_text`.

    `lengths` counts each sequence's mark; `order` holds every position of `tokens` except the last of each sequence.
    """

    ids: list[int]
    lengths: Int64s
    tokens: Int32s
    order: Int32s


class TokenIndex:
    """Token sequences that can grow, be forgotten, and be searched for the longest suffixes of a context.

    Takes 12 bytes per token. Not thread-safe: callers that share an index must hold a lock. The tail holds up to
    `min_tail` positions or more.
    """

    def __init__(self, *, min_tail: int = MIN_TAIL) -> None:
        self._min_tail = min_tail
        self._tokens = np.full(1024, START, dtype=np.int32)  # padded at both ends, so that no read is out of bounds
        self._owners = np.full(1024, -1, dtype=np.int32)
        self._size = MAX_MATCH
        self._order, self._ends = NOWHERE, np.empty(0, dtype=np.int64)
        self._tail = NOWHERE
        self._spans: list[tuple[int, int]] = []
        self._slot_of: dict[int, int] = {}
        self.sequence_ids: list[int] = []
        self.num_tokens = 0
        self.num_forgotten = 0

    def __contains__(self, sequence_id: int) -> bool:
        return sequence_id in self._slot_of

    @property
    def text(self) -> Text:
        """The tokens and their owners; valid until the next change."""
        return Text(self._tokens, self._owners, self._size)

    @property
    def orders(self) -> tuple[Int32s, Int32s, Int64s]:
        """The tail, the long order, and where each of its runs ends; valid until the next change."""
        return self._tail, self._order, self._ends

    @property
    def runs(self) -> tuple[Text, Int32s, Int32s]:
        """The text and the two orders of its positions; valid until the next change."""
        if self.num_runs > 1:
            self.take_order(self.merged_order())
        return self.text, self._order, self._tail

    def slot(self, sequence_id: int) -> int | None:
        """The slot of a sequence, or None if the index does not hold it."""
        return self._slot_of.get(sequence_id)

    @property
    def num_runs(self) -> int:
        """Number of runs in the long order; searching is fastest with one."""
        return self._ends.size

    @property
    def num_sequences(self) -> int:
        """Number of sequences in the index."""
        return len(self._slot_of)

    def lengths(self) -> dict[int, int]:
        """Number of tokens of each sequence in the index, by sequence id."""
        spans = self._spans
        return {key: spans[slot][1] - spans[slot][0] - 1 for key, slot in self._slot_of.items()}

    def append(self, sequence_id: int, tokens: Sequence[int] | NDArray[np.int32]) -> None:
        """Add a sequence, or append tokens to one that the index already holds."""
        slot = self._slot_of.get(sequence_id)
        if slot is not None and slot != len(self._spans) - 1:  # no room after it, so it moves to the end
            tokens = np.concatenate([self.tokens(sequence_id), np.asarray(tokens, dtype=np.int32)])
            self.forget([sequence_id])
            slot = None
        if slot is None:
            slot = self._open(sequence_id)
        last = self._size - 1  # nothing followed this position until now, so no order holds it yet
        self._write(slot, np.asarray(tokens, dtype=np.int32))
        self._sort_in(last, self._size - 1)

    def tokens(self, sequence_id: int) -> NDArray[np.int32]:
        """A copy of a sequence's tokens. Raises KeyError for an unknown id."""
        begin, end = self._spans[self._slot_of[sequence_id]]
        return self._tokens[begin + 1 : end].copy()

    def forget(self, sequence_ids: Iterable[int]) -> None:
        """Remove sequences and overwrite their tokens, in one pass over the index; unknown ids are ignored."""
        gone = [self._slot_of.pop(key) for key in set(sequence_ids) if key in self._slot_of]
        for slot in gone:
            begin, end = self._spans[slot]
            self._tokens[begin:end] = _FORGOTTEN
            self.num_tokens -= end - begin - 1
            self.num_forgotten += end - begin - 1
        if gone:
            stays = self._tokens[self._order] != _FORGOTTEN
            self._ends = np.append(0, np.cumsum(stays))[self._ends]
            self._order = self._order[stays]
            self._tail = self._tail[self._tokens[self._tail] != _FORGOTTEN]

    def order_of(self, slots: Collection[int]) -> Int32s:
        """Sort the positions of some sequences into a separate order, to search in addition to the whole."""
        spans = [np.arange(begin, end - 1, dtype=np.int32) for begin, end in (self._spans[slot] for slot in slots)]
        return sort_positions(self._tokens, np.concatenate(spans)) if spans else NOWHERE

    def load(self, new: SortedText) -> range:
        """Add new sequences that were sorted apart as one more run; returns their slots."""
        shift, slots = self._size, range(len(self._spans), len(self._spans) + len(new.ids))
        self._reserve(shift + new.tokens.size + MAX_DEPTH + 1)
        self._size += new.tokens.size
        self._tokens[shift : self._size] = new.tokens
        self._owners[shift : self._size] = np.repeat(np.arange(slots.start, slots.stop, dtype=np.int32), new.lengths)
        ends = np.cumsum(new.lengths) + shift
        self._spans += zip((ends - new.lengths).tolist(), ends.tolist(), strict=True)
        self._slot_of |= zip(new.ids, slots, strict=True)
        self.sequence_ids += new.ids
        self.num_tokens += new.tokens.size - len(slots)
        self._order = np.concatenate([self._order, new.order + np.int32(shift)])
        self._ends = np.append(self._ends, self._order.size)
        if self.num_runs > MAX_RUNS:
            self.take_order(self.merged_order())
        return slots

    def merged_order(self) -> Int32s:
        """Merge the runs of the long order; changes nothing, so the index may be searched meanwhile."""
        return merge_runs(self._tokens, self._order, self._ends) if self.num_runs > 1 else self._order

    def take_order(self, merged: Int32s) -> None:
        """Replace the runs with the result of `merged_order`; the index must not have changed in between."""
        self._ends = np.full(min(1, merged.size), merged.size, dtype=np.int64)
        self._order = merged

    def match(self, recent: Int32s, weights: VoteWeights, limit: int, near: Int32s = NOWHERE) -> Occurrences:
        """At most `limit` places where the longest known suffixes of a context continue.

        `recent` is the context, newest token first; `near` is an order of positions to search first (`order_of`).
        """
        return find(self.text, near, *self.orders, recent, weights, limit)

    def _open(self, sequence_id: int) -> int:
        slot = len(self._spans)
        self._slot_of[sequence_id] = slot
        self.sequence_ids.append(sequence_id)
        self._spans.append((self._size, self._size))
        self._write(slot, np.array([START], dtype=np.int32))
        self.num_tokens -= 1  # the mark does not count as a token
        return slot

    def _write(self, slot: int, tokens: NDArray[np.int32]) -> None:
        begin, end = self._size, self._size + tokens.size
        self._reserve(end + MAX_DEPTH + 1)
        self._tokens[begin:end] = tokens
        self._owners[begin:end] = slot
        self._size = end
        self._spans[slot] = (self._spans[slot][0], end)
        self.num_tokens += tokens.size

    def _sort_in(self, begin: int, end: int) -> None:
        """Add new positions to the tail; one that grows too long is merged into the last run."""
        new = sort_positions(self._tokens, np.arange(begin, end, dtype=np.int32))
        self._tail = merge(self._tokens, self._tail, new) if self._tail.size else new
        if self._tail.size > max(self._min_tail, self._order.size // TAIL_SHARE):
            last = int(self._ends[-2]) if self.num_runs > 1 else 0
            merged = merge(self._tokens, self._order[last:], self._tail)
            self._order = np.concatenate([self._order[:last], merged]) if last else merged
            self._ends, self._tail = np.append(self._ends[:-1], self._order.size), NOWHERE

    def _reserve(self, size: int) -> None:
        if size > self._tokens.size:
            grown = self._tokens.size + (self._tokens.size if self._tokens.size < MUCH else self._tokens.size // 8)
            more = max(size, grown) - self._tokens.size
            self._tokens = np.concatenate([self._tokens, np.full(more, START, dtype=np.int32)])
            self._owners = np.concatenate([self._owners, np.full(more, -1, dtype=np.int32)])


def sorted_text(sequences: Mapping[int, Sequence[int] | Int32s]) -> SortedText:
    """Sort sequences by their ids, in one pass."""
    lengths = np.array([len(tokens) + 1 for tokens in sequences.values()], dtype=np.int64)
    ends, text = np.cumsum(lengths), np.full(MAX_MATCH + lengths.sum(), START, dtype=np.int32)
    for end, tokens in zip((ends + MAX_MATCH).tolist(), sequences.values(), strict=True):
        text[end - len(tokens) : end] = tokens
    followed = np.ones(lengths.sum(), dtype=bool)
    followed[ends - 1] = False
    order = sorted_by_context(text, (followed.nonzero()[0] + MAX_MATCH).astype(np.int32))
    return SortedText(list(sequences), lengths, text[MAX_MATCH:], order - np.int32(MAX_MATCH))


def reversed_context(context: Sequence[int]) -> Int32s:
    """The last `MAX_MATCH` tokens of a context, newest first."""
    return np.array(context[: -MAX_MATCH - 1 : -1], dtype=np.int32)
