"""Positions of a text sorted by their contexts, and the search for the longest suffix of the current text.

Reading backwards from a position gives its *context*. In an array of positions sorted by context, all places where the
current text's last m tokens occur are adjacent, and the closer a neighbour, the longer it agrees. This is a suffix
array of the reversed text, cut off at `MAX_MATCH` tokens: longer matches say no more, and bounded comparisons keep
degenerate texts cheap.

All functions are pure. Positions are int32, so an index holds at most 2**31 tokens.
"""

from __future__ import annotations

import numpy as np

from precedent.runtime.compiled import Int32s, Int64s, compiled

START = -1
"""Mark before the first token of every sequence; as a continuation it means that the sequence has ended."""

MAX_MATCH = 24
"""Longest context that is compared, in tokens."""

LENGTHS_BELOW_BEST = 12
"""Matches shorter than the best by more than this weigh almost nothing and are not collected."""


@compiled
def matched(tokens: Int32s, position: int, recent: Int32s) -> int:
    """How many tokens at and before `position` equal `recent` (newest first; `START` only as the last)."""
    length = 0
    while length < recent.size and tokens[position - length] == recent[length]:
        length += 1
    return length


@compiled
def _stands(tokens: Int32s, position: int, recent: Int32s) -> int:
    """Where the context of `position` sorts beside `recent`: -1 before, 1 after, 0 if it agrees with all of it."""
    length = matched(tokens, position, recent)
    if length == recent.size:
        return 0
    return -1 if tokens[position - length] < recent[length] else 1


@compiled
def _context_less(tokens: Int32s, left: int, right: int) -> bool:
    """Whether the context of `left` sorts before that of `right`; equal contexts sort by position."""
    for back in range(MAX_MATCH):
        a, b = tokens[left - back], tokens[right - back]
        if a != b:
            return bool(a < b)
        if a == START:
            break
    return left < right


@compiled
def _place(tokens: Int32s, order: Int32s, size: int, position: int) -> int:
    """Where `position` belongs among the first `size` entries of `order`."""
    low, high = 0, size
    while low < high:
        middle = (low + high) // 2
        if _context_less(tokens, order[middle], position):
            low = middle + 1
        else:
            high = middle
    return low


@compiled
def merge(tokens: Int32s, long: Int32s, short: Int32s) -> Int32s:
    """Merge two orders; cheap if `short` is short, because its entries are placed by bisection."""
    merged = np.empty(long.size + short.size, np.int32)
    taken = 0
    for i in range(short.size):
        place = taken + _place(tokens, long[taken:], long.size - taken, short[i])
        merged[taken + i : place + i] = long[taken:place]
        merged[place + i] = short[i]
        taken = place
    merged[taken + short.size :] = long[taken:]
    return merged


@compiled
def _merge_halves(tokens: Int32s, source: Int32s, target: Int32s, begin: int, middle: int, end: int) -> None:
    left, right = begin, middle
    for i in range(begin, end):
        if left < middle and (right == end or not _context_less(tokens, source[right], source[left])):
            target[i] = source[left]
            left += 1
        else:
            target[i] = source[right]
            right += 1


@compiled
def sort_positions(tokens: Int32s, positions: Int32s) -> Int32s:
    """Sort positions by context: a bottom-up merge sort, n log n comparisons of at most `MAX_MATCH` tokens."""
    source, target = positions.copy(), np.empty_like(positions)
    width, size = 1, positions.size
    while width < size:
        for begin in range(0, size, 2 * width):
            _merge_halves(tokens, source, target, begin, min(begin + width, size), min(begin + 2 * width, size))
        source, target = target, source
        width *= 2
    return source


@compiled
def _sort_groups(tokens: Int32s, order: Int32s, ends: Int64s) -> None:
    begin = 0
    for end in ends:
        if end - begin > 1:
            order[begin:end] = sort_positions(tokens, order[begin:end])
        begin = end


def sorted_by_context(tokens: Int32s, positions: Int32s) -> Int32s:
    """What `sort_positions` returns, in half the time for millions of them: first by the last two tokens, in one key.

    A context of the `START` mark alone sorts as if nothing stood before it.
    """
    last, before = tokens[positions].astype(np.int64), tokens[positions - 1].astype(np.int64)
    keys = last << 32 | np.where(last == START, 0, before - START)
    places = np.argsort(keys, kind="stable")
    keys, order = keys[places], positions[places]
    _sort_groups(tokens, order, np.append(np.flatnonzero(keys[1:] != keys[:-1]) + 1, keys.size))
    return order


@compiled
def _bound(tokens: Int32s, order: Int32s, recent: Int32s, low: int, high: int, least: int) -> int:
    """The first entry of `order[low:high]` whose context stands at `least` or more beside `recent`."""
    while low < high:
        middle = (low + high) // 2
        if _stands(tokens, order[middle], recent) < least:
            low = middle + 1
        else:
            high = middle
    return low


@compiled
def bounds(tokens: Int32s, order: Int32s, recent: Int32s, inner_low: int, inner_high: int) -> tuple[int, int]:
    """The range of `order` whose contexts agree with all of `recent`.

    It must contain `inner_low:inner_high` (pass `order.size` and 0 if nothing is known).
    """
    begin = _bound(tokens, order, recent, 0, inner_low, 0)
    return begin, _bound(tokens, order, recent, max(begin, inner_high), order.size, 1)


@compiled
def _nearest(tokens: Int32s, run: Int32s, low: int, high: int, recent: Int32s) -> int:
    """The longer match of the entries just before `low` and at `high`, in tokens."""
    before = matched(tokens, run[low - 1], recent) if low > 0 else 0
    behind = matched(tokens, run[high], recent) if high < run.size else 0
    return max(before, behind)


@compiled
def longest_matches(
    tokens: Int32s, order: Int32s, recent: Int32s, found: Int32s, lengths: Int32s, count: int, room: int
) -> int:
    """Append to `found` (holding `count`) at most `room` positions that agree with `recent`, longest first.

    The lengths of their matches go to `lengths`. All places of one length are found together; if they exceed the room,
    an even sample of them is taken. Returns the new count.
    """
    low = high = _bound(tokens, order, recent, 0, order.size, 0)
    least = 1
    while room > 0:
        length = _nearest(tokens, order, low, high, recent)
        if length < least:
            break
        least = max(least, length - LENGTHS_BELOW_BEST)
        begin, end = bounds(tokens, order, recent[:length], low, high)
        total = low - begin + end - high
        taken = min(room, total)
        for i in range(taken):
            place = begin + i * total // taken
            found[count + i] = order[place if place < low else place - low + high]
            lengths[count + i] = length
        low, high, count, room = begin, end, count + taken, room - taken
    return count
