"""The baselines: prompt lookup, SuffixDecoding, and a suffix tree of four branches.

SuffixDecoding (Oliaro et al., 2411.04975, and its reference implementation): for every length m (up to 64) of the live
context's suffix, it drafts at most `alpha * m` tokens best first; a node's probability is the product, along its path,
of each child's share of the occurrences. The length with the greatest sum of probabilities wins, and likewise the
better of the trees from the live text and from all earlier outputs. Trees are not merged.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from precedent.drafters.matching.context_order import MAX_MATCH, START, bounds, matched
from precedent.drafters.matching.token_index import TokenIndex, reversed_context
from precedent.runtime.compiled import Int32s, compiled
from precedent.tree import ROOT, CandidateTree, TreeBuilder, chain
from precedent_replay.pool import Pool
from precedent_replay.turns import Turn

LONGEST_MATCH = 64
"""SuffixDecoding's depth, in tokens."""

MIN_PROBABILITY = 0.1
"""SuffixDecoding drops nodes below this probability."""

LIVE, POOLED = "prompt", "suffix"


class Contender:
    """Proposes a tree of fixed candidates before every step of a turn."""

    name: str

    def begin(self, turn: Turn) -> None:
        """Begin a turn; its answer must not be looked at."""

    def propose(self) -> CandidateTree:
        """Propose candidates for the next step."""
        raise NotImplementedError

    def committed(self, path: Sequence[int], token_ids: Sequence[int]) -> None:
        """Take note of the tree's accepted path, and of the tokens committed (path and target's own)."""

    def end(self) -> None:
        """End the turn."""


class PromptLookup(Contender):
    """transformers' prompt lookup: what followed the first occurrence of the last three (then two, then one) tokens."""

    name = "prompt-lookup"

    def __init__(self, num_tokens: int = 10, longest: int = 3) -> None:
        self._num_tokens, self._longest = num_tokens, longest
        self._text, self._size = np.empty(0, dtype=np.int32), 0

    def begin(self, turn: Turn) -> None:
        """Begin a turn."""
        self._size = len(turn.prompt_ids)
        self._text = np.array(turn.prompt_ids, dtype=np.int32)

    def propose(self) -> CandidateTree:
        """Propose for the next step."""
        text = self._text[: self._size]
        for length in range(min(self._longest, text.size - 1), 0, -1):
            found = first_occurrence(text, length)
            if found >= 0:
                return chain(text[found : found + self._num_tokens].tolist(), LIVE)
        return CandidateTree()

    def committed(self, path: Sequence[int], token_ids: Sequence[int]) -> None:
        """Learn what was committed."""
        end = self._size + len(token_ids)
        if end > self._text.size:
            self._text = np.concatenate([self._text, np.zeros(end, dtype=np.int32)])
        self._text[self._size : end] = token_ids
        self._size = end


@compiled
def first_occurrence(text: Int32s, length: int) -> int:
    """The position after the first earlier occurrence of the text's last `length` tokens, -1 if there is none."""
    last = text.size - length
    for begin in range(last):
        at = 0
        while at < length and text[begin + at] == text[last + at]:
            at += 1
        if at == length:
            return begin + length
    return -1


class _Indexed(Contender):
    """Indexes prompt and answer so far; the next prompt of the same run adds only its new part. The pool is shared."""

    def __init__(self, pool: Pool) -> None:
        self._pool, self._live, self._text = pool, TokenIndex(), [START]

    def begin(self, turn: Turn) -> None:
        known = len(self._text)
        if list(turn.prompt_ids[:known]) != self._text:
            self._live, self._text, known = TokenIndex(), [], 0
        self.committed((), turn.prompt_ids[known:])

    def committed(self, path: Sequence[int], token_ids: Sequence[int]) -> None:
        if token_ids:
            self._live.append(0, token_ids)
            self._text += token_ids


class SuffixDecoding(_Indexed):
    """Proposes the better of the live text's and the pool's suffix tree."""

    def __init__(self, pool: Pool, alpha: float, budget: int) -> None:
        super().__init__(pool)
        self.name = f"suffix-{alpha:g}" if alpha != 1 else "suffix"
        self._alpha, self._budget = alpha, budget

    def propose(self) -> CandidateTree:
        """Propose for the next step."""
        recent = np.array(self._text[: -LONGEST_MATCH - 1 : -1], dtype=np.int32)
        best, best_score = CandidateTree(), 0.0
        for name, index, ended in ((LIVE, self._live, 1), (POOLED, self._pool.index, 0)):
            tokens, parents, score = best_suffix_tree(
                index.text.tokens, index.order, recent, self._alpha, self._budget, ended
            )
            if score > best_score:
                builder = TreeBuilder()
                builder.add_fixed_tree(tokens.tolist(), parents.tolist(), [(name,)] * len(tokens))
                best, best_score = builder.build(), score
        return best


class SuffixTree(_Indexed):
    """Four branches by count: the live text's longest match, and the pool's three commonest next tokens."""

    name = "suffix-tree"

    def __init__(self, pool: Pool, budget: int) -> None:
        super().__init__(pool)
        self._length = max(1, budget // 4)

    def propose(self) -> CandidateTree:
        """Propose for the next step."""
        recent, builder = reversed_context(self._text), TreeBuilder()
        for name, index, branches in ((LIVE, self._live, 1), (POOLED, self._pool.index, 3)):
            for tokens in commonest_chains(index, recent, branches, self._length):
                node = ROOT
                for token in tokens:
                    node = builder.add_fixed(node, token, name)
        return builder.build()


def commonest_chains(index: TokenIndex, recent: Int32s, branches: int, length: int) -> list[list[int]]:
    """For each of the commonest next tokens at the longest match, its commonest continuation."""
    text = index.text.tokens
    for size in range(recent.size, 0, -1):
        found = matching(text, index.order, recent[:size])
        if found.size:
            break
    else:
        return []
    firsts, counts = np.unique(text[found + 1], return_counts=True)
    chosen = firsts[np.argsort(-counts, kind="stable")[:branches]]
    return [commonest_path(text, found[text[found + 1] == one], length).tolist() for one in chosen]


@compiled
def commonest_path(tokens: Int32s, found: Int32s, length: int) -> Int32s:
    """Follow the commonest next token (ties: the lowest) from the positions found; `[at most length]`."""
    path, size, places = np.empty(length, np.int32), 0, found
    for depth in range(1, length + 1):
        following = tokens[places + depth]
        going_on = np.sort(following[following >= 0])
        if going_on.size == 0:
            break
        commonest, most, begin = going_on[0], 0, 0
        for at in range(going_on.size + 1):
            if at == going_on.size or going_on[at] != going_on[begin]:
                if at - begin > most:
                    commonest, most = going_on[begin], at - begin
                begin = at
        path[size] = commonest
        size += 1
        places = places[following == commonest]
    return path[:size]


@compiled
def matching(tokens: Int32s, order: Int32s, recent: Int32s) -> Int32s:
    """The positions in a sorted order that match all of `recent`."""
    low, high = bounds(tokens, order, recent, order.size, 0)
    return order[low:high].copy()


@compiled
def agreeing(tokens: Int32s, found: Int32s, recent: Int32s) -> Int32s:
    """The positions among `found` that match all of `recent`."""
    kept, size = np.empty_like(found), 0
    for position in found:
        if matched(tokens, position, recent) == recent.size:
            kept[size] = position
            size += 1
    return kept[:size]


@compiled
def best_suffix_tree(
    tokens: Int32s, order: Int32s, recent: Int32s, alpha: float, most: int, ended: int = 0
) -> tuple[Int32s, Int32s, float]:
    """SuffixDecoding's tree of one text: tokens, parents, and the sum of the nodes' probabilities.

    `ended` occurrences of the context have no next token and are counted too: the live text's own end is one. Lengths
    are tried longest first; one that cannot reach the best score is skipped.
    """
    best_tokens, best_parents, best_score = np.empty(0, np.int32), np.empty(0, np.int32), 0.0
    for length in range(recent.size, 0, -1):
        size = min(most, int(alpha * length))
        if size <= best_score:
            break
        found = matching(tokens, order, recent[: min(length, MAX_MATCH)])
        if length > MAX_MATCH:  # the sorted order compares no further
            found = agreeing(tokens, found, recent[:length])
        if found.size:
            drafted, parents, score = frequency_tree(tokens, found, size, ended)
            if score > best_score:
                best_tokens, best_parents, best_score = drafted, parents, score
    return best_tokens, best_parents, best_score


@compiled
def frequency_tree(tokens: Int32s, found: Int32s, size: int, ended: int) -> tuple[Int32s, Int32s, float]:
    """Expand best first by path probability: at most `size` nodes, each of at least `MIN_PROBABILITY`."""
    most = size * 10 + 10  # waiting children: at most ten per node reach a tenth of its probability
    begins, ends = np.empty(most, np.int64), np.empty(most, np.int64)
    depths, parents = np.empty(most, np.int64), np.empty(most, np.int32)
    chance, token_of = np.empty(most), np.empty(most, np.int32)
    out, above, score, count, waiting = np.empty(size, np.int32), np.empty(size, np.int32), 0.0, 0, 0
    rows, begin, end, depth, parent, path = found.copy(), 0, found.size, 0, ROOT, 1.0
    while count <= size:
        following = tokens[rows[begin:end] + depth + 1]
        by_token = np.argsort(following, kind="mergesort")
        rows[begin:end] = rows[begin:end][by_token]
        following, low = following[by_token], 0
        total = following.size + (ended if depth == 0 else 0)
        while low < following.size:
            high = low
            while high < following.size and following[high] == following[low]:
                high += 1
            probability = path * (high - low) / total
            if following[low] >= 0 and probability >= MIN_PROBABILITY:
                begins[waiting], ends[waiting], depths[waiting] = begin + low, begin + high, depth + 1
                parents[waiting], chance[waiting], token_of[waiting] = parent, probability, following[low]
                waiting += 1
            low = high
        if waiting == 0 or count == size:
            break
        at = int(np.argmax(chance[:waiting]))
        out[count], above[count] = token_of[at], parents[at]
        begin, end, depth, parent, path = begins[at], ends[at], depths[at], count, chance[at]
        score, count, waiting = score + path, count + 1, waiting - 1
        begins[at], ends[at], depths[at] = begins[waiting], ends[waiting], depths[waiting]
        parents[at], chance[at], token_of[at] = parents[waiting], chance[waiting], token_of[waiting]
    return out[:count], above[:count], score
