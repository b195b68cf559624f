"""What else than its words brings a completion near a request, and that similarity still comes first."""

from __future__ import annotations

from typing import Any

import pytest

from precedent.cache import Completion, SpeculationCache
from precedent.config import SamplingParams
from precedent.drafters.base import Candidates
from precedent.drafters.recall.drafter import RecallDrafter
from precedent.drafters.recall.weights import RECORD, SAME_STEP, SAME_TOOLS, YOUTH, kinship
from precedent.drafters.request import Request
from precedent.runtime.background import AtOnce
from precedent.tree import ROOT
from precedent_testing.embedders import HashEmbedder


def request(**keys: str) -> Request:
    return Request("r", (1, 2, 3), SamplingParams(), query="refund order 7", **keys)


def completion(number: int, **fields: Any) -> Completion:
    return Completion((number,), "tok", "model", id=number, **fields)


def test_the_same_step_and_the_same_tools_count_only_where_they_are_said() -> None:
    pair = [completion(1, workflow_step="refund", tools="abc"), completion(2, workflow_step="greet", tools="xyz")]
    found = kinship(pair, request(workflow_step="refund", tools="abc"))
    assert found[1] - found[2] == pytest.approx(SAME_STEP + SAME_TOOLS - YOUTH / 2)
    unsaid = kinship([completion(1), completion(2, workflow_step="greet")], request())
    assert unsaid[1] - unsaid[2] == pytest.approx(-YOUTH / 2)


def test_a_record_needs_many_tokens_and_is_bounded() -> None:
    few, many, bad = kinship(
        [completion(5, accepted=2), completion(6, accepted=500, rejected=10), completion(7, rejected=10_000)], request()
    ).values()
    assert 0 < few - YOUTH / 3 < RECORD / 3
    assert many - YOUTH * 2 / 3 == pytest.approx(RECORD)
    assert bad - YOUTH == pytest.approx(-RECORD)


def first_token(found: Candidates) -> int:
    top = [node for node, parent in enumerate(found.parents) if parent == ROOT]
    return found.token_ids[max(top, key=lambda node: found.estimates[node])]


@pytest.mark.parametrize("key", ["workflow_step", "tools"])
def test_of_two_answers_to_the_same_words_the_one_from_the_same_place_comes_first(key: str) -> None:
    """Through the real cache: the keys are stored with the completion and read for the nearest."""
    cache = SpeculationCache.open(embedder=HashEmbedder())
    for token, place in ((10, "refunds"), (20, "orders")):
        cache.insert(Completion((token, 9, 2), "tok", "m", query="refund order 7", **{key: place}))
    drafter = RecallDrafter(cache, "tok", AtOnce())
    for token, place in ((10, "refunds"), (20, "orders")):
        assert first_token(drafter.begin(request(**{key: place})).match(4)) == token
    drafter.close()


def test_a_completion_that_was_right_comes_before_one_that_was_wrong() -> None:
    cache = SpeculationCache.open(embedder=HashEmbedder())
    right = cache.insert(Completion((10, 9, 2), "tok", "m", query="refund order 7"))
    wrong = cache.insert(Completion((20, 9, 2), "tok", "m", query="refund order 7"))
    cache.credit({right: (200, 5), wrong: (5, 200)})
    drafter = RecallDrafter(cache, "tok", AtOnce())
    assert first_token(drafter.begin(request()).match(4)) == 10
    drafter.close()


def test_another_tenants_completions_are_not_among_the_kin() -> None:
    cache = SpeculationCache.open(embedder=HashEmbedder())
    own = cache.insert(Completion((1,), "tok", "m", tenant="a", query="q"))
    other = cache.insert(Completion((1,), "tok", "m", tenant="b", query="q"))
    assert [one.id for one in cache.among([own, other, 99], tenant="a")] == [own]
