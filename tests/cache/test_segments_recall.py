"""Segments behind the recall drafter: a restart drafts the same, forgetting is at once, one bound holds all."""

from __future__ import annotations

from pathlib import Path

import pytest
from helpers.segments import SECRET, TENANT, TOKENIZER, RowsRead, answer, as_bytes, raw

from precedent.cache import Completion, SpeculationCache
from precedent.config import SamplingParams
from precedent.drafters import DrafterParts, load_drafters
from precedent.drafters.recall import tenant_memory
from precedent.drafters.recall.drafter import RecallDrafter
from precedent.drafters.request import Request
from precedent.errors import CacheError
from precedent.runtime.inline_executor import AtOnce
from precedent_testing.embedders import HashEmbedder

END = 2


def request(tenant: str = TENANT) -> Request:
    return Request("r", (1, 2, 3), SamplingParams(), tenant, "q", end_token_ids=frozenset({END}))


def cache_in(folder: Path, **settings: int) -> SpeculationCache:
    return SpeculationCache.open(folder, embedder=HashEmbedder(), **settings)


def recall_from(cache: SpeculationCache) -> RecallDrafter:
    (drafter,) = load_drafters(["recall"], DrafterParts(TOKENIZER, AtOnce(), cache))
    assert isinstance(drafter, RecallDrafter)
    return drafter


def test_an_engine_that_closes_seals_and_the_next_one_drafts_the_same(tmp_path, monkeypatch):
    rows, drafted = RowsRead(monkeypatch), []
    for _ in range(2):
        with cache_in(tmp_path) as cache:
            if not drafted:
                for number in range(20):
                    cache.insert(Completion(answer(number), TOKENIZER, "model", TENANT, query=f"question {number}"))
            drafter, rows.number = recall_from(cache), 0
            session = drafter.begin(request())
            drafted.append(session.match(32).nodes.tolist())
            session.end()
            drafter.close()
    assert rows.number == 0
    assert drafted[0] == drafted[1] != []


def test_a_grown_memory_is_sealed_at_the_end_of_a_request(tmp_path, monkeypatch):
    """Not before there is enough of it, and not while the request runs."""
    monkeypatch.setattr(tenant_memory, "SEAL_TOKENS", 30)
    with cache_in(tmp_path) as cache:
        drafter, sealed = recall_from(cache), []
        for number in range(6):
            cache.insert(Completion(answer(number), TOKENIZER, "model", TENANT))
            session = drafter.begin(request())
            before = len(list(tmp_path.rglob("*.tokens.npy")))
            session.end()
            sealed.append((before, len(list(tmp_path.rglob("*.tokens.npy")))))
        assert sealed == [(0, 0), (0, 0), (0, 0), (0, 1), (1, 1), (1, 1)]
        drafter.close()


def test_forget_reaches_a_running_request_at_once(tmp_path):
    """No other request has to begin: when `forget` returns, nothing of it is drafted any more."""
    with cache_in(tmp_path) as cache:
        cache.insert(Completion(SECRET, TOKENIZER, "model", TENANT, text="secret"))
        drafter = recall_from(cache)
        session = drafter.begin(request())
        session.match(8)
        session.committed(SECRET[:3])
        assert tuple(session.match(4).token_ids[:2]) == SECRET[3:5]
        assert cache.forget(containing="secret") == 1
        assert len(session.match(8)) == 0
        drafter.close()
        assert as_bytes(SECRET[:2]) not in raw(tmp_path)


def test_tenants_share_one_bound_and_come_back_from_their_segments(tmp_path):
    """The least recently used tenant's memory goes, but a request that began with it goes on, and forgets as well."""
    bound = 4 * (20 * 700)
    with cache_in(tmp_path, max_index_bytes=bound) as cache:
        for tenant in "abcdef":
            for number in range(20):
                cache.insert(Completion(answer(number), TOKENIZER, "model", tenant))
        drafter = recall_from(cache)
        running = drafter.begin(request("a"))
        for tenant in "bcdef":
            drafter.begin(request(tenant)).end()
            assert sum(memory.num_bytes for memory in drafter._memories._memories.values()) <= bound
        assert "a" not in drafter._memories._memories
        assert len(running.match(8)) > 0
        cache.forget(tenant="a")
        assert len(running.match(8)) == 0
        assert len(drafter.begin(request("b")).match(8)) > 0
        drafter.close()


def test_a_bound_that_holds_nothing_is_refused(tmp_path):
    with pytest.raises(CacheError, match="max_index_bytes=0 must be at least 1"):
        cache_in(tmp_path, max_index_bytes=0)
