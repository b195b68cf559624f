"""Who may say whose a call is: the application always, a run only where the model takes the tenant from it."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator
from typing import Any

import pytest
from langchain.agents import create_agent
from langchain_core.caches import InMemoryCache
from langchain_core.messages import HumanMessage
from langchain_core.runnables import ConfigurableField, RunnableLambda
from langgraph.graph import END, START, MessagesState, StateGraph

from precedent import SpeculationCache
from precedent.errors import ConfigError, UnsupportedError
from precedent.langchain import ChatPrecedent, PrecedentLLM, RecordingCache
from precedent_testing.embedders import HashEmbedder
from precedent_testing.scripted_engine import ScriptedEngine, chatml_tokenizer
from precedent_testing.scripted_model import scripted_model_engine

pytestmark = pytest.mark.filterwarnings("ignore::langchain_core._api.beta_decorator.LangChainBetaWarning")

TOKENIZER = chatml_tokenizer()
Model = ChatPrecedent | PrecedentLLM
KINDS: tuple[type[Model], ...] = (ChatPrecedent, PrecedentLLM)
BY_KIND = pytest.mark.parametrize("kind", KINDS)


def echo(prompt: str) -> str:
    return f"said {len(prompt)}"


def model_of(kind: type[Model], **fields: Any) -> Any:
    return kind.from_engine(ScriptedEngine(TOKENIZER, echo), **fields)


def tenants(model: Any) -> list[str]:
    return [request.tenant for request in model.engine.requests]


# Every way in, and every place where a run could name a tenant


async def in_a_graph(model: Any, config: Any) -> None:
    """Inside a node nobody hands the configuration on."""

    def node(state: MessagesState) -> Any:
        model.invoke("hi")
        return {"messages": []}

    graph = StateGraph(MessagesState).add_node("model", node).add_edge(START, "model").add_edge("model", END).compile()
    await graph.ainvoke({"messages": [HumanMessage("hi")]}, config)


async def done(result: Any) -> None:
    if hasattr(result, "__aiter__"):
        _ = [one async for one in result]
    elif isinstance(result, Iterator):
        list(result)
    elif hasattr(result, "__await__"):
        await done(await result)


MOST = ConfigurableField(id="most")
WAYS: dict[str, Callable[[Any, Any], Any]] = {
    "invoke": lambda model, config: done(model.invoke("hi", config)),
    "ainvoke": lambda model, config: done(model.ainvoke("hi", config)),
    "stream": lambda model, config: done(model.stream("hi", config, tenant=None)),
    "astream": lambda model, config: done(model.astream("hi", config)),
    "batch": lambda model, config: done(model.batch(["hi"], config)),
    "batch of one by one": lambda model, config: done(model.batch(["hi"], {**config, "max_concurrency": 1})),
    "batch of configs": lambda model, config: done(model.batch(["hi"], [config])),
    "batch as completed": lambda model, config: done(model.batch_as_completed(["hi"], config)),
    "abatch": lambda model, config: done(model.abatch(["hi"], config)),
    "events": lambda model, config: done(model.astream_events("hi", config, version="v2")),
    "with config": lambda model, config: done(model.with_config(config).invoke("hi")),
    "bound": lambda model, config: done(model.bind(max_tokens=3, tenant=None).invoke("hi", config)),
    "retried": lambda model, config: done(model.with_retry().invoke("hi", config)),
    "falling back": lambda model, config: done(model.with_fallbacks([model]).stream("hi", config)),
    "chained": lambda model, config: done((RunnableLambda(str) | model).invoke("hi", config)),
    "nested": lambda model, config: done(RunnableLambda(model.invoke).invoke("hi", config)),
    "graph": in_a_graph,
    "configurable": lambda model, config: done(model.configurable_fields(max_tokens=MOST).invoke("hi", config)),
    "alternatives": lambda model, config: done(
        model.configurable_alternatives(ConfigurableField(id="which"), other=model).stream("hi", config)
    ),
}
CHAT_WAYS: dict[str, Callable[[Any, Any], Any]] = {
    "protocol": lambda model, config: done(iter([model.stream_events("hi", config, version="v3").output])),
    "async protocol": lambda model, config: done(model.astream_events("hi", config, version="v3")),
    "agent": lambda model, config: done(create_agent(model, []).invoke({"messages": [("user", "hi")]}, config)),
}
BY_WAY = pytest.mark.parametrize(
    ("kind", "way"),
    [*((kind, way) for way in WAYS for kind in KINDS), *((ChatPrecedent, way) for way in CHAT_WAYS)],
    ids=lambda one: one if isinstance(one, str) else one.__name__,
)


async def taken(way: str, model: Any, config: Any) -> None:
    await {**WAYS, **CHAT_WAYS}[way](model, config)


def run_of(tenant: Any) -> Any:
    """A run that names a tenant in its metadata; `configurable`, which clients fill in as well, is never read."""
    return {"metadata": {"tenant": tenant}, "configurable": {"tenant": "other"}}


UNUSABLE = [None, 7, "", ["north"], {"tenant": "north"}, "x" * 201, "two\nlines", "\ud800"]


@BY_WAY
async def test_a_run_chooses_a_tenant_only_where_the_model_takes_it_from_there(kind: Any, way: str) -> None:
    """And the step where it says it: LangChain hands a run's metadata on in a different way on each way in."""
    fixed, unset = model_of(kind, tenant="fixed", metadata={"tenant": "of the model"}), model_of(kind)
    for named in ("north", 7):
        await taken(way, fixed, run_of(named))
        await taken(way, unset, run_of(named))
    model = model_of(kind, tenant_from="metadata")
    await taken(way, model, run_of("north"))
    assert tenants(model) == ["north"]
    assert model.engine.requests[0].speculation is None, "the engine's own"
    assert set(tenants(fixed)) == {"fixed"}
    assert set(tenants(unset)) == {"default"}
    await taken(way, unset, {"metadata": {"workflow_step": "desk"}})
    assert unset.engine.requests[-1].workflow_step == "desk"


@BY_WAY
async def test_a_run_that_names_nobody_shares_nothing(kind: Any, way: str, caplog: Any) -> None:
    model = model_of(kind, tenant_from="metadata")
    with caplog.at_level(logging.WARNING):
        await taken(way, model, {})
        for named in UNUSABLE:
            await taken(way, model, run_of(named))
    told = tenants(model)
    assert len(told) == 1 + len(UNUSABLE) == len(set(told))
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
        list(model.bind(tenant="south").stream("hi", run))
        model.batch(["hi"], [run], tenant="south")
        assert tenants(model) == ["south"] * 2
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
def test_fields_that_leave_it_open_whose_runs_are_are_refused(kind: Any) -> None:
    with pytest.raises(ConfigError, match="tenant='a' and tenant_from='metadata' both set"):
        kind(model="m", tenant="a", tenant_from="metadata")
    with pytest.raises(ConfigError, match="tenant_from='configurable' must be 'metadata'"):
        kind(model="m", tenant_from="configurable")


# Batches of texts, of which LangChain hands on the first one's run alone


async def test_a_batch_is_of_one_tenant_and_step_where_runs_name_it() -> None:
    configs: Any = [{"metadata": {"tenant": "north"}}, {"metadata": {"tenant": "south"}}]
    model = model_of(PrecedentLLM, tenant_from="metadata")
    for several in (configs, [configs[0], {}]):
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


def test_structured_output_is_the_runs() -> None:
    schema = {"title": "Number", "type": "object", "properties": {"n": {"type": "integer"}}, "required": ["n"]}
    engine: Any = ScriptedEngine(TOKENIZER, lambda prompt: '{"n": 1}')
    model = ChatPrecedent.from_engine(engine, tenant_from="metadata")
    run: Any = {"metadata": {"tenant": "north"}}
    assert model.with_structured_output(schema).invoke("hi", run) == {"n": 1}
    assert model.with_structured_output(schema, include_raw=True).invoke("hi", run)["parsed"] == {"n": 1}
    assert tenants(model) == ["north"] * 2
