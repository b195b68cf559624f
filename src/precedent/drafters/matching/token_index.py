"""An index of many token sequences that finds where the current text continues: the longest suffixes of a context.

Sequences are concatenated in one array, each after a `START` mark. The mark keeps matches within one sequence, and
makes the beginning of a sequence a context like any other: at step 0 the current context is `START` alone, which
precedes every stored completion.

All positions except the last of each sequence, which nothing follows, are kept in one sorted order (see
`context_order`), into which new positions are merged.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import NamedTuple

import numpy as np

from precedent.drafters.matching.context_order import MAX_MATCH, START, merge, sort_positions, sorted_by_context
from precedent.drafters.matching.occurrences import Text
from precedent.drafters.matching.vote_tree import MAX_DEPTH
from precedent.runtime.compiled import Int32s

MUCH = 2**20
"""Arrays with room for more tokens than this grow by an eighth; smaller ones double."""

_FORGOTTEN = -2
NOWHERE = np.empty(0, dtype=np.int32)


class Grown(NamedTuple):
    """An index's text and order with further sequences: see `TokenIndex.grown`."""

    text: Text
    order: Int32s
    spans: dict[int, tuple[int, int]]


class TokenIndex:
    """Token sequences that can grow, be forgotten, and be searched for the longest suffixes of a context.

    Takes 12 bytes per token. Not thread-safe: callers that share an index must hold a lock, except for `grown`.
    `order` holds the sorted positions; it and `text` are valid until the next change.
    """

    def __init__(self) -> None:
        # padded at both ends, so that no read is out of bounds
        self.text = Text(np.full(1024, START, dtype=np.int32), np.full(1024, -1, dtype=np.int32), MAX_MATCH)
        self.order = NOWHERE
        self._spans: list[tuple[int, int]] = []
        self._slot_of: dict[int, int] = {}
        self.sequence_ids: list[int] = []
        self.num_tokens = 0
        self.num_forgotten = 0

    def __contains__(self, sequence_id: int) -> bool:
        return sequence_id in self._slot_of

    def slot(self, sequence_id: int) -> int | None:
        """The slot of a sequence, or None if the index does not hold it."""
        return self._slot_of.get(sequence_id)

    def __len__(self) -> int:
        return len(self._slot_of)

    def lengths(self) -> dict[int, int]:
        """Number of tokens of each sequence in the index, by sequence id."""
        spans = self._spans
        return {key: spans[slot][1] - spans[slot][0] - 1 for key, slot in self._slot_of.items()}

    def tokens(self, sequence_id: int) -> Int32s:
        """A copy of a sequence's tokens. Raises KeyError for an unknown id."""
        begin, end = self._spans[self._slot_of[sequence_id]]
        return self.text.tokens[begin + 1 : end].copy()

    def append(self, sequence_id: int, tokens: Sequence[int] | Int32s) -> None:
        """Add a sequence, or append tokens to one that the index already holds."""
        slot = self._slot_of.get(sequence_id)
        if slot is not None and slot != len(self._spans) - 1:  # no room after it, so it moves to the end
            tokens = np.concatenate([self.tokens(sequence_id), np.asarray(tokens, dtype=np.int32)])
            self.forget([sequence_id])
            slot = None
        if slot is None:
            self.take(self.grown({sequence_id: tokens}))
            return
        begin, end = self.text.size, self.text.size + len(tokens)
        self.text = self._with_room(end)
        self.text.tokens[begin:end], self.text.owners[begin:end] = tokens, slot
        self._spans[slot] = (self._spans[slot][0], end)
        self.num_tokens += len(tokens)
        added = np.arange(begin - 1, end - 1, dtype=np.int32)  # nothing followed the first of these until now
        self.order = merge(self.text.tokens, self.order, sort_positions(self.text.tokens, added))

    def grown(self, sequences: Mapping[int, Sequence[int] | Int32s]) -> Grown:
        """Sort new sequences and merge them, for `take`; the index may be searched, but not changed, meanwhile."""
        lengths = np.array([len(tokens) + 1 for tokens in sequences.values()], dtype=np.int64)
        ends = np.cumsum(lengths) + self.text.size
        begins = ends - lengths
        tokens, owners, size = self._with_room(int(self.text.size + lengths.sum()))
        for begin, new in zip(begins.tolist(), sequences.values(), strict=True):
            tokens[begin], tokens[begin + 1 : begin + 1 + len(new)] = START, new
        owners[self.text.size : size] = np.repeat(np.arange(len(lengths), dtype=np.int32) + len(self._spans), lengths)
        followed = np.ones(size - self.text.size, dtype=bool)
        followed[ends - self.text.size - 1] = False
        order = sorted_by_context(tokens, (followed.nonzero()[0] + self.text.size).astype(np.int32))
        long, short = (self.order, order) if self.order.size >= order.size else (order, self.order)
        spans = dict(zip(sequences, zip(begins.tolist(), ends.tolist(), strict=True), strict=True))
        return Grown(Text(tokens, owners, size), merge(tokens, long, short), spans)

    def take(self, grown: Grown) -> range:
        """Hold what `grown` returned; returns the slots of the new sequences."""
        slots = range(len(self._spans), len(self._spans) + len(grown.spans))
        self.num_tokens += grown.text.size - self.text.size - len(slots)  # the marks do not count as tokens
        self.text, self.order = grown.text, grown.order
        self._spans += grown.spans.values()
        self._slot_of |= zip(grown.spans, slots, strict=True)
        self.sequence_ids += grown.spans
        return slots

    def forget(self, sequence_ids: Iterable[int]) -> None:
        """Remove sequences and overwrite their tokens, in one pass over the index; unknown ids are ignored."""
        gone = [self._slot_of.pop(key) for key in set(sequence_ids) if key in self._slot_of]
        for slot in gone:
            begin, end = self._spans[slot]
            self.text.tokens[begin:end] = _FORGOTTEN
            self.num_tokens -= end - begin - 1
            self.num_forgotten += end - begin - 1
        if gone:
            self.order = self.order[self.text.tokens[self.order] != _FORGOTTEN]

    def order_of(self, slots: Collection[int]) -> Int32s:
        """Sort the positions of some sequences into a separate order, to search in addition to the whole."""
        spans = [np.arange(begin, end - 1, dtype=np.int32) for begin, end in (self._spans[slot] for slot in slots)]
        return sort_positions(self.text.tokens, np.concatenate(spans)) if spans else NOWHERE

    def _with_room(self, size: int) -> Text:
        """The text with `size` tokens in use: the same arrays, or larger copies."""
        tokens, owners, _ = self.text
        if size + MAX_DEPTH + 1 > tokens.size:
            grown = tokens.size + (tokens.size if tokens.size < MUCH else tokens.size // 8)
            more = max(size + MAX_DEPTH + 1, grown) - tokens.size
            tokens = np.concatenate([tokens, np.full(more, START, dtype=np.int32)])
            owners = np.concatenate([owners, np.full(more, -1, dtype=np.int32)])
        return Text(tokens, owners, size)


def reversed_context(context: Sequence[int]) -> Int32s:
    """The last `MAX_MATCH` tokens of a context, newest first."""
    return np.array(context[: -MAX_MATCH - 1 : -1], dtype=np.int32)
