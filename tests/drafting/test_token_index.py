"""The token index against a naive reference."""

from __future__ import annotations

import itertools
from collections import Counter

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

from precedent.drafters.matching.context_order import LENGTHS_BELOW_BEST, MAX_MATCH, START
from precedent.drafters.matching.occurrences import HIT, Occurrences, VoteWeights
from precedent.drafters.matching.token_index import TokenIndex, reversed_context

SEQUENCES = st.lists(st.lists(st.integers(0, 3), max_size=30), min_size=1, max_size=6)
CONTEXTS = st.lists(st.integers(0, 3), min_size=1, max_size=30)


def indexed(sequences: list[list[int]]) -> TokenIndex:
    """An index with the sequences under ids from 100 on."""
    index = TokenIndex()
    for number, tokens in enumerate(sequences):
        index.append(100 + number, tokens)
    return index


def weights(index: TokenIndex, hits: dict[int, float] | None = None) -> VoteWeights:
    """Equal weights, but for the slots given."""
    rows = [(-1, 0, 0.0), *((slot, 1, weight) for slot, weight in sorted((hits or {}).items()))]
    return VoteWeights(np.array(rows, dtype=HIT), np.zeros(len(index.sequence_ids) + 1), 1e-3)


def match(
    index: TokenIndex, context: list[int], limit: int = 10_000, hits: dict[int, float] | None = None
) -> Occurrences:
    """The occurrences of a context, in order of the text."""
    found = index.match(reversed_context(context), weights(index, hits), limit)
    return found[np.argsort(found["position"])]


def following(index: TokenIndex, found: Occurrences, depth: int = 1) -> list[tuple[int, ...]]:
    """The tokens behind each occurrence, to the end of its sequence."""
    rows = []
    for position in found["position"].tolist():
        row = index.text.tokens[position + 1 : position + 1 + depth].tolist()
        rows.append(tuple(row[: next((i for i, token in enumerate(row) if token < 0), len(row))]))
    return rows


Match = tuple[int, int, tuple[int, ...]]


def naive_matches(sequences: dict[int, list[int]], context: list[int]) -> Counter[Match]:
    """(sequence id, length of the common suffix, what follows) of every place where the context's end goes on."""
    context, found = context[-MAX_MATCH:], []
    for key, tokens in sequences.items():
        marked = [START, *tokens]
        for end in range(1, len(marked)):
            length = 0
            while length < min(end, len(context)) and marked[end - 1 - length] == context[-1 - length]:
                length += 1
            if length:
                found.append((key, length, tuple(marked[end : end + 5])))
    return Counter(found)


def long_enough(found: Counter[Match], longest: int) -> Counter[Match]:
    """Without the matches that are too much shorter than the longest to be collected for certain."""
    return Counter({match: count for match, count in found.items() if match[1] >= longest - LENGTHS_BELOW_BEST})


def check_matches(index: TokenIndex, sequences: dict[int, list[int]], context: list[int]) -> None:
    """Fail unless the index finds what the naive reference finds."""
    found = match(index, context)
    rows = zip(found["slot"].tolist(), found["length"].tolist(), following(index, found, 5), strict=True)
    actual = Counter((index.sequence_ids[slot], length, row) for slot, length, row in rows)
    expected = naive_matches(sequences, context)
    assert actual <= expected
    longest = max((length for _, length, _ in expected), default=0)
    assert long_enough(expected, longest) <= actual


@settings(max_examples=150, deadline=None)
@given(SEQUENCES, CONTEXTS, st.booleans())
def test_matches_and_continuations_equal_the_naive_reference(
    sequences: list[list[int]], context: list[int], from_start: bool
) -> None:
    """Every occurrence, its length and what follows it, with and without the START mark before the context."""
    context = [START, *context] if from_start else context
    check_matches(indexed(sequences), dict(enumerate(sequences, 100)), context)


@settings(max_examples=100, deadline=None)
@given(SEQUENCES, CONTEXTS, st.data())
def test_growth_and_forgetting_equal_a_fresh_index(
    sequences: list[list[int]], context: list[int], data: st.DataObject
) -> None:
    """Sequences that grew in pieces, in any order, and forgotten ones leave what a fresh index would hold."""
    index, kept = TokenIndex(), {}
    for number, tokens in enumerate(sequences):
        index.append(number, tokens)
        kept[number] = list(tokens)
    for number in data.draw(st.lists(st.sampled_from(range(len(sequences))), max_size=4)):
        index.append(number, [1, 2])
        kept[number] += [1, 2]
    gone = data.draw(st.sampled_from(range(len(sequences))))
    index.forget([gone, 999])
    del kept[gone]
    check_matches(index, kept, context)
    assert index.num_tokens == sum(map(len, kept.values()))
    assert gone not in index
    assert all(index.tokens(key).tolist() == tokens for key, tokens in kept.items())


def test_many_tokens_keep_the_orders_sorted_and_complete() -> None:
    """Small and large additions, merges of the tail and forgetting leave every position in exactly one place."""
    rng, index, kept = np.random.default_rng(5), TokenIndex(min_tail=64), {}
    for key in range(60):
        kept[key] = rng.integers(0, 30, rng.integers(0, 60)).tolist()
        index.append(key, kept[key])
        if key % 9 == 8:
            index.forget([key - 4])
            del kept[key - 4]
        tail, order, ends = index.orders
        text = index.text
        live = np.concatenate([order, tail])
        followed = np.flatnonzero(
            (text.owners[:-1] >= 0) & (text.tokens[:-1] >= START) & (text.owners[1:] == text.owners[:-1])
        )
        assert sorted(live.tolist()) == followed.tolist()
        for run in (*np.split(order, ends[:-1]), tail):
            assert run.tolist() == sorted(run.tolist(), key=lambda place: context_key(text.tokens, place))
    check_matches(index, kept, kept[53][:6])


def context_key(tokens: NDArray[np.int32], place: int) -> tuple[tuple[int, ...], int]:
    """What a position is sorted by: the tokens from it backwards, to the START mark or `MAX_MATCH`."""
    context = tokens[place : place - MAX_MATCH : -1].tolist()
    return tuple(context[: context.index(START) + 1] if START in context else context), place


def test_forgotten_tokens_are_overwritten() -> None:
    """Nothing of a forgotten sequence stays in the array or is found."""
    index = indexed([[7, 8, 9], [1, 2]])
    index.forget([100])
    assert not np.isin([7, 8, 9], index.text.tokens).any()
    assert not len(match(index, [7, 8]))


def test_no_match_crosses_a_boundary() -> None:
    """The end of one sequence and the beginning of the next do not make a bigram."""
    index = indexed([[1, 2], [3, 4]])
    found = match(index, [2, 3])
    assert found["length"].tolist() == [1]
    assert following(index, found, 4) == [(4,)]
    assert not len(match(index, [1, 2]))  # nothing follows there


def test_the_start_is_an_anchor() -> None:
    """At step 0 the context is the START mark, which stands before every sequence and nowhere else."""
    index = indexed([[5, 6], [7, 8], [5, 9]])
    assert following(index, match(index, [START])) == [(5,), (7,), (5,)]
    assert match(index, [START, 5])["length"].tolist() == [2, 2]


def test_an_unknown_token_and_an_empty_context_match_nothing() -> None:
    """Nothing is invented."""
    index = indexed([[1, 2, 3]])
    assert len(match(index, [99])) == len(match(index, [])) == len(match(TokenIndex(), [START])) == 0


def test_the_limit_keeps_long_matches_then_preferred_then_new_ones() -> None:
    """When there are too many occurrences, the best ones stay."""
    index = indexed([[9, 1, 2, 50], [1, 2, 51], [1, 2, 52], [1, 2, 53]])
    assert following(index, match(index, [9, 1, 2], limit=2)) == [(50,), (53,)]
    assert following(index, match(index, [9, 1, 2], limit=2, hits={1: 3.0})) == [(50,), (51,)]


def test_hits_are_found_in_a_crowd() -> None:
    """Among more places than are looked at, those in a near order are never missed, and none comes twice."""
    index = indexed([[1, 2, 1000 + number] for number in range(3000)])
    near = index.order_of([17, 2900])
    found = index.match(reversed_context([1, 2]), weights(index, {17: 5.0, 2900: 4.0}), 8, near)
    assert {(1017,), (3900,)} <= set(following(index, found))
    assert len(found) == len(set(found["position"].tolist())) == 8
    assert found["bin"].tolist().count(1) == 2


def test_a_crowd_is_sampled_evenly() -> None:
    """More places of one length than are collected: the sample comes from everywhere, not from one corner."""
    index = indexed([[1, 2, 1000 + number] for number in range(3000)])
    numbers = sorted(token - 1000 for (token,) in following(index, match(index, [1, 2])))
    assert len(numbers) >= 200
    assert max(b - a for a, b in itertools.pairwise([0, *numbers, 3000])) < 60
