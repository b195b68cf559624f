"""What recall keeps in memory: sorted in pieces or one by one, bounded, and without what was forgotten."""

from __future__ import annotations

from collections import Counter
from pathlib import Path

import numpy as np
from helpers.quick_store import quick_store
from hypothesis import given, settings
from hypothesis import strategies as st

from precedent.cache import Completion, SpeculationCache, SQLiteStore
from precedent.config import SamplingParams
from precedent.drafters import DrafterParts, load_drafters
from precedent.drafters.matching.context_order import START
from precedent.drafters.matching.occurrences import HIT, ROOM, VoteWeights
from precedent.drafters.matching.token_index import TokenIndex, reversed_context, sorted_text
from precedent.drafters.recall.drafter import RecallDrafter
from precedent.drafters.recall.tenant_memory import TenantMemory
from precedent.drafters.request import Request
from precedent.runtime.background import AtOnce
from precedent_testing.embedders import HashEmbedder

TENANT, TOKENIZER = "shop", "tok"
SECRET = tuple(range(70_001, 70_040))


def found_in(index: TokenIndex, context: list[int]) -> Counter[tuple[int, int, tuple[int, ...]]]:
    """(sequence id, length, next tokens) of every occurrence, whatever its place in the text."""
    weights = VoteWeights(np.array([(-1, 0, 0.0)], dtype=HIT), np.zeros(len(index.sequence_ids) + 1), 0.0)
    rows = []
    for place in index.match(reversed_context(context), weights, 10_000):
        text = index.text.tokens[place["position"] + 1 : place["position"] + 6].tolist()
        text = text[: next((at for at, token in enumerate(text) if token < 0), len(text))]
        rows.append((index.sequence_ids[place["slot"]], int(place["length"]), tuple(text)))
    return Counter(rows)


def in_pieces(sequences: dict[int, list[int]], cuts: list[int]) -> TokenIndex:
    """An index of texts sorted apart that end before `cuts`, and the rest appended one by one."""
    index, keys, begin = TokenIndex(), list(sequences), 0
    for cut in sorted(cuts):
        index.load(sorted_text({key: sequences[key] for key in keys[begin:cut]}))
        begin = cut
    for key in keys[begin:]:
        index.append(key, sequences[key])
    return index


@settings(max_examples=120, deadline=None)
@given(
    st.lists(st.lists(st.integers(0, 3), max_size=30), min_size=1, max_size=8),
    st.lists(st.integers(0, 3), min_size=1, max_size=30),
    st.booleans(),
    st.data(),
)
def test_sorted_texts_and_a_tail_find_what_one_index_finds(
    sequences: list[list[int]], context: list[int], from_start: bool, data: st.DataObject
) -> None:
    """However the completions are spread, before and after merging and forgetting."""
    context = [START, *context] if from_start else context
    numbered = dict(enumerate(sequences, 7))
    cuts = data.draw(st.lists(st.integers(0, len(sequences)), max_size=4))
    index = in_pieces(numbered, cuts)
    assert found_in(index, context) == found_in(in_pieces(numbered, []), context)
    index.take_order(index.merged_order())
    assert found_in(index, context) == found_in(in_pieces(numbered, []), context)
    gone = data.draw(st.sampled_from(sorted(numbered)))
    index = in_pieces(numbered, cuts)
    index.forget([gone])
    del numbered[gone]
    assert found_in(index, context) == found_in(in_pieces(numbered, []), context)
    assert {key: index.tokens(key).tolist() for key in numbered} == numbered


def test_a_crowd_is_sampled_from_every_run() -> None:
    """More equal places than are looked at: as many as from one index, and evenly over the runs."""
    crowd = {number: [1, 2, 1000 + number] for number in range(3000)}
    found = found_in(in_pieces(crowd, [300, 1800, 3000]), [1, 2])
    assert sum(found.values()) == sum(found_in(in_pieces(crowd, [3000]), [1, 2]).values()) == ROOM
    numbers = np.array(sorted(key for key, _, _ in found))
    assert np.histogram(numbers, [0, 300, 1800, 3000])[0].tolist() == [25, 128, 103]


def test_many_runs_are_merged_before_they_slow_down_matching() -> None:
    numbered = {number: [number % 7, 3, number % 5] for number in range(60)}
    index = in_pieces(numbered, list(range(1, 61)))
    assert index.num_runs <= 16
    assert found_in(index, [3]) == found_in(in_pieces(numbered, []), [3])


def answer(number: int) -> tuple[int, ...]:
    return (5, 6, 7, 100 + number, 8, 9, 10 + number % 3, 2)


def add(store: SQLiteStore, numbers: range) -> None:
    for number in numbers:
        new = Completion(answer(number), TOKENIZER, "model", TENANT, prompt_fingerprint=f"p{number}")
        store.insert(new, None, None)


def tokens_of(memory: TenantMemory) -> dict[int, list[int]]:
    return {key: memory.index.tokens(key).tolist() for key in sorted(memory.index.lengths())}


def test_a_memory_holds_the_newest_completions_that_fit(tmp_path: Path) -> None:
    """The oldest leave the index; their rows stay."""
    store, bound = quick_store(tmp_path), 60_000
    add(store, range(200))
    memory = TenantMemory(bound)
    memory.read(store, TENANT, TOKENIZER)
    assert max(tokens_of(memory)) == 200
    assert min(tokens_of(memory)) > 100
    assert bound / 2 < memory.num_bytes < bound
    add(store, range(200, 240))
    memory.read(store, TENANT, TOKENIZER)
    assert memory.outgrown
    fresh = memory.renewed()
    assert not fresh.outgrown
    assert max(tokens_of(fresh)) == 240
    assert min(tokens_of(fresh)) > min(tokens_of(memory))
    assert [fresh.index.sequence_ids[slot] for slot in fresh.slots_of_prompt("p239")] == [240]
    assert found_in(fresh.index, [5, 6]) == found_in(in_pieces(tokens_of(fresh), []), [5, 6])
    store.close()


def request(tenant: str = TENANT) -> Request:
    return Request("r", (1, 2, 3), SamplingParams(), tenant, "q", end_token_ids=frozenset({2}))


def recall_from(cache: SpeculationCache) -> RecallDrafter:
    (drafter,) = load_drafters(["recall"], DrafterParts(TOKENIZER, AtOnce(), cache))
    assert isinstance(drafter, RecallDrafter)
    return drafter


def test_forget_reaches_a_running_request_at_once(tmp_path: Path) -> None:
    """No other request has to begin: when `forget` returns, nothing of it is drafted any more."""
    with SpeculationCache.open(tmp_path, embedder=HashEmbedder()) as cache:
        cache.insert(Completion(SECRET, TOKENIZER, "model", TENANT, text="secret"))
        drafter = recall_from(cache)
        session = drafter.begin(request())
        session.match(8)
        session.committed(SECRET[:3])
        assert tuple(session.match(4).token_ids[:2]) == SECRET[3:5]
        assert cache.forget(containing="secret") == 1
        assert len(session.match(8)) == 0
        drafter.close()


def test_tenants_share_one_bound_and_come_back_from_their_rows(tmp_path: Path) -> None:
    """The least recently used tenant's memory goes, but a request that began with it goes on, and forgets as well."""
    bound = 4 * (20 * 700)
    with SpeculationCache.open(tmp_path, embedder=HashEmbedder(), max_index_bytes=bound) as cache:
        for tenant in "abcdef":
            for number in range(20):
                cache.insert(Completion(answer(number), TOKENIZER, "model", tenant))
        drafter = recall_from(cache)
        running = drafter.begin(request("a"))
        for tenant in "bcdef":
            drafter.begin(request(tenant)).end()
            assert drafter.held()[1] <= bound
        assert len(running.match(8)) > 0
        cache.forget(tenant="a")
        assert len(running.match(8)) == 0
        assert len(drafter.begin(request("b")).match(8)) > 0
        drafter.close()
