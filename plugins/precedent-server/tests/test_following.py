"""What one process forgets leaves the memory of the others: a look is enough, without a request."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest

from precedent.cache import SpeculationCache
from precedent.config import SamplingParams
from precedent.engine.engine import Engine
from precedent.errors import CacheError
from precedent.planning.costs import CostCurve
from precedent_server.following import Following
from precedent_testing.embedders import HashEmbedder
from precedent_testing.store_contract import completion
from precedent_testing.tiny_models import byte_tokenizer, tiny_causal_lm

PROMPT = b"an order, please: "


def opened(folder: Path, **bounds: Any) -> SpeculationCache:
    return SpeculationCache.open(folder / "cache", embedder=HashEmbedder(), **bounds)


def engine_on(cache: SpeculationCache) -> Engine:
    return Engine(tiny_causal_lm(scale=4.0), byte_tokenizer(), name="tiny", cache=cache, cost=CostCurve())


@pytest.fixture
def caches(tmp_path: Path) -> Iterator[tuple[SpeculationCache, SpeculationCache]]:
    with opened(tmp_path) as here, opened(tmp_path) as elsewhere:
        yield here, elsewhere


@pytest.fixture
def engine(caches: tuple[SpeculationCache, SpeculationCache]) -> Iterator[Engine]:
    with closing(engine_on(caches[0])) as running:
        yield running


def answer(engine: Engine, tenant: str) -> None:
    engine.submit(list(PROMPT), SamplingParams(max_tokens=24), query="an order", tenant=tenant).result()


def words_held(engine: Engine) -> dict[str, int]:
    """Tokens of each tenant in recall's memory."""
    memories = engine._drafters["recall"]._memories._current  # type: ignore[attr-defined]
    return {tenant: memory.index.num_tokens for tenant, memory in memories.items()}


def test_a_look_erases_what_another_process_forgot(caches, engine) -> None:
    """Completions, and kept conversations: their keys and values, and their tokens, are words of the tenant."""
    here, elsewhere = caches
    for tenant in ("shop", "bank"):
        answer(engine, tenant)
        answer(engine, tenant)
    reused = engine.metrics().cached_prompt_tokens
    assert reused > 0
    following = Following(here)
    following.look()
    held = words_held(engine)
    assert min(held.values()) > 0
    assert elsewhere.forget(tenant="shop") == 1
    assert words_held(engine) == held  # nobody asked yet
    assert following.look()
    assert words_held(engine) == {**held, "shop": 0}
    assert not following.look()
    answer(engine, "shop")
    assert engine.metrics().cached_prompt_tokens == reused


def test_conversations_stay_where_completions_were_only_evicted(tmp_path: Path) -> None:
    """An eviction makes room; nobody asked for the words to be erased."""
    bounds = {"max_records": 2}
    with (
        opened(tmp_path, **bounds) as here,
        opened(tmp_path, **bounds) as elsewhere,
        closing(engine_on(here)) as engine,
    ):
        following = Following(here)
        following.look()
        answer(engine, "shop")
        held = words_held(engine)
        for number in range(4):
            elsewhere.insert(completion(number, query=f"refund {number}", tenant="bank"))
        assert following.look(), "nothing was evicted, so this test shows nothing"
        answer(engine, "shop")
        assert engine.metrics().cached_prompt_tokens > 0
        assert words_held(engine) == held


def test_what_is_forgotten_after_its_eviction_leaves_conversations_as_well(caches, engine) -> None:
    """The completions are gone from the store; a conversation that an engine kept still holds their words."""
    here, elsewhere = caches
    following = Following(here)
    following.look()
    answer(engine, "shop")
    assert elsewhere.forget(containing="no completion has this") == 0
    assert following.look()
    answer(engine, "shop")
    assert engine.metrics().cached_prompt_tokens == 0


class Failing:
    """A cache whose store is away for a while, or whose first erasure fails."""

    def __init__(self, failures: int, erasures: int = 0) -> None:
        self.failures, self.erasures, self.erased = failures, erasures, threading.Event()

    def epoch(self) -> int:
        self.failures -= 1
        if self.failures >= 0:
            raise CacheError("the server is away")
        return 1

    def forgets(self) -> int:
        return 0

    def erase_gone(self, *, forgotten: bool) -> None:
        self.erasures -= 1
        if self.erasures >= 0:
            raise CacheError("the server went away in between")
        self.erased.set()


def test_a_store_that_is_away_is_asked_again_and_told_of_once(caplog) -> None:
    cache = Failing(3)
    with Following(cache, seconds=0.001) as following:  # type: ignore[arg-type]
        assert cache.erased.wait(60)
        assert following.seconds_behind >= 0
    assert caplog.text.count("until the store is back") == 1


def test_an_erasure_that_fails_is_repeated() -> None:
    cache = Failing(0, erasures=1)
    following = Following(cache)  # type: ignore[arg-type]
    with pytest.raises(CacheError, match="in between"):
        following.look()
    assert following.look()
    assert cache.erased.is_set()
