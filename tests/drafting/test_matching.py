"""The token index against a naive reference, and the tree that grows from votes against votes counted by hand."""

from __future__ import annotations

import itertools
from collections import Counter

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from precedent.drafters import Candidates
from precedent.drafters.matching.context_order import LENGTHS_BELOW_BEST, MAX_MATCH, START
from precedent.drafters.matching.occurrences import HIT, Occurrences, VoteWeights, find
from precedent.drafters.matching.token_index import NOWHERE, TokenIndex, reversed_context
from precedent.drafters.matching.vote_tree import VotePrior, grow
from precedent.tree import ROOT

TOKENS = st.sampled_from([0, 1, 2, 2**31 - 1])
SEQUENCES = st.lists(st.lists(TOKENS, max_size=30), min_size=1, max_size=6)
CONTEXTS = st.lists(TOKENS, min_size=1, max_size=30)


def indexed(sequences: list[list[int]]) -> TokenIndex:
    """An index with the sequences under ids from 100 on."""
    index = TokenIndex()
    for number, tokens in enumerate(sequences):
        index.append(100 + number, tokens)
    return index


def match(
    index: TokenIndex, context: list[int], limit: int = 10_000, hits: dict[int, float] | None = None
) -> Occurrences:
    """The occurrences of a context, in order of the text; slots weigh the same, but for the hits."""
    rows = [(-1, 0, 0.0), *((slot, 1, weight) for slot, weight in sorted((hits or {}).items()))]
    weights = VoteWeights(np.array(rows, dtype=HIT), np.zeros(len(index.sequence_ids) + 1), 1e-3)
    found = find(index.text, index.order_of(list(hits or {})), index.order, reversed_context(context), weights, limit)
    return found[np.argsort(found["position"])]


def following(index: TokenIndex, found: Occurrences, depth: int = 1) -> list[tuple[int, ...]]:
    """The tokens behind each occurrence, to the end of its sequence."""
    rows = (index.text.tokens[at + 1 : at + 1 + depth].tolist() for at in found["position"].tolist())
    return [tuple(itertools.takewhile(lambda token: token >= 0, row)) for row in rows]


Match = tuple[int, int, tuple[int, ...]]


def naive_matches(sequences: dict[int, list[int]], context: list[int]) -> Counter[Match]:
    """(sequence id, length of the common suffix, what follows) of every place where the context's end goes on."""
    context, found = context[-MAX_MATCH:], Counter[Match]()
    for key, tokens in sequences.items():
        marked = [START, *tokens]
        for end in range(1, len(marked)):
            length = 0
            while length < min(end, len(context)) and marked[end - 1 - length] == context[-1 - length]:
                length += 1
            if length:
                found[key, length, tuple(marked[end : end + 5])] += 1
    return found


def check_matches(index: TokenIndex, sequences: dict[int, list[int]], context: list[int]) -> None:
    """Fail unless the index finds what the naive reference finds.

    Matches that are much shorter than the longest are not collected for certain.
    """
    found = match(index, context)
    rows = zip(found["slot"].tolist(), found["length"].tolist(), following(index, found, 5), strict=True)
    actual = Counter((index.sequence_ids[slot], length, row) for slot, length, row in rows)
    expected = naive_matches(sequences, context)
    assert actual <= expected
    least = max((length for _, length, _ in expected), default=0) - LENGTHS_BELOW_BEST
    assert Counter({each: count for each, count in expected.items() if each[1] >= least}) <= actual


@settings(max_examples=150, deadline=None)
@given(SEQUENCES, CONTEXTS, st.booleans(), st.data())
def test_matches_and_continuations_equal_the_naive_reference(
    sequences: list[list[int]], context: list[int], from_start: bool, data: st.DataObject
) -> None:
    """Of sequences that came together, one by one or in pieces, without those that were forgotten."""
    index, kept = TokenIndex(), {number: list(tokens) for number, tokens in enumerate(sequences)}
    context = [START, *context] if from_start else context
    together = data.draw(st.integers(1, len(sequences)))
    index.append(0, sequences[0])
    index.take(index.grown({number: kept[number] for number in range(1, together)}))
    for number in range(together, len(sequences)):
        index.append(number, sequences[number])
    check_matches(index, kept, context)
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


def test_no_match_crosses_a_boundary_and_the_start_is_an_anchor() -> None:
    """At step 0 the context is the START mark, which stands before every sequence and nowhere else."""
    index = indexed([[1, 2], [3, 4], [1, 5]])
    found = match(index, [2, 3])
    assert found["length"].tolist() == [1]
    assert following(index, found, 4) == [(4,)]
    assert not len(match(index, [1, 2]))  # nothing follows there
    assert following(index, match(index, [START])) == [(1,), (3,), (1,)]
    assert match(index, [START, 1])["length"].tolist() == [2, 2]
    assert len(match(index, [99])) == len(match(index, [])) == len(match(TokenIndex(), [START])) == 0


# The tree that grows from votes

CONTEXT = 99
BELIEVES_SHARES = VotePrior(offset=0.0, odds=1.0, length=0.0, number=0.0, similarity=0.0)


def grown(
    rows: list[list[int]], weights: list[float], budget: int, end_ids: tuple[int, ...] = ()
) -> tuple[Candidates, list[int]]:
    """The tree of sequences that go on like these rows, and the row of each node's heaviest vote."""
    index = indexed([[CONTEXT, *row] for row in rows])
    hits = [(-1, 0, 0.0), *((slot, 0, float(np.log(weight))) for slot, weight in enumerate(weights))]
    weighing = VoteWeights(np.array(hits, dtype=HIT), np.zeros(len(rows)), 0.0)
    votes = find(index.text, NOWHERE, index.order, reversed_context([CONTEXT]), weighing, 1000)
    ends = np.array(end_ids, dtype=np.int32)
    nodes, heaviest = grow(index.text.tokens, votes, weighing.length, budget, BELIEVES_SHARES, ends)
    return Candidates("test", nodes), votes["slot"][heaviest].tolist()


@settings(max_examples=100, deadline=None)
@given(
    st.lists(
        st.tuples(st.lists(st.integers(0, 2), min_size=4, max_size=4), st.floats(0.1, 5.0)), min_size=1, max_size=12
    )
)
def test_shares_equal_the_votes_counted_by_hand(votes: list[tuple[list[int], float]]) -> None:
    """A node's estimate is the weight of the rows through it over that through its parent; never certain."""
    rows, weights = [row for row, _ in votes], [weight for _, weight in votes]
    found, _ = grown(rows, weights, 1000)
    paths: list[tuple[int, ...]] = []
    for token, parent, estimate in zip(found.token_ids, found.parents, found.estimates, strict=True):
        above = () if parent == ROOT else paths[parent]
        paths.append((*above, token))
        through = [sum(w for row, w in votes if tuple(row[: len(p)]) == p) for p in (above, paths[-1])]
        count = sum(tuple(row[: len(paths[-1])]) == paths[-1] for row in rows)
        share = through[1] / through[0] * (count + 0.5) / (count + 1.0)
        assert estimate == pytest.approx(min(max(share, 1e-4), 0.9999))
    heavy = {tuple(row[:1]) for row in rows if sum(w for r, w in votes if r[0] == row[0]) > 0.05 * sum(weights)}
    assert heavy <= set(paths)


def test_nothing_of_a_forgotten_sequence_stays() -> None:
    index = indexed([[7, 8, 9], [1, 2]])
    index.forget([100])
    assert not np.isin([7, 8, 9], index.text.tokens).any()
    assert not len(match(index, [7, 8]))
