"""The tree that grows from votes, against votes counted by hand."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from precedent.drafters.base import Candidates
from precedent.drafters.matching.context_order import START
from precedent.drafters.matching.occurrences import HIT, VoteWeights
from precedent.drafters.matching.token_index import TokenIndex, reversed_context
from precedent.drafters.matching.vote_tree import MAX_DEPTH, VotePrior, grow, prior_estimate
from precedent.tree import ROOT

CONTEXT = 99
BELIEVES_SHARES = VotePrior(offset=0.0, odds=1.0, length=0.0, number=0.0, similarity=0.0)


def grown(
    rows: list[list[int]], weights: list[float], budget: int, end_ids: tuple[int, ...] = ()
) -> tuple[Candidates, list[int]]:
    """The tree of sequences that go on like these rows, and the row of each node's heaviest vote."""
    index = TokenIndex()
    for number, row in enumerate(rows):
        index.append(number, [CONTEXT, *row])
    hits = [(-1, 0, 0.0), *((slot, 0, float(np.log(weight))) for slot, weight in enumerate(weights))]
    weighing = VoteWeights(np.array(hits, dtype=HIT), np.zeros(len(rows)), 0.0)
    votes = index.match(reversed_context([CONTEXT]), weighing, 1000)
    nodes, heaviest = grow(index.text.tokens, votes, budget, BELIEVES_SHARES, np.array(end_ids, dtype=np.int32))
    return Candidates("test", nodes), votes["slot"][heaviest].tolist()


def expected_share(share: float, count: int) -> float:
    """A vote share as the prior believes it: a lone vote is never certain."""
    return min(max(share * (count + 0.5) / (count + 1.0), 1e-4), 0.9999)


@settings(max_examples=100, deadline=None)
@given(
    st.lists(
        st.tuples(st.lists(st.integers(0, 2), min_size=4, max_size=4), st.floats(0.1, 5.0)), min_size=1, max_size=12
    )
)
def test_shares_equal_the_votes_counted_by_hand(votes: list[tuple[list[int], float]]) -> None:
    """Every node's estimate is the weight of the rows through it over the weight of the rows through its parent."""
    rows, weights = [row for row, _ in votes], [weight for _, weight in votes]
    found, _ = grown(rows, weights, 1000)
    paths: list[tuple[int, ...]] = []
    for token, parent, estimate in zip(found.token_ids, found.parents, found.estimates, strict=True):
        above = () if parent == ROOT else paths[parent]
        paths.append((*above, token))
        through = [sum(w for row, w in votes if tuple(row[: len(p)]) == p) for p in (above, paths[-1])]
        count = sum(tuple(row[: len(paths[-1])]) == paths[-1] for row in rows)
        assert estimate == pytest.approx(expected_share(through[1] / through[0], count))
    heavy = {tuple(row[:1]) for row in rows if sum(w for r, w in votes if r[0] == row[0]) > 0.05 * sum(weights)}
    assert heavy <= set(paths)


def test_the_tree_branches_where_votes_split_and_runs_deep_where_they_agree() -> None:
    """Two continuations with equal votes both appear below their common prefix."""
    found, _ = grown([[1, 2, 3, 4], [1, 2, 5, 6]], [1.0, 1.0], 6)
    assert found.token_ids[:2] == [1, 2]
    assert {found.parents[found.token_ids.index(token)] for token in (3, 5)} == {1}
    assert sorted(found.token_ids) == [1, 2, 3, 4, 5, 6]


def test_nothing_hangs_below_an_end_token_or_behind_the_end_of_a_sequence() -> None:
    """Ended rows propose nothing, and an end token is a leaf."""
    found, _ = grown([[1, 2, 3], [4]], [1.0, 1.0], 10, end_ids=(2,))
    assert sorted(found.token_ids) == [1, 2, 4]


def test_the_best_row_is_the_heaviest_vote() -> None:
    """Credit goes to the row with the greatest weight through a node."""
    found, heaviest = grown([[1, 2], [1, 3], [1, 2]], [1.0, 5.0, 2.0], 10)
    best = dict(zip(found.token_ids, heaviest, strict=True))
    assert best == {1: 1, 3: 1, 2: 2}


def test_the_prior_grows_with_votes_and_match_length() -> None:
    """More agreement and longer matches are believed more, and nothing is certain."""
    prior = VotePrior(offset=-1.3, odds=0.8, length=0.5, number=0.1, similarity=0.1, sure_from=4.0, doubt=0.1)
    evidence = [(0.2, 5, 3, 0), (0.8, 5, 3, 0), (0.8, 5, 12, 0), (0.8, 5, 12, 3), (0.8, 5, 12, 4)]
    estimates = [prior_estimate(prior, *features) for features in evidence]
    assert estimates == sorted(estimates)
    assert 0 < estimates[0] < estimates[-1] < 1


def test_a_continuation_is_followed_as_deep_as_allowed() -> None:
    """One long chain, with distinct bins where the evidence differs."""
    found, _ = grown([list(range(100, 300))] * 40, [1.0] * 40, 1000)
    assert found.token_ids == list(range(100, 100 + MAX_DEPTH))
    assert found.parents == [ROOT, *range(MAX_DEPTH - 1)]
    assert len(set(found.nodes["bin"].tolist())) > 3
    assert START not in found.token_ids
