"""ChatPrecedent in `create_agent` with real tools: sync, async, streamed; a broken call does not break the agent."""

from __future__ import annotations

from typing import Any

import pytest
from langchain.agents import create_agent
from langchain_core.messages import AIMessage, AIMessageChunk, ToolMessage
from langchain_core.tools import tool

from precedent.langchain import ChatPrecedent
from precedent_testing.scripted_engine import ScriptedEngine, chatml_tokenizer

ORDERS = {"1042": "sent", "7": "open"}


@tool
def look_up(number: str) -> str:
    """Look up the state of an order."""
    return f"order {number} is {ORDERS[number]}"


@tool
def cancel(number: str, reason: str = "none") -> str:
    """Cancel an order that is still open."""
    return f"order {number} cancelled ({reason})"


def call(name: str, arguments: str) -> str:
    return f'<tool_call>\n{{"name": "{name}", "arguments": {arguments}}}\n</tool_call>'


SCRIPT = [
    ("user", "Cancel the open one of 1042 and 7."),
    ("assistant", call("look_up", '{"number": "1042"}') + "\n" + call("look_up", '{"number": "7"}')),
    ("tool", "order 1042 is sent"),
    ("tool", "order 7 is open"),
    ("assistant", "One is open.\n" + call("cancel", '{"number": "7"}')),
    ("tool", "order 7 cancelled (none)"),
    ("assistant", "Order 7 is cancelled."),
]


def agent_on(engine: ScriptedEngine) -> Any:
    return create_agent(ChatPrecedent.from_engine(engine), tools=[look_up, cancel], name="desk")


def scripted_engine(**settings: Any) -> ScriptedEngine:
    return ScriptedEngine(chatml_tokenizer(), SCRIPT, **settings)


QUESTION: Any = {"messages": [("user", "Cancel the open one of 1042 and 7.")]}


def check_run(messages: list[Any], engine: ScriptedEngine) -> None:
    results = [message.content for message in messages if isinstance(message, ToolMessage)]
    assert results == ["order 1042 is sent", "order 7 is open", "order 7 cancelled (none)"]
    assert [len(message.tool_calls) for message in messages if isinstance(message, AIMessage)] == [2, 1, 0]
    assert messages[-1].content == "Order 7 is cancelled."
    assert [request.workflow_step for request in engine.requests] == ["desk/model"] * 3
    assert engine.requests[-1].query.startswith("actions: look_up look_up cancel\n")


@pytest.mark.parametrize("max_burst", [1, 50])
async def test_an_agent_calls_two_tools_in_parallel_and_one_after_them(max_burst: int) -> None:
    engine = scripted_engine(max_burst=max_burst)
    check_run(agent_on(engine).invoke(QUESTION)["messages"], engine)
    engine = scripted_engine(max_burst=max_burst)
    check_run((await agent_on(engine).ainvoke(QUESTION))["messages"], engine)


async def test_an_agent_streams_messages() -> None:
    engine = scripted_engine(max_burst=2)
    texts, calls = "", list[tuple[str, str]]()
    for chunk, _ in agent_on(engine).stream(QUESTION, stream_mode="messages"):
        if isinstance(chunk, AIMessageChunk):
            texts += str(chunk.content)
            for part in chunk.tool_call_chunks:
                name, arguments = (part["name"], "") if part["name"] else calls.pop()
                calls.append((name, arguments + (part["args"] or "")))
    assert texts == "One is open.Order 7 is cancelled."
    assert calls == [
        ("look_up", '{"number": "1042"}'),
        ("look_up", '{"number": "7"}'),
        ("cancel", '{"number": "7"}'),
    ]
    engine = scripted_engine(max_burst=2)
    streamed = [chunk async for chunk, _ in agent_on(engine).astream(QUESTION, stream_mode="messages")]
    assert "".join(str(chunk.content) for chunk in streamed if isinstance(chunk, AIMessageChunk)) == texts
    assert [request.workflow_step for request in engine.requests] == ["desk/model"] * 3


def test_the_prompt_of_the_next_turn_begins_with_what_was_read_and_written_before() -> None:
    engine = scripted_engine()
    agent_on(engine).invoke(QUESTION)
    for earlier, later in zip(engine.requests, engine.requests[1:], strict=False):
        known = earlier.prompt_ids + earlier.generation.result().token_ids
        assert later.prompt_ids[: len(known)] == known


def test_a_broken_call_is_answered_with_an_error_and_the_agent_goes_on() -> None:
    broken = '<tool_call>\n{"name": "look_up", "arguments": {"number": \n</tool_call>'
    fine = call("look_up", '{"number": "7"}')
    engine = ScriptedEngine(chatml_tokenizer(), [f"{fine}\n{broken}", "Sorry."])
    messages = agent_on(engine).invoke(QUESTION)["messages"]
    assert messages[-1].content == "Sorry."
    assert len(messages[1].invalid_tool_calls) == 1
    assert broken in engine.requests[-1].prompt, "the model sees what it wrote"
