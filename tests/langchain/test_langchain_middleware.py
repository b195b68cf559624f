"""SpeculationMiddleware in `create_agent`: tenants, steps, budgets, and learning only from runs that ended well."""

from __future__ import annotations

import asyncio
from typing import Any, TypedDict

import pytest
from langchain.agents import create_agent
from langchain_core.language_models import FakeListChatModel
from langchain_core.messages import AIMessage, HumanMessage, ToolMessage
from langchain_core.tools import tool

from precedent import SpeculationCache
from precedent.errors import ConfigError
from precedent.langchain import ChatPrecedent, SpeculationMiddleware
from precedent.langchain.middleware import ended_well
from precedent_testing.embedders import HashEmbedder
from precedent_testing.scripted_engine import ScriptedEngine, chatml_tokenizer
from precedent_testing.scripted_model import scripted_model_engine

CALL = '<tool_call>\n{"name": "look_up", "arguments": {"number": "7"}}\n</tool_call>'
BROKEN = '<tool_call>\n{"name": "look_up", "arguments": {"nu\n</tool_call>'
QUESTION: Any = {"messages": [("user", "Where is order 7?")]}


class Context(TypedDict):
    org: str


@tool
def look_up(number: str) -> str:
    """Look up the state of an order."""
    return f"order {number} is open"


@tool
def fail(number: str) -> str:
    """Always fails."""
    raise RuntimeError("down")


SCRIPT = [
    ("user", "Where is order 7?"),
    ("assistant", CALL),
    ("tool", "order 7 is open"),
    ("assistant", "It is open."),
]


def agent_on(engine: Any, *, tools: Any = (look_up,), **middleware: Any) -> Any:
    return create_agent(
        ChatPrecedent.from_engine(engine),
        tools=list(tools),
        middleware=[SpeculationMiddleware(**middleware)],
        context_schema=Context,
        name="desk",
    )


def scripted(answers: Any = SCRIPT) -> ScriptedEngine:
    return ScriptedEngine(chatml_tokenizer(), answers)


async def test_the_runtimes_context_names_the_tenant_of_every_call() -> None:
    engine = scripted()
    agent = agent_on(engine, tenant=lambda runtime: runtime.context["org"], workflow="orders", budget=5)
    agent.invoke(QUESTION, context={"org": "acme"})
    await agent.ainvoke(QUESTION, context={"org": "bolt"})
    assert [request.tenant for request in engine.requests] == ["acme", "acme", "bolt", "bolt"]
    assert {request.workflow_step for request in engine.requests} == {"orders"}
    assert {request.speculation.max_nodes for request in engine.requests} == {5}


def test_steps_and_budgets_may_depend_on_the_request() -> None:
    engine = scripted()
    agent = agent_on(
        engine,
        workflow=lambda request: f"turn {len(request.messages)}",
        budget=lambda request: 2 * len(request.messages),
    )
    agent.invoke(QUESTION)
    assert [request.workflow_step for request in engine.requests] == ["turn 1", "turn 3"]
    assert [request.speculation.max_nodes for request in engine.requests] == [2, 6]


def test_without_settings_the_runs_own_metadata_names_the_step_and_no_tenant() -> None:
    engine = scripted()
    agent_on(engine).invoke(QUESTION, {"metadata": {"tenant": "north"}, "configurable": {"tenant": "north"}})
    assert {(request.tenant, request.workflow_step) for request in engine.requests} == {("default", "desk/model")}


@pytest.mark.parametrize("found", [None, "", 7])
def test_a_run_without_a_tenant_never_falls_back_to_another(found: Any) -> None:
    engine = scripted()
    with pytest.raises(ConfigError, match="the tenant of this run is"):
        agent_on(engine, tenant=lambda _: found).invoke(QUESTION)
    assert engine.requests == []


def test_other_chat_models_are_left_alone() -> None:
    agent = create_agent(FakeListChatModel(responses=["hi"]), middleware=[SpeculationMiddleware(tenant="acme")])
    assert agent.invoke(QUESTION)["messages"][-1].content == "hi"


# Learning


class Learned:
    """An agent on a real engine with a cache, and what the cache holds."""

    def __init__(self, answers: Any = SCRIPT, **settings: Any) -> None:
        self.cache = SpeculationCache.open(embedder=HashEmbedder())
        self.engine = scripted_model_engine(answers, cache=self.cache)
        self.agent = agent_on(self.engine, **settings)

    def texts(self) -> list[str]:
        return [one.text for one in reversed(self.cache.list(tenant="acme"))]


def test_a_run_that_ended_well_is_learned_at_its_end() -> None:
    run = Learned(tenant="acme")
    seen_during_the_run, steps = [], 0
    for update in run.agent.stream(QUESTION):
        seen_during_the_run.append(len(run.cache.list()))
        steps += num_steps(*update.values())
    assert seen_during_the_run[:-1] == [0] * (len(seen_during_the_run) - 1)
    assert [text.split("\n")[0] for text in run.texts()] == ["<tool_call>", "It is open."]
    assert num_steps(run.agent.invoke(QUESTION)) < steps / 2, "and the next run is drafted from it"
    run.engine.close()


def num_steps(*states: Any) -> int:
    """Target forwards behind the answers in the states of an agent."""
    messages = [message for state in states for message in (state or {}).get("messages", ())]
    said = [message for message in messages if isinstance(message, AIMessage)]
    return sum(message.response_metadata["speculation"]["num_steps"] for message in said)


async def test_async_runs_learn_as_well_and_side_by_side() -> None:
    run = Learned(tenant="acme")
    await asyncio.gather(*(run.agent.ainvoke(QUESTION) for _ in range(3)))
    assert sum(one.count for one in run.cache.list()) == 6
    run.engine.close()


@pytest.mark.parametrize("kind", ["judged", "malformed", "raised"])
def test_a_run_that_did_not_end_well_teaches_nothing(kind: str) -> None:
    if kind == "judged":
        run = Learned(tenant="acme", learn_from=lambda state: False)
        run.agent.invoke(QUESTION)
    elif kind == "malformed":
        run = Learned([f"{CALL}\n{BROKEN}", "Sorry."], tenant="acme")
        run.agent.invoke(QUESTION)
    else:
        run = Learned([CALL.replace("look_up", "fail"), "never"], tenant="acme", tools=[fail])
        with pytest.raises(RuntimeError, match="down"):
            run.agent.invoke(QUESTION)
    assert run.cache.list() == []
    run.engine.close()


def test_learning_at_once_is_what_happens_without_the_middleware() -> None:
    run = Learned([CALL.replace("look_up", "fail"), "never"], tenant="acme", tools=[fail], learn_from=None)
    with pytest.raises(RuntimeError, match="down"):
        run.agent.invoke(QUESTION)
    assert len(run.texts()) == 1
    run.engine.close()


ANSWERED = AIMessage("done")
CALLING = AIMessage("", tool_calls=[{"name": "f", "args": {}, "id": "1"}])


@pytest.mark.parametrize(
    ("messages", "expected"),
    [
        ([HumanMessage("hi"), ANSWERED], True),
        ([HumanMessage("hi"), CALLING], False),
        ([HumanMessage("hi"), CALLING, ToolMessage("x", tool_call_id="1", status="error"), ANSWERED], False),
        ([HumanMessage("hi"), CALLING, ToolMessage("x", tool_call_id="1"), ANSWERED], True),
        ([HumanMessage("hi")], False),
        ([], False),
    ],
)
def test_what_ended_well_means(messages: list[Any], expected: bool) -> None:
    assert ended_well({"messages": messages}) is expected
