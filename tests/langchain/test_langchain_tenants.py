"""Who may say whose a call is: the application always, a run only where the model takes the tenant from it."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator
from typing import Any

import pytest
from helpers.tenants import KINDS, TOKENIZER, Model, echo, model_of, tenants
from langchain.agents import create_agent
from langchain_core.caches import InMemoryCache
from langchain_core.messages import HumanMessage
from langchain_core.runnables import ConfigurableField, RunnableLambda
from langgraph.graph import END, START, MessagesState, StateGraph

from precedent import SpeculationCache
from precedent.errors import ConfigError, UnsupportedError
from precedent.langchain import ChatPrecedent, PrecedentLLM, RecordingCache
from precedent_testing.embedders import HashEmbedder
from precedent_testing.scripted_engine import ScriptedEngine
from precedent_testing.scripted_model import scripted_model_engine

pytestmark = pytest.mark.filterwarnings("ignore::langchain_core._api.beta_decorator.LangChainBetaWarning")

BY_KIND = pytest.mark.parametrize("kind", KINDS)


# Every way in, and every place where a run could name a tenant


async def in_a_stream_of_events(model: Any, config: Any) -> None:
    _ = [event async for event in model.astream_events("hi", config, version="v2")]


async def in_a_protocol_stream(model: Any, config: Any) -> None:
    if isinstance(model, ChatPrecedent):
        assert model.stream_events("hi", config, version="v3").output.content
    else:
        model.invoke("hi", config)


async def in_an_async_protocol_stream(model: Any, config: Any) -> None:
    if isinstance(model, ChatPrecedent):
        _ = [event async for event in await model.astream_events("hi", config, version="v3")]
    else:
        await model.ainvoke("hi", config)


async def in_a_graph(model: Any, config: Any) -> None:
    """Inside a node nobody hands the configuration on."""

    def node(state: MessagesState) -> Any:
        model.invoke("hi")
        return {"messages": []}

    graph = StateGraph(MessagesState).add_node("model", node).add_edge(START, "model").add_edge("model", END).compile()
    await graph.ainvoke({"messages": [HumanMessage("hi")]}, config)


async def in_an_agent(model: Any, config: Any) -> None:
    if isinstance(model, ChatPrecedent):
        create_agent(model, tools=[]).invoke({"messages": [("user", "hi")]}, config)
    else:
        model.invoke("hi", config)


async def drained(stream: Any) -> None:
    async for _ in stream:
        pass


async def done(result: Any) -> None:
    if isinstance(result, Iterator):
        list(result)
    elif hasattr(result, "__await__"):
        await result


MOST = ConfigurableField(id="most")
WAYS: dict[str, Callable[[Any, Any], Any]] = {
    "invoke": lambda model, config: done(model.invoke("hi", config)),
    "ainvoke": lambda model, config: done(model.ainvoke("hi", config)),
    "stream": lambda model, config: done(model.stream("hi", config)),
    "astream": lambda model, config: drained(model.astream("hi", config)),
    "batch": lambda model, config: done(model.batch(["hi"], config)),
    "batch of one by one": lambda model, config: done(model.batch(["hi"], {**config, "max_concurrency": 1})),
    "batch of configs": lambda model, config: done(model.batch(["hi"], [config])),
    "batch as completed": lambda model, config: done(model.batch_as_completed(["hi"], config)),
    "abatch": lambda model, config: done(model.abatch(["hi"], config)),
    "events": in_a_stream_of_events,
    "protocol": in_a_protocol_stream,
    "async protocol": in_an_async_protocol_stream,
    "with config": lambda model, config: done(model.with_config(config).invoke("hi")),
    "bound": lambda model, config: done(model.bind(max_tokens=3, tenant=None).invoke("hi", config)),
    "streamed with None": lambda model, config: done(model.stream("hi", config, tenant=None)),
    "retried": lambda model, config: done(model.with_retry().invoke("hi", config)),
    "falling back": lambda model, config: done(model.with_fallbacks([model]).stream("hi", config)),
    "chained": lambda model, config: done((RunnableLambda(str) | model).invoke("hi", config)),
    "nested": lambda model, config: done(RunnableLambda(model.invoke).invoke("hi", config)),
    "graph": in_a_graph,
    "agent": in_an_agent,
    "configurable": lambda model, config: done(model.configurable_fields(max_tokens=MOST).invoke("hi", config)),
    "alternatives": lambda model, config: done(
        model.configurable_alternatives(ConfigurableField(id="which"), other=model).stream("hi", config)
    ),
}

PLACES: dict[str, Callable[[Any], Any]] = {
    "metadata": lambda tenant: {"metadata": {"tenant": tenant}},
    "configurable": lambda tenant: {"configurable": {"tenant": tenant}},
    "both": lambda tenant: {"metadata": {"tenant": tenant}, "configurable": {"tenant": "other"}},
}
UNUSABLE = [None, 7, "", ["north"], {"tenant": "north"}, "x" * 201, "two\nlines", "\ud800"]


@pytest.mark.parametrize("way", WAYS)
async def test_a_run_chooses_a_tenant_only_where_the_model_takes_it_from_there(way: str) -> None:
    for kind in KINDS:
        fixed = model_of(kind, tenant="fixed", metadata={"tenant": "of the model"})
        unset = model_of(kind)
        for place in PLACES.values():
            for named in ("north", 7):
                await WAYS[way](fixed, place(named))
                await WAYS[way](unset, place(named))
            model = model_of(kind, tenant_from="metadata")
            await WAYS[way](model, place("north"))
            assert tenants(model) == ["north"]
            assert model.engine.requests[0].speculation is None, "the engine's own"
        assert set(tenants(fixed)) == {"fixed"}
        assert set(tenants(unset)) == {"default"}


@pytest.mark.parametrize("way", WAYS)
async def test_a_run_that_names_nobody_shares_nothing(way: str, caplog: Any) -> None:
    for kind in KINDS:
        model = model_of(kind, tenant_from="metadata")
        caplog.clear()
        with caplog.at_level(logging.WARNING):
            await WAYS[way](model, {})
            for place in ("metadata", "configurable"):
                for named in UNUSABLE:
                    await WAYS[way](model, PLACES[place](named))
        told = tenants(model)
        assert len(told) == 1 + 2 * len(UNUSABLE) == len(set(told))
        assert all(tenant.startswith("nobody-") and type(tenant) is str for tenant in told)
        drafters = tuple(name for name in model.engine.speculation.drafters if name != "recall")
        for request in model.engine.requests:
            assert (request.speculation.write_back, request.speculation.drafters) == (False, drafters)
        assert caplog.text.count("names no tenant: it neither reads nor writes the cache") == 1


@BY_KIND
def test_the_application_has_the_last_word(kind: type[Model]) -> None:
    run: Any = {"metadata": {"tenant": "north"}}
    for fields in ({"tenant": "fixed"}, {"tenant_from": "metadata"}):
        model = model_of(kind, **fields)
        model.invoke("hi", run, tenant="south")
        list(model.bind(tenant="south").stream("hi", run))
        model.batch(["hi"], [run], tenant="south")
        assert tenants(model) == ["south"] * 3
    own = model_of(kind, tenant_from="metadata", metadata={"tenant": "west"})
    own.invoke("hi", run)
    list(own.stream("hi", run))
    assert tenants(own) == ["west"] * 2, "metadata that is fixed on the model is the application's"
    model = model_of(kind, tenant="fixed")
    configurable = model.configurable_fields(tenant=ConfigurableField(id="whose"))
    configurable.invoke("hi", {"configurable": {"whose": "north", "tenant": "south"}})
    configurable.invoke("hi", {"configurable": {"tenant": "south"}, "metadata": {"whose": "west"}})
    assert tenants(model) == ["north", "fixed"]


@BY_KIND
@pytest.mark.parametrize(
    ("fields", "said"),
    [
        ({"tenant": "a", "tenant_from": "metadata"}, "tenant='a' and tenant_from='metadata' both set"),
        ({"tenant_from": "configurable"}, "tenant_from='configurable' must be 'metadata'"),
        ({"tenant": ""}, "tenant='' must be a non-empty text"),
    ],
)
def test_fields_that_leave_it_open_whose_runs_are_are_refused(kind: Any, fields: dict[str, Any], said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        kind(model="m", **fields)


def test_structured_output_is_the_runs() -> None:
    schema = {"title": "Number", "type": "object", "properties": {"n": {"type": "integer"}}, "required": ["n"]}
    engine: Any = ScriptedEngine(TOKENIZER, lambda prompt: '{"n": 1}')
    model = ChatPrecedent.from_engine(engine, tenant_from="metadata")
    run: Any = {"metadata": {"tenant": "north"}}
    assert model.with_structured_output(schema).invoke("hi", run) == {"n": 1}
    assert model.with_structured_output(schema, include_raw=True).invoke("hi", run)["parsed"] == {"n": 1}
    assert tenants(model) == ["north"] * 2


# Batches of texts, of which LangChain hands on the first one's run alone


async def test_a_batch_is_of_one_tenant_and_step_where_runs_name_it() -> None:
    configs: Any = [{"metadata": {"tenant": "north"}}, {"metadata": {"tenant": "south"}}]
    model = model_of(PrecedentLLM, tenant_from="metadata")
    for several in (configs, [configs[0], {}], [configs[0], {"configurable": {"tenant": "south"}}]):
        with pytest.raises(UnsupportedError, match="cannot mix tenants"):
            model.batch(["a", "b"], several)
    for refused in (model_of(PrecedentLLM), model):
        with pytest.raises(UnsupportedError, match="cannot mix tenants or workflow steps"):
            await refused.abatch(["a", "b"], [{"metadata": {"workflow_step": step}} for step in "ab"])
    assert model.engine.requests == []
    model.batch(["a", "b"], configs, tenant="said")
    model.batch(["a", "b"], configs[0])
    assert tenants(model) == ["said", "said", "north", "north"]
    fixed = model_of(PrecedentLLM, tenant="fixed")
    fixed.batch(["a", "b"], configs)
    assert tenants(fixed) == ["fixed", "fixed"]
    nobody = model_of(PrecedentLLM, tenant_from="metadata")
    nobody.batch(["a", "b"], [{}, {"metadata": {"tenant": 3}}])
    assert len(set(tenants(nobody))) == 2, "they do not even share with each other"


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


@BY_KIND
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
