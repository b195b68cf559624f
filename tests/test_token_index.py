"""The token index against a naive reference, and the expansion of votes into a tree."""

from __future__ import annotations

from collections import Counter

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from precedent.drafters.expand import Evidence, LogisticPrior, expand
from precedent.drafters.token_index import MAX_MATCH, START, TokenIndex
from precedent.tree import ROOT

SEQUENCES = st.lists(st.lists(st.integers(0, 3), max_size=30), min_size=1, max_size=6)
CONTEXTS = st.lists(st.integers(0, 3), min_size=1, max_size=30)


def indexed(sequences: list[list[int]]) -> TokenIndex:
    """An index with the sequences under ids from 100 on."""
    index = TokenIndex()
    for number, tokens in enumerate(sequences):
        index.append(100 + number, tokens)
    return index


def naive_matches(sequences: dict[int, list[int]], context: list[int]) -> Counter[tuple[int, int, tuple[int, ...]]]:
    """(sequence id, length of the common suffix, what follows) of every place where the context's end occurs."""
    context, found = context[-MAX_MATCH:], []
    for key, tokens in sequences.items():
        marked = [START, *tokens]
        for end in range(1, len(marked) + 1):
            length = 0
            while length < min(end, len(context)) and marked[end - 1 - length] == context[-1 - length]:
                length += 1
            if length:
                found.append((key, length, tuple(marked[end : end + 5])))
    at_least = 2 if any(length >= 2 for _, length, _ in found) else 1
    return Counter(match for match in found if match[1] >= at_least)


def index_matches(index: TokenIndex, context: list[int]) -> Counter[tuple[int, int, tuple[int, ...]]]:
    """The same from the index."""
    found = index.match(context, limit=10_000)
    following = index.continuations(found.positions, 5)
    return Counter(
        (index.sequence_ids[slot], int(length), tuple(token for token in row if token >= 0))
        for slot, length, row in zip(found.slots, found.lengths, following.tolist(), strict=True)
    )


@settings(max_examples=150, deadline=None)
@given(SEQUENCES, CONTEXTS, st.booleans())
def test_matches_and_continuations_equal_the_naive_reference(
    sequences: list[list[int]], context: list[int], from_start: bool
) -> None:
    """Every occurrence, its length and what follows it, with and without the START mark before the context."""
    context = [START, *context] if from_start else context
    expected = naive_matches(dict(enumerate(sequences, 100)), context)
    assert index_matches(indexed(sequences), context) == expected


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
    index.forget(gone)
    del kept[gone]
    assert index_matches(index, context) == naive_matches(kept, context)
    assert index.num_tokens == sum(map(len, kept.values()))
    assert gone not in index
    assert all(index.tokens(key).tolist() == tokens for key, tokens in kept.items())


def test_forgotten_tokens_are_overwritten() -> None:
    """Nothing of a forgotten sequence stays in the array or in the postings."""
    index = indexed([[7, 8, 9], [1, 2]])
    index.forget(100)
    assert not np.isin([7, 8, 9], index._tokens).any()
    assert all(key & 0xFFFFFFFF not in (7, 8, 9) for key in index._postings)


def test_no_match_crosses_a_boundary() -> None:
    """The end of one sequence and the beginning of the next do not make a bigram."""
    index = indexed([[1, 2], [3, 4]])
    found = index.match([2, 3])
    assert found.lengths.tolist() == [1]
    assert index.continuations(found.positions, 4).tolist() == [[4, START, START, START]]
    assert index.continuations(index.match([1, 2]).positions, 2).tolist() == [[START, START]]


def test_the_start_is_an_anchor() -> None:
    """At step 0 the context is the START mark, which stands before every sequence and nowhere else."""
    index = indexed([[5, 6], [7, 8], [5, 9]])
    found = index.match([START])
    assert index.continuations(found.positions, 1).ravel().tolist() == [5, 7, 5]
    assert index.match([START, 5]).lengths.tolist() == [2, 2]


def test_an_unknown_token_and_an_empty_context_match_nothing() -> None:
    """Nothing is invented."""
    index = indexed([[1, 2, 3]])
    assert len(index.match([99])) == len(index.match([])) == len(TokenIndex().match([START])) == 0


def test_the_limit_keeps_long_matches_then_preferred_then_new_ones() -> None:
    """When there are too many occurrences, the best ones stay."""
    index = indexed([[9, 1, 2, 50], [1, 2, 51], [1, 2, 52], [1, 2, 53]])
    follow = index.continuations(index.match([9, 1, 2], limit=2).positions, 1).ravel().tolist()
    assert follow == [50, 53]
    preference = np.array([0.0, 3.0, 0.0, 0.0])
    follow = index.continuations(index.match([9, 1, 2], limit=2, preference=preference).positions, 1).ravel().tolist()
    assert follow == [50, 51]


def evidence(rows: list[list[int]], weights: list[float]) -> Evidence:
    """Votes for these continuations, all with a match of two tokens."""
    number = len(rows)
    return Evidence(
        np.array(rows, dtype=np.int32), np.log(weights), np.full(number, 2, np.int64), np.zeros(number, np.int64)
    )


def share_only(share: float, count: int, length: int, similarity: int) -> float:
    """An estimator that believes the votes."""
    return share


@settings(max_examples=100, deadline=None)
@given(
    st.lists(
        st.tuples(st.lists(st.integers(0, 2), min_size=4, max_size=4), st.floats(0.1, 5.0)), min_size=1, max_size=12
    )
)
def test_shares_equal_the_votes_counted_by_hand(votes: list[tuple[list[int], float]]) -> None:
    """Every node's estimate is the weight of the rows through it over the weight of the rows through its parent."""
    rows, weights = [row for row, _ in votes], [weight for _, weight in votes]
    found = expand("test", evidence(rows, weights), 1000, share_only).candidates
    paths: list[tuple[int, ...]] = []
    for token, parent, estimate in zip(found.token_ids, found.parents, found.estimates, strict=True):
        above = () if parent == ROOT else paths[parent]
        paths.append((*above, token))
        through = [sum(w for row, w in votes if tuple(row[: len(p)]) == p) for p in (above, paths[-1])]
        assert estimate == pytest.approx(through[1] / through[0])
    heavy = {tuple(row[:1]) for row in rows if sum(w for r, w in votes if r[0] == row[0]) > 0.05 * sum(weights)}
    assert heavy <= set(paths)


def test_the_tree_branches_where_votes_split_and_runs_deep_where_they_agree() -> None:
    """Two continuations with equal votes both appear below their common prefix."""
    found = expand("test", evidence([[1, 2, 3, 4], [1, 2, 5, 6]], [1.0, 1.0]), 6, share_only).candidates
    assert found.token_ids[:2] == [1, 2]
    assert {found.parents[found.token_ids.index(token)] for token in (3, 5)} == {1}
    assert sorted(found.token_ids) == [1, 2, 3, 4, 5, 6]


def test_nodes_come_in_order_of_path_probability() -> None:
    """A small budget goes to the likeliest path."""
    found = expand("test", evidence([[1, 2, 3], [4, 5, 6]], [3.0, 1.0]), 3, share_only).candidates
    assert found.token_ids == [1, 2, 3]


def test_nothing_hangs_below_an_end_token_or_behind_the_end_of_a_sequence() -> None:
    """Ended rows propose nothing, and an end token is a leaf."""
    rows = [[1, 2, 3], [4, START, START]]
    found = expand("test", evidence(rows, [1.0, 1.0]), 10, share_only, end_ids={2}).candidates
    assert sorted(found.token_ids) == [1, 2, 4]


def test_the_best_row_is_the_heaviest_vote() -> None:
    """Credit goes to the row with the greatest weight through a node."""
    expansion = expand("test", evidence([[1, 2], [1, 3], [1, 2]], [1.0, 5.0, 2.0]), 10, share_only)
    best = dict(zip(expansion.candidates.token_ids, expansion.best_rows, strict=True))
    assert best == {1: 1, 3: 1, 2: 2}


def test_the_prior_grows_with_votes_and_match_length() -> None:
    """More agreement and longer matches are believed more, and nothing is certain."""
    prior = LogisticPrior(offset=-1.3, odds=0.8, length=0.5, count=0.1, similarity=0.1)
    assert 0 < prior(0.2, 5, 3, 0) < prior(0.8, 5, 3, 0) < prior(0.8, 5, 12, 0) < prior(0.8, 5, 12, 3) < 1
