"""Recall: which stored completions it chooses, where it resumes, what it holds in memory and what it never proposes."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from concurrent.futures import Executor
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from helpers.quick_store import quick_store
from helpers.waiting import Waiting

from precedent.cache import Completion, Hit, SpeculationCache, SQLiteStore, prompt_fingerprint
from precedent.cache.records import Ids
from precedent.config import SamplingParams
from precedent.drafters import Candidates, DrafterParts, Request, load_drafters
from precedent.drafters.recall.drafter import RecallDrafter
from precedent.drafters.recall.tenant_memory import TenantMemory
from precedent.runtime.background import AtOnce
from precedent.tree import ROOT
from precedent_testing.embedders import HashEmbedder

TOKENIZER, END = "tok", 2


class ListedCompletions:
    """A speculation cache as a list; `near` maps a query to similarities by completion id."""

    def __init__(self) -> None:
        self.stored: list[Completion] = []
        self.near: dict[str, dict[int, float]] = {}
        self.credited: list[dict[int, tuple[int, int]]] = []
        self.num_forgotten = 0

    def epoch(self) -> int:
        return self.num_forgotten

    def ids(self, tenant: str, tokenizer: str) -> Ids:
        return np.array([each.id for each in self.since(tenant, tokenizer)], dtype=np.int64)

    def forget(self, completion_id: int) -> None:
        self.stored = [each for each in self.stored if each.id != completion_id]
        self.num_forgotten += 1

    def add(self, tokens: list[int], *, tenant: str = "default", prompt: tuple[int, ...] | None = None) -> int:
        fingerprint = "" if prompt is None else prompt_fingerprint(prompt)
        number = len(self.stored) + self.num_forgotten + 1
        new = Completion(tuple(tokens), TOKENIZER, "model", tenant, prompt_fingerprint=fingerprint, id=number)
        self.stored.append(new)
        return number

    def recall(self, query: str, *, tenant: str, tokenizer: str, k: int = 64) -> list[Hit]:
        own = {each.id for each in self.since(tenant, tokenizer)}
        return [Hit(key, near) for key, near in self.near.get(query, {}).items() if key in own][:k]

    def among(self, ids: Iterable[int], *, tenant: str) -> list[Completion]:
        return [each for each in self.stored if each.id in set(ids) and each.tenant == tenant]

    def since(self, tenant: str, tokenizer: str, after_id: int = 0) -> list[Completion]:
        return [each for each in self.stored if each.id > after_id and each.tenant == tenant]

    def credit(self, counts: Mapping[int, tuple[int, int]]) -> None:
        self.credited.append(dict(counts))


def request(prompt: tuple[int, ...] = (1, 2, 3), *, query: str = "q", tenant: str = "default", **keys: str) -> Request:
    return Request("r", prompt, SamplingParams(), tenant, query, end_token_ids=frozenset({END}), **keys)


def recall_from(cache: Any, executor: Executor | None = None) -> RecallDrafter:
    return RecallDrafter(cache, TOKENIZER, executor or AtOnce())


def estimates(candidates: Candidates) -> dict[tuple[int, ...], float]:
    """The estimate of every node, by its path."""
    found: list[tuple[int, ...]] = []
    for token, parent in zip(candidates.token_ids, candidates.parents, strict=True):
        found.append((*(() if parent == ROOT else found[parent]), token))
    return dict(zip(found, candidates.estimates, strict=True))


def first_path(candidates: Candidates) -> list[int]:
    """Tokens of the path that was judged likeliest at every node."""
    found, path = estimates(candidates), ()
    while below := [each for each in found if each[:-1] == path]:
        path = max(below, key=lambda each: found[each])
    return list(path)


@pytest.fixture
def cache() -> ListedCompletions:
    return ListedCompletions()


def test_step_zero_is_decided_by_similarity(cache: ListedCompletions) -> None:
    """With no token to match yet, the completion of the nearest request comes first, and the others still take part."""
    cache.add([10, 11, 12, END])
    cache.add([20, 21, 22, END])
    cache.near = {"ten": {1: 0.84, 2: 0.72}, "twenty": {1: 0.72, 2: 0.84}}  # one bin, two weights
    for query, nearest, other in (("ten", 10, 20), ("twenty", 20, 10)):
        found = recall_from(cache).begin(request(query=query)).match(8)
        assert first_path(found)[0] == nearest
        assert estimates(found)[nearest,] > 2 * estimates(found)[other,] > 0


def test_an_exact_repeat_is_one_long_chain(cache: ListedCompletions) -> None:
    """A stored answer to the same prompt is drafted in chunks of 64 tokens, straight on after each commit."""
    answer = [*range(100, 250), END]
    cache.add(answer, prompt=(1, 2, 3))
    cache.add([900, 901, END])
    session = recall_from(cache).begin(request())
    assert min(session.match(64).estimates[1:50]) > 0.95
    for at in (0, 65):
        chunk = first_path(session.match(64))
        assert len(chunk) >= 62
        assert chunk == answer[at : at + len(chunk)]
        session.committed(answer[at : at + 65])
    assert first_path(session.match(64)) == answer[130:]


ORDER, MARK, REST = list(range(600, 616)), 69, [70, 71, 72, 73, 74, END]


@pytest.mark.parametrize(
    ("stored", "commits", "expected"),
    [
        ([400, 401, 402, MARK, *REST], [ORDER, [500, MARK]], REST),
        ([400, 401, 402, MARK, *REST], [ORDER, [500, 501, 502, MARK]], REST),
        ([400, 401, 402, MARK, *REST], [ORDER, [500, 501, 502, 503, 504, MARK]], REST),
        ([400, MARK, 80, 81, 401, MARK, *REST], [ORDER, [500, 501, MARK], [80, 81], [502, 503, MARK]], REST),
        ([400, MARK, *REST], [[800, 801, 802, 500, MARK]], [300, 301, 302, END]),
    ],
    ids=["a shorter slot", "an equal one", "a longer one", "two slots", "an output that never followed"],
)
def test_drafting_resumes_behind_a_slot_that_differs(
    cache: ListedCompletions, stored: list[int], commits: list[list[int]], expected: list[int]
) -> None:
    """The output names another order id; behind it drafting goes on in the completion that it followed.

    Otherwise the forty completions win in which the same mark is followed by something else.
    """
    cache.add([*ORDER, *stored])
    for number in range(40):
        cache.add([200 + number, MARK, 300, 301, 302, END])
    session = recall_from(cache).begin(request())
    for tokens in commits:
        session.match(16)
        session.committed(tokens)
    assert first_path(session.match(16)) == expected


def test_what_was_read_ahead_is_drafted_before_the_first_search(cache: ListedCompletions) -> None:
    """A new process is warm at its first request, for the tenants that it read ahead and for no others."""
    cache.add([10, 11, END], tenant="shop")
    cache.add([20, 21, END], tenant="bank")
    drafter = recall_from(cache, Waiting())
    drafter.read_ahead("shop")
    assert first_path(drafter.begin(request(tenant="shop")).match(8)) == [10, 11, END]
    assert len(drafter.begin(request(tenant="bank")).match(8)) == 0


def test_credit_goes_once_to_the_completions_that_were_right_or_wrong(cache: ListedCompletions) -> None:
    """Accepted tokens along the committed path, rejected ones beside it, one call at the end."""
    right, wrong = cache.add([10, 11, 12, END]), cache.add([20, 21, 22, END])
    session = recall_from(cache).begin(request())
    session.match(16)
    session.committed([10, 11, 12, 77])
    assert cache.credited == []
    session.end()
    session.end()
    assert cache.credited == [{right: (3, 1), wrong: (0, 1)}]


# Kinship


def completion(number: int, **fields: Any) -> Completion:
    return Completion((number,), TOKENIZER, "model", id=number, **fields)


# On the library's own cache


@pytest.mark.parametrize("key", ["workflow_step", "tools"])
def test_of_two_answers_to_the_same_words_the_one_from_the_same_place_comes_first(key: str) -> None:
    """The keys are stored with the completion and read for the nearest; so is its record."""
    with SpeculationCache.open(embedder=HashEmbedder()) as cache:
        for token, place in ((10, "refunds"), (20, "orders")):
            cache.insert(Completion((token, 9, END), TOKENIZER, "m", query="refund order 7", **{key: place}))
        drafter = recall_from(cache)
        for token, place in ((10, "refunds"), (20, "orders")):
            assert first_path(drafter.begin(request(query="refund order 7", **{key: place})).match(4))[0] == token
        first, second = (each.id for each in sorted(cache.list(), key=lambda each: each.id))
        cache.credit({first: (200, 5), second: (5, 200)})
        assert first_path(drafter.begin(request(query="refund order 7")).match(4))[0] == 10
        drafter.close()


def answer(number: int) -> tuple[int, ...]:
    return (5, 6, 7, 100 + number, 8, 9, 10 + number % 3, END)


def add(store: SQLiteStore, numbers: range) -> None:
    for number in numbers:
        new = Completion(answer(number), TOKENIZER, "model", "shop", prompt_fingerprint=f"p{number}")
        store.insert(new, None, None)


def test_a_memory_holds_the_newest_completions_that_fit(tmp_path: Path) -> None:
    """The oldest leave the index; their rows stay."""
    store, bound = quick_store(tmp_path), 60_000
    add(store, range(200))
    memory = TenantMemory(bound, "shop")
    memory.read(store, TOKENIZER)
    held = memory.index.lengths()
    assert max(held) == 200
    assert min(held) > 100
    assert bound / 2 < memory.num_bytes < bound
    add(store, range(200, 240))
    memory.read(store, TOKENIZER)
    assert memory.outgrown
    fresh = memory.renewed()
    assert not fresh.outgrown
    assert max(fresh.index.lengths()) == 240
    assert min(fresh.index.lengths()) > min(held)
    assert [fresh.index.sequence_ids[slot] for slot in fresh.slots_of_prompt("p239")] == [240]
    assert fresh.index.tokens(240).tolist() == list(answer(239))
    store.close()


def loaded(cache: SpeculationCache) -> RecallDrafter:
    (drafter,) = load_drafters(["recall"], DrafterParts(TOKENIZER, AtOnce(), cache))
    assert isinstance(drafter, RecallDrafter)
    return drafter


def test_forget_reaches_a_running_request_at_once(tmp_path: Path) -> None:
    """No other request has to begin: when `forget` returns, nothing of it is drafted any more."""
    secret = tuple(range(70_001, 70_040))
    with SpeculationCache.open(tmp_path, embedder=HashEmbedder()) as cache:
        cache.insert(Completion(secret, TOKENIZER, "model", text="secret"))
        drafter = loaded(cache)
        session = drafter.begin(request())
        session.match(8)
        session.committed(secret[:3])
        assert tuple(session.match(4).token_ids[:2]) == secret[3:5]
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
        drafter = loaded(cache)
        running = drafter.begin(request(tenant="a"))
        for tenant in "bcdef":
            drafter.begin(request(tenant=tenant)).end()
            assert drafter.held()[1] <= bound
        assert len(running.match(8)) > 0
        cache.forget(tenant="a")
        assert len(running.match(8)) == 0
        assert len(drafter.begin(request(tenant="b")).match(8)) > 0
        drafter.close()


def test_tenants_never_meet(cache: ListedCompletions) -> None:
    """A tenant is offered nothing of another's, neither at step 0 nor by a matching suffix."""
    cache.add([10, 11, 12, 13, END], tenant="other")
    cache.near["q"] = {1: 1.0}
    drafter = recall_from(cache)
    assert first_path(drafter.begin(request(tenant="other")).match(8)) == [10, 11, 12, 13, END]
    session = drafter.begin(request(tenant="own"))
    assert len(session.match(8)) == 0
    session.committed([10, 11])
    assert len(session.match(8)) == 0


def test_new_completions_are_seen_by_the_next_request_and_forgotten_ones_by_none(cache: ListedCompletions) -> None:
    """What the cache forgot is erased before the next request, also for a request that is running."""
    drafter = recall_from(cache)
    assert len(drafter.begin(request()).match(8)) == 0
    gone = cache.add([10, 11, 12, 13, 14, END])
    cache.add([20, 21, END])
    running = drafter.begin(request())
    running.match(8)
    running.committed([10, 11])
    assert first_path(running.match(8)) == [12, 13, 14, END]
    cache.forget(gone)
    cache.add([30, 31, END])
    found = estimates(drafter.begin(request()).match(8))
    assert found.keys() == {(20,), (20, 21), (20, 21, END), (30,), (30, 31), (30, 31, END)}
    assert len(running.match(8)) == 0
    assert drafter.held()[0] == 2
