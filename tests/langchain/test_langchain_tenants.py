"""Who may say whose a call is: the application always, a run only where the model takes the tenant from it."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator
from typing import Any

import pytest
from helpers.tenants import KINDS, TOKENIZER, Model, model_of, tenants
from langchain.agents import create_agent
from langchain_core.messages import HumanMessage
from langchain_core.runnables import ConfigurableField, RunnableLambda
from langgraph.graph import END, START, MessagesState, StateGraph

from precedent.errors import ConfigError
from precedent.langchain import ChatPrecedent, PrecedentLLM
from precedent_testing.scripted_engine import ScriptedEngine

pytestmark = pytest.mark.filterwarnings("ignore::langchain_core._api.beta_decorator.LangChainBetaWarning")


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
        stream = await model.astream_events("hi", config, version="v3")
        _ = [event async for event in stream]
    else:
        await model.ainvoke("hi", config)


async def in_a_graph(model: Any, config: Any) -> None:
    """Inside a node nobody hands the configuration on."""

    def node(state: MessagesState) -> Any:
        model.invoke("hi")
        return {"messages": []}

    graph = StateGraph(MessagesState).add_node("model", node).add_edge(START, "model").add_edge("model", END).compile()
    await graph.ainvoke({"messages": [HumanMessage("hi")]}, config)


async def awaited(result: Any) -> None:
    await result


async def drained(stream: Any) -> None:
    async for _ in stream:
        pass


async def done(result: object) -> None:
    if isinstance(result, Iterator):
        list(result)


WAYS: dict[str, Callable[[Any, Any], Any]] = {
    "invoke": lambda model, config: done(model.invoke("hi", config)),
    "ainvoke": lambda model, config: awaited(model.ainvoke("hi", config)),
    "stream": lambda model, config: done(model.stream("hi", config)),
    "astream": lambda model, config: drained(model.astream("hi", config)),
    "batch": lambda model, config: done(model.batch(["hi"], config)),
    "batch of one by one": lambda model, config: done(model.batch(["hi"], {**config, "max_concurrency": 1})),
    "batch of configs": lambda model, config: done(model.batch(["hi"], [config])),
    "batch as completed": lambda model, config: done(model.batch_as_completed(["hi"], config)),
    "abatch": lambda model, config: awaited(model.abatch(["hi"], config)),
    "generate": lambda model, config: done(model.with_config(config).invoke("hi")),
    "events": in_a_stream_of_events,
    "protocol": in_a_protocol_stream,
    "async protocol": in_an_async_protocol_stream,
    "bound": lambda model, config: done(model.bind(max_tokens=3).invoke("hi", config)),
    "bound to None": lambda model, config: done(model.bind(tenant=None).invoke("hi", config)),
    "asked with None": lambda model, config: done(model.invoke("hi", config, tenant=None)),
    "streamed with None": lambda model, config: done(model.stream("hi", config, tenant=None)),
    "retried": lambda model, config: done(model.with_retry().invoke("hi", config)),
    "falling back": lambda model, config: done(model.with_fallbacks([model]).stream("hi", config)),
    "chained": lambda model, config: done((RunnableLambda(str) | model).invoke("hi", config)),
    "nested": lambda model, config: done(RunnableLambda(model.invoke).invoke("hi", config)),
    "graph": in_a_graph,
    "configurable": lambda model, config: done(
        model.configurable_fields(max_tokens=ConfigurableField(id="most")).invoke("hi", config)
    ),
    "alternatives": lambda model, config: done(
        model.configurable_alternatives(ConfigurableField(id="which"), other=model).stream("hi", config)
    ),
}

PLACES: dict[str, Callable[[Any], Any]] = {
    "metadata": lambda tenant: {"metadata": {"tenant": tenant}},
    "configurable": lambda tenant: {"configurable": {"tenant": tenant}},
    "both": lambda tenant: {"metadata": {"tenant": tenant}, "configurable": {"tenant": "other"}},
}


@pytest.mark.parametrize("way", WAYS)
async def test_a_run_chooses_no_tenant_unless_the_model_takes_it_from_there(way: str) -> None:
    for kind in KINDS:
        fixed = model_of(kind, tenant="fixed", metadata={"tenant": "of the model"})
        unset = model_of(kind)
        for named in ("north", 7, "", None):
            for place in PLACES.values():
                await WAYS[way](fixed, place(named))
                await WAYS[way](unset, place(named))
        assert set(tenants(fixed)) == {"fixed"}
        assert set(tenants(unset)) == {"default"}


@pytest.mark.parametrize("way", WAYS)
async def test_a_run_chooses_its_tenant_where_the_model_takes_it_from_there(way: str) -> None:
    for kind in KINDS:
        for place in PLACES.values():
            model = model_of(kind, tenant_from="metadata")
            await WAYS[way](model, place("north"))
            assert tenants(model) == ["north"]
            assert model.engine.requests[0].speculation is None, "the engine's own"


UNUSABLE = [None, 7, "", True, ["north"], {"tenant": "north"}, "x" * 201, "two\nlines", "\ud800"]


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("kind", KINDS)
async def test_a_run_that_names_nobody_shares_nothing(way: str, kind: type[Model], caplog: Any) -> None:
    model = model_of(kind, tenant_from="metadata")
    with caplog.at_level(logging.WARNING):
        await WAYS[way](model, {})
        for place in ("metadata", "configurable"):
            for named in UNUSABLE:
                await WAYS[way](model, PLACES[place](named))
    told = tenants(model)
    assert len(told) == 1 + 2 * len(UNUSABLE) == len(set(told))
    assert all(tenant.startswith("nobody-") and type(tenant) is str for tenant in told)
    for request in model.engine.requests:
        assert not request.speculation.write_back
        assert request.speculation.drafters == tuple(
            name for name in model.engine.speculation.drafters if name != "recall"
        )
    assert caplog.text.count("names no tenant: it neither reads nor writes the cache") == 1


@pytest.mark.parametrize("kind", KINDS)
def test_the_application_has_the_last_word(kind: type[Model]) -> None:
    for fields in ({"tenant": "fixed"}, {"tenant_from": "metadata"}):
        model, run = model_of(kind, **fields), {"metadata": {"tenant": "north"}}
        model.invoke("hi", run, tenant="south")
        list(model.bind(tenant="south").stream("hi", run))
        model.batch(["hi"], [run], tenant="south")
        assert tenants(model) == ["south"] * 3
    own = model_of(kind, tenant_from="metadata", metadata={"tenant": "west"})
    own.invoke("hi", {"metadata": {"tenant": "north"}})
    list(own.stream("hi", {"metadata": {"tenant": "north"}}))
    assert tenants(own) == ["west"] * 2, "metadata that is fixed on the model is the application's"


@pytest.mark.parametrize("kind", KINDS)
def test_configurable_reaches_a_tenant_that_the_application_made_configurable(kind: type[Model]) -> None:
    model = model_of(kind, tenant="fixed")
    open_to_all = model.configurable_fields(tenant=ConfigurableField(id="whose"))
    open_to_all.invoke("hi", {"configurable": {"whose": "north", "tenant": "south"}})
    open_to_all.invoke("hi", {"configurable": {"tenant": "south"}, "metadata": {"whose": "west"}})
    assert tenants(model) == ["north", "fixed"]


@pytest.mark.parametrize(
    ("fields", "said"),
    [
        ({"tenant": "a", "tenant_from": "metadata"}, "tenant='a' and tenant_from='metadata' both set"),
        ({"tenant_from": "configurable"}, "tenant_from='configurable' must be 'metadata'"),
        ({"tenant": ""}, "tenant='' must be a non-empty text"),
    ],
)
def test_fields_that_leave_it_open_whose_runs_are_are_refused(fields: dict[str, Any], said: str) -> None:
    for kind in (ChatPrecedent, PrecedentLLM):
        with pytest.raises(ConfigError, match=said):
            kind(model="m", **fields)


# Agents and structured output


def test_an_agents_run_names_a_tenant_only_where_it_may() -> None:
    for fields, expected in (({"tenant": "fixed"}, "fixed"), ({"tenant_from": "metadata"}, "north")):
        model = model_of(ChatPrecedent, **fields)
        create_agent(model, tools=[]).invoke({"messages": [("user", "hi")]}, {"metadata": {"tenant": "north"}})
        create_agent(model, tools=[]).invoke({"messages": [("user", "hi")]}, {"configurable": {"tenant": "north"}})
        assert tenants(model) == [expected] * 2


def test_structured_output_and_tools_are_the_models() -> None:
    schema = {"title": "Number", "type": "object", "properties": {"n": {"type": "integer"}}, "required": ["n"]}
    for fields, expected in (({"tenant": "fixed"}, "fixed"), ({"tenant_from": "metadata"}, "north")):
        engine = ScriptedEngine(TOKENIZER, lambda prompt: '{"n": 1}')
        model = ChatPrecedent.from_engine(engine, **fields)  # type: ignore[arg-type]
        run: Any = {"metadata": {"tenant": "north"}}
        assert model.with_structured_output(schema).invoke("hi", run) == {"n": 1}
        assert model.with_structured_output(schema, include_raw=True).invoke("hi", run)["parsed"] == {"n": 1}
        assert tenants(model) == [expected] * 2
