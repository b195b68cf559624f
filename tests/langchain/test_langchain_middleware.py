"""Agents: tools called in parallel and in turn, and SpeculationMiddleware with tenants, steps, budgets and learning."""

from __future__ import annotations

import asyncio
from typing import Any, TypedDict

import pytest
from helpers.scripted_models import BROKEN, TOKENIZER, calling, look_up
from langchain.agents import create_agent
from langchain_core.language_models import FakeListChatModel
from langchain_core.messages import AIMessage, AIMessageChunk, HumanMessage, ToolMessage
from langchain_core.tools import tool

from precedent import SpeculationCache
from precedent.errors import CacheError, ConfigError
from precedent.langchain import ChatPrecedent, SpeculationMiddleware
from precedent.langchain.middleware import ended_well
from precedent_testing.embedders import HashEmbedder
from precedent_testing.scripted_engine import ScriptedEngine
from precedent_testing.scripted_model import scripted_model_engine


class Context(TypedDict):
    org: str


@tool
def cancel(number: str, reason: str = "none") -> str:
    """Cancel an order that is still open."""
    return f"order {number} cancelled ({reason})"


@tool
def fail(number: str) -> str:
    """Always fails."""
    raise RuntimeError("down")


CALL = calling(number="7")
QUESTION: Any = {"messages": [("user", "Where is order 7?")]}
SCRIPT = [
    ("user", "Where is order 7?"),
    ("assistant", CALL),
    ("tool", "order 7 is open"),
    ("assistant", "It is open."),
]


def agent_on(engine: Any, *, tools: Any = (look_up,), **middleware: Any) -> Any:
    model, between = ChatPrecedent.from_engine(engine), [SpeculationMiddleware(**middleware)]
    return create_agent(model, list(tools), middleware=between, context_schema=Context, name="desk")


def scripted(answers: Any = SCRIPT, **settings: Any) -> Any:
    return ScriptedEngine(TOKENIZER, answers, **settings)


# Agents

CANCEL: Any = {"messages": [("user", "Cancel the open one of 1042 and 7.")]}
CANCELLING = [
    ("user", "Cancel the open one of 1042 and 7."),
    ("assistant", calling("look_up", number="1042") + "\n" + CALL),
    ("tool", "order 1042 is sent"),
    ("tool", "order 7 is open"),
    ("assistant", "One is open.\n" + calling("cancel", number="7")),
    ("tool", "order 7 cancelled (none)"),
    ("assistant", "Order 7 is cancelled."),
]


@pytest.mark.parametrize("max_burst", [1, 50])
async def test_an_agent_calls_two_tools_in_parallel_and_one_after_them(max_burst: int) -> None:
    engine = scripted(CANCELLING, max_burst=max_burst)
    agent = create_agent(ChatPrecedent.from_engine(engine), tools=[look_up, cancel], name="desk")
    for state in (agent.invoke(CANCEL), await agent.ainvoke(CANCEL)):
        messages = state["messages"]
        results = [message.content for message in messages if isinstance(message, ToolMessage)]
        assert results == [text for role, text in CANCELLING if role == "tool"]
        assert [len(message.tool_calls) for message in messages if isinstance(message, AIMessage)] == [2, 1, 0]
        assert messages[-1].content == "Order 7 is cancelled."
    for streamed in (
        [chunk for chunk, _ in agent.stream(CANCEL, stream_mode="messages")],
        [chunk async for chunk, _ in agent.astream(CANCEL, stream_mode="messages")],
    ):
        chunks = [chunk for chunk in streamed if isinstance(chunk, AIMessageChunk)]
        assert "".join(chunk.text for chunk in chunks) == "One is open.Order 7 is cancelled."
        pieces = [part for chunk in chunks for part in chunk.tool_call_chunks]
        assert [part["name"] for part in pieces if part["name"]] == ["look_up", "look_up", "cancel"]
        arguments = "".join(part["args"] or "" for part in pieces)
        assert arguments == '{"number": "1042"}{"number": "7"}{"number": "7"}'
    assert [request.workflow_step for request in engine.requests] == ["desk/model"] * 12
    assert engine.requests[2].query.startswith("actions: look_up look_up cancel\n")
    for earlier, later in zip(engine.requests[:2], engine.requests[1:3], strict=True):
        known = earlier.prompt_ids + earlier.generation.result().token_ids
        assert later.prompt_ids[: len(known)] == known, "the next prompt begins with what was read and written before"


def test_a_broken_call_is_answered_with_an_error_and_the_agent_goes_on() -> None:
    engine = scripted([f"{CALL}\n{BROKEN}", "Sorry."])
    messages = agent_on(engine).invoke(QUESTION)["messages"]
    assert messages[-1].content == "Sorry."
    assert len(messages[1].invalid_tool_calls) == 1
    assert BROKEN in engine.requests[-1].prompt, "the model sees what it wrote"


# Tenants, steps and budgets


async def test_the_runtimes_context_names_the_tenant_and_steps_and_budgets_may_depend_on_the_request() -> None:
    engine = scripted()
    settings = {"workflow": lambda one: f"turn {len(one.messages)}", "budget": lambda one: 2 * len(one.messages)}
    agent = agent_on(engine, tenant=lambda runtime: runtime.context["org"], **settings)
    agent.invoke(QUESTION, context={"org": "acme"})
    await agent.ainvoke(QUESTION, context={"org": "bolt"})
    agent_on(engine, workflow="orders", budget=5).invoke(QUESTION)
    assert [request.tenant for request in engine.requests] == ["acme", "acme", "bolt", "bolt", "default", "default"]
    assert [one.workflow_step for one in engine.requests] == [*("turn 1", "turn 3") * 2, "orders", "orders"]
    assert [request.speculation.max_nodes for request in engine.requests] == [2, 6, 2, 6, 5, 5]


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
        self.agent = agent_on(self.engine, tenant="acme", **settings)

    def texts(self) -> list[str]:
        return [one.text for one in reversed(self.cache.list(tenant="acme"))]


def num_steps(*states: Any) -> int:
    """Target forwards behind the answers in the states of an agent."""
    messages = [message for state in states for message in (state or {}).get("messages", ())]
    said = [message for message in messages if isinstance(message, AIMessage)]
    return sum(message.response_metadata["speculation"]["num_steps"] for message in said)


async def test_a_run_that_ended_well_is_learned_at_its_end() -> None:
    run = Learned()
    seen_during_the_run, steps = [], 0
    for update in run.agent.stream(QUESTION):
        seen_during_the_run.append(len(run.cache.list()))
        steps += num_steps(*update.values())
    assert seen_during_the_run[:-1] == [0] * (len(seen_during_the_run) - 1)
    assert [text.split("\n")[0] for text in run.texts()] == ["<tool_call>", "It is open."]
    assert num_steps(run.agent.invoke(QUESTION)) < steps / 2, "and the next run is drafted from it"
    await asyncio.gather(*(run.agent.ainvoke(QUESTION) for _ in range(3)))
    assert sum(one.count for one in run.cache.list()) == 10, "async runs learn as well and side by side"
    run.engine.close()


@pytest.mark.parametrize("kind", ["judged", "malformed", "raised", "at once"])
def test_only_a_run_that_ended_well_teaches_unless_answers_are_learned_at_once(kind: str) -> None:
    if kind == "judged":
        run = Learned(learn_from=lambda state: False)
        run.agent.invoke(QUESTION)
    elif kind == "malformed":
        run = Learned([f"{CALL}\n{BROKEN}", "Sorry."])
        run.agent.invoke(QUESTION)
    else:
        script = [calling("fail", number="7"), "never"]
        run = Learned(script, tools=[fail], **({"learn_from": None} if kind == "at once" else {}))
        with pytest.raises(RuntimeError, match="down"):
            run.agent.invoke(QUESTION)
    assert len(run.texts()) == (kind == "at once")
    run.engine.close()


def test_a_cache_that_cannot_be_written_does_not_fail_the_run(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def fail(*_: object, **__: object) -> None:
        raise CacheError("the disk is full")

    run = Learned()
    monkeypatch.setattr(SpeculationCache, "insert", fail)
    assert run.agent.invoke(QUESTION)["messages"][-1].content == "It is open."
    assert "the completions of a run were not stored: the disk is full" in caplog.messages
    run.engine.close()


def test_what_ended_well_means() -> None:
    asked, answered = HumanMessage("hi"), AIMessage("done")
    calling = AIMessage("", tool_calls=[{"name": "f", "args": {}, "id": "1"}])
    failed = ToolMessage("x", tool_call_id="1", status="error")
    for messages in ([], [asked], [asked, calling], [asked, calling, failed, answered]):
        assert not ended_well({"messages": messages})
    for messages in ([asked, answered], [asked, calling, ToolMessage("x", tool_call_id="1"), answered]):
        assert ended_well({"messages": messages})
