"""What tenants never share: batches of texts, what is stored and found again, and LangChain's own caches."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
from helpers.tenants import KINDS, TOKENIZER, Model, echo, model_of, tenants
from langchain_core.caches import InMemoryCache

from precedent import SpeculationCache
from precedent.errors import ConfigError, UnsupportedError
from precedent.langchain import ChatPrecedent, PrecedentLLM, RecordingCache
from precedent_testing.embedders import HashEmbedder
from precedent_testing.scripted_engine import ScriptedEngine
from precedent_testing.scripted_model import scripted_model_engine

pytestmark = pytest.mark.filterwarnings("ignore::langchain_core._api.beta_decorator.LangChainBetaWarning")


# Batches of texts, of which LangChain hands on the first one's run alone


def test_a_batch_is_of_one_tenant_where_runs_name_it() -> None:
    configs: Any = [{"metadata": {"tenant": "north"}}, {"metadata": {"tenant": "south"}}]
    model = model_of(PrecedentLLM, tenant_from="metadata")
    for several in (configs, [configs[0], {}], [configs[0], {"configurable": {"tenant": "south"}}]):
        with pytest.raises(UnsupportedError, match="cannot mix tenants"):
            model.batch(["a", "b"], several)
    assert model.engine.requests == []
    model.batch(["a", "b"], configs, tenant="said")
    model.batch(["a", "b"], configs[0])
    assert tenants(model) == ["said", "said", "north", "north"]
    fixed = model_of(PrecedentLLM, tenant="fixed")
    fixed.batch(["a", "b"], configs)
    assert tenants(fixed) == ["fixed", "fixed"]


async def test_steps_of_a_batch_are_still_one() -> None:
    configs: Any = [{"metadata": {"workflow_step": "a"}}, {"metadata": {"workflow_step": "b"}}]
    for refused in (model_of(PrecedentLLM), model_of(PrecedentLLM, tenant_from="metadata")):
        with pytest.raises(UnsupportedError, match="cannot mix tenants or workflow steps"):
            await refused.abatch(["a", "b"], configs)


def test_nobodys_texts_in_a_batch_do_not_even_share_with_each_other() -> None:
    model = model_of(PrecedentLLM, tenant_from="metadata")
    model.batch(["a", "b"], [{}, {"metadata": {"tenant": 3}}])
    assert len(set(tenants(model))) == 2


# What is stored, found again, and answered from LangChain's own caches


@pytest.fixture
def cache() -> Iterator[SpeculationCache]:
    with SpeculationCache.open(embedder=HashEmbedder()) as opened:
        yield opened


def test_the_cache_of_a_run_without_a_tenant_is_neither_read_nor_written(
    cache: SpeculationCache, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = scripted_model_engine(echo, cache=cache)
    model = ChatPrecedent.from_engine(engine, tenant_from="metadata", max_tokens=8)
    named: Any = {"metadata": {"tenant": "north"}}
    model.invoke("Where is my order?", named)
    assert [tenant.tenant for tenant in cache.stats().tenants] == ["north"]
    for use in ("recall", "insert", "since", "among", "credit"):
        monkeypatch.setattr(cache, use, None)
    for _ in range(2):
        figures = model.invoke("Where is my order?").usage_metadata
        assert figures["input_token_details"]["cache_read"] == 0, "no keys and values of others either"
    engine.close()


@pytest.mark.parametrize("kind", KINDS)
def test_an_answer_cache_of_langchain_hands_no_tenants_answer_to_another(kind: type[Model]) -> None:
    asked = 0

    def answers(prompt: str) -> str:
        nonlocal asked
        asked += 1
        return f"answer {asked}"

    def text(answer: Any) -> str:
        return str(getattr(answer, "content", answer))

    engine: Any = ScriptedEngine(TOKENIZER, answers)
    model = kind.from_engine(engine, tenant_from="metadata", cache=InMemoryCache())
    runs: list[Any] = [{"metadata": {"tenant": name}} for name in ("north", "south", "north")] + [{}, {}]
    assert [text(model.invoke("hi", run))[-1] for run in runs] == ["1", "2", "1", "3", "4"]
    assert [text(model.invoke("hi", tenant=name))[-1] for name in ("south", "west")] == ["2", "5"]
    fixed = kind.from_engine(engine, tenant="fixed", cache=InMemoryCache())
    assert [text(fixed.invoke("hi", run))[-1] for run in runs] == ["6"] * 5


def test_what_no_run_brings_wants_a_tenant(cache: SpeculationCache) -> None:
    engine = scripted_model_engine(echo, cache=cache)
    model = ChatPrecedent.from_engine(engine, tenant_from="metadata")
    talk = [[("user", "Hello"), ("assistant", "Good day.")]]
    with pytest.raises(ConfigError, match="the model has no tenant of its own: give tenant="):
        model.warm(talk)
    assert model.warm(talk, tenant="north") == 1
    with pytest.raises(ConfigError, match="the model has no tenant of its own"):
        RecordingCache(InMemoryCache(), model)
    engine.close()
