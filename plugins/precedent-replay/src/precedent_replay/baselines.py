"""The baselines: prompt lookup, SuffixDecoding, a suffix tree of four branches, and what SGLang and AdaPLD propose.

SuffixDecoding (Oliaro et al., 2411.04975, and its reference implementation): for every length m (up to 64) of the live
context's suffix, it drafts at most `alpha * m` tokens best first; a node's probability is the product, along its path,
of each child's share of the occurrences. The length with the greatest sum of probabilities wins, and likewise the
better of the trees from the live text and from all earlier outputs. Trees are not merged. As one path, as in vLLM, it
follows the commonest child alone.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from heapq import heappop, heappush
from typing import NamedTuple

import numpy as np

from precedent.drafters.matching.context_order import MAX_MATCH, START, bounds, matched
from precedent.drafters.matching.token_index import NOWHERE, TokenIndex, reversed_context
from precedent.runtime.compiled import Int32s, compiled
from precedent.tree import ROOT, CandidateTree, TreeBuilder, chain
from precedent_replay.pool import Pool
from precedent_replay.turns import Turn

LONGEST_MATCH = 64
"""SuffixDecoding's depth, in tokens."""

MIN_PROBABILITY = 0.1
"""SuffixDecoding drops nodes below this probability."""

SGLANG_DEPTH, MAX_BREADTH = 18, 10
"""SGLang's longest match, in tokens, and the most tokens that it follows from one place."""

SHORTEST_COPY = 1
"""AdaPLD's shortest match, in tokens."""

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

    def __init__(self, pool: Pool, alpha: float, budget: int, one_path: bool = False) -> None:
        super().__init__(pool)
        self.name = f"suffix-{alpha:g}" if alpha != 1 else "suffix"
        self._alpha, self._budget, self._one_path = alpha, budget, one_path

    def propose(self) -> CandidateTree:
        """Propose for the next step."""
        recent = np.array(self._text[: -LONGEST_MATCH - 1 : -1], dtype=np.int32)
        best, best_score = CandidateTree(), 0.0
        for name, index, ended in ((LIVE, self._live, 1), (POOLED, self._pool.index, 0)):
            tokens, parents, score = best_suffix_tree(
                index.text.tokens, index.order, recent, self._alpha, self._budget, ended, self._one_path
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
            _, places = longest_match(index, recent)
            for child in next_tokens(index, places)[:branches]:
                node, left, found = ROOT, self._length, [child]
                while found and left:
                    (token, places), left = found[0], left - 1
                    node, found = builder.add_fixed(node, token, name), next_tokens(index, places)
        return builder.build()


class Cursor(NamedTuple):
    """Places of one text that the path to a node agrees with, and the path's score there."""

    score: float
    source: str
    texts: TokenIndex
    places: Int32s


class SglangNgram(_Indexed):
    """SGLang's n-gram speculation with a corpus, as its pull request 37879 has it: one best-first tree over both.

    The trie of live text and the automaton of the corpus each begin at their longest match. A path's score is the
    match's length, over the greatest length, times each token's share of the occurrences in that source (of its ten
    commonest tokens). A token that both propose is one node with the better score, and both go on below it.

    Modelled with counts of occurrences, which are those of trie and automaton. SGLang's trie is given more here: the
    whole prompt, of which it sees the last tokens only, and paths longer than its 18 tokens. Left out: the count of a
    text that is inserted again with every step, and that SGLang fills its fixed number of rows with zeros.
    """

    name = "sglang"

    def __init__(self, pool: Pool, budget: int, one_path: bool = False) -> None:
        super().__init__(pool)
        self._budget, self._one_path = budget, one_path

    def propose(self) -> CandidateTree:
        """Propose for the next step."""
        recent, cursors = reversed_context(self._text)[:SGLANG_DEPTH], list[Cursor]()
        for name, index in ((LIVE, self._live), (POOLED, self._pool.index)):
            length, places = longest_match(index, recent)
            cursors.append(Cursor(length / SGLANG_DEPTH, name, index, places))
        return best_first_tree(cursors, self._budget, self._one_path)


def best_first_tree(cursors: Sequence[Cursor], budget: int, one_path: bool) -> CandidateTree:
    """At most `budget` nodes in order of their best cursor's score; of equal ones, the first found."""
    builder, waiting = TreeBuilder(), list[tuple[float, int, int, int, list[Cursor]]]()
    node, num_seen = ROOT, 0
    while True:
        for token, below in children(cursors).items():
            heappush(waiting, (-below[0].score, num_seen, node, token, below))
            num_seen += 1
        if not waiting or len(builder) == budget:
            return builder.build()
        _, _, parent, token, cursors = heappop(waiting)
        if one_path:
            waiting.clear()
        node = builder.add_fixed(parent, token, cursors[0].source)


def children(cursors: Sequence[Cursor]) -> dict[int, list[Cursor]]:
    """The tokens that follow any of the cursors, and for each where it is found, the best score first."""
    found = defaultdict[int, list[Cursor]](list)
    for cursor in cursors:
        following = next_tokens(cursor.texts, cursor.places)
        total = sum(places.size for _, places in following)
        for token, places in following:
            found[token].append(cursor._replace(score=cursor.score * places.size / total, places=places))
    return {token: sorted(below, key=lambda cursor: -cursor.score) for token, below in found.items()}


class AdaPLD(_Indexed):
    """AdaPLD (Liu et al., 2606.05742): copy what followed the same words, else a similar state, and add branches.

    One place is copied from: of those with the longest match, the one whose state is most similar. Where nothing
    matches, the most similar state alone decides. Branches begin with the target's likeliest next tokens, of which each
    has one successor; they take a quarter of the nodes.

    A replay has no hidden states and no logits. Here the state of a place is the embedding of its request's query (live
    text is most similar to itself), the fallback is the same position in the most similar completion, and the likeliest
    tokens are the commonest after the last token. Beyond the paper, which reuses its own request only, the pool is
    searched too. Left out: which layer's states are compared, and the threshold of the comparison.
    """

    name = "adapld"

    def __init__(self, pool: Pool, budget: int, one_path: bool = False) -> None:
        super().__init__(pool)
        self._branches = 0 if one_path else max(1, budget // 8)
        self._length = max(1, budget - 2 * self._branches)
        self._similar, self._answered = dict[int, float](), 0

    def begin(self, turn: Turn) -> None:
        """Begin a turn."""
        super().begin(turn)
        hits = self._pool.recall(turn.query, tenant="", tokenizer="")
        self._similar, self._answered = {hit.completion_id: hit.similarity for hit in hits}, 0

    def committed(self, path: Sequence[int], token_ids: Sequence[int]) -> None:
        """Learn what was committed."""
        super().committed(path, token_ids)
        self._answered += len(token_ids)

    def propose(self) -> CandidateTree:
        """Propose for the next step."""
        recent, builder = reversed_context(self._text), TreeBuilder()
        texts, node = ((LIVE, self._live), (POOLED, self._pool.index)), ROOT
        name, copied = self._copied([(name, index, *longest_match(index, recent)) for name, index in texts])
        for token in copied[: self._length]:
            node = builder.add_fixed(node, token, name)
        last = [Cursor(1.0, name, index, longest_match(index, recent[:1])[1]) for name, index in texts]
        likely = sorted(children(last).items(), key=lambda child: -child[1][0].score)
        for token, below in [child for child in likely if child[0] not in copied[:1]][: self._branches]:
            node = builder.add_fixed(ROOT, token, below[0].source)
            for successor, _ in next_tokens(below[0].texts, below[0].places)[:1]:
                builder.add_fixed(node, successor, below[0].source)
        return builder.build()

    def _copied(self, matches: Sequence[tuple[str, TokenIndex, int, Int32s]]) -> tuple[str, list[int]]:
        """What follows the place that is copied from, and which text that is."""
        name, index, length, places = max(matches, key=lambda match: match[2])
        if length < SHORTEST_COPY:
            nearest = next(iter(self._similar), None)
            tokens = [] if nearest is None else self._pool.index.tokens(nearest)[self._answered :].tolist()
            return POOLED, tokens
        text, ids = index.text, index.sequence_ids
        similar = np.array([self._similar.get(ids[slot], 0.0) for slot in text.owners[places]])
        best = int(places[np.lexsort((places, similar))[-1]])  # of equally similar ones the latest
        ahead = text.tokens[best + 1 : best + 1 + self._length]
        ends = np.flatnonzero(ahead < 0)
        return name, ahead[: ends[0] if ends.size else None].tolist()


def longest_match(index: TokenIndex, recent: Int32s) -> tuple[int, Int32s]:
    """The length of the longest end of the context (`recent`, newest first) that the index knows, and its places."""
    for length in range(recent.size, 0, -1):
        places = matching(index.text.tokens, index.order, recent[:length])
        if places.size:
            return length, places
    return 0, NOWHERE


def next_tokens(index: TokenIndex, places: Int32s) -> list[tuple[int, Int32s]]:
    """The ten commonest tokens after these places, and where each of them is; of equal ones the lowest first."""
    following = index.text.tokens[places + 1]
    tokens, counts = np.unique(following[following >= 0], return_counts=True)
    commonest = tokens[np.argsort(-counts, kind="stable")[:MAX_BREADTH]].tolist()
    return [(token, places[following == token] + 1) for token in commonest]


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
    tokens: Int32s, order: Int32s, recent: Int32s, alpha: float, most: int, ended: int = 0, one_path: bool = False
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
            drafted, parents, score = frequency_tree(tokens, found, size, ended, one_path)
            if score > best_score:
                best_tokens, best_parents, best_score = drafted, parents, score
    return best_tokens, best_parents, best_score


@compiled
def frequency_tree(
    tokens: Int32s, found: Int32s, size: int, ended: int, one_path: bool
) -> tuple[Int32s, Int32s, float]:
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
        score, count, waiting = score + path, count + 1, 0 if one_path else waiting - 1
        begins[at], ends[at], depths[at] = begins[waiting], ends[waiting], depths[waiting]
        parents[at], chance[at], token_of[at] = parents[waiting], chance[waiting], token_of[waiting]
    return out[:count], above[:count], score
