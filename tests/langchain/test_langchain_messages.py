"""LangChain messages of every kind become what chat templates read."""

from __future__ import annotations

from typing import Any

import pytest
from langchain_core.messages import (
    AIMessage,
    BaseMessage,
    ChatMessage,
    FunctionMessage,
    HumanMessage,
    RemoveMessage,
    SystemMessage,
    ToolMessage,
)
from langchain_core.messages.tool import invalid_tool_call, tool_call

from precedent.errors import PromptError, UnsupportedError
from precedent.langchain.messages import to_template_messages

CALL = {"type": "function", "id": "c1", "function": {"name": "look_up", "arguments": {"n": 1}}}


def only(message: BaseMessage) -> dict[str, Any]:
    (turn,) = to_template_messages([message])
    return turn


@pytest.mark.parametrize(
    ("message", "turn"),
    [
        (SystemMessage("s"), {"role": "system", "content": "s"}),
        (HumanMessage("u", name="ann"), {"role": "user", "content": "u", "name": "ann"}),
        (AIMessage("a"), {"role": "assistant", "content": "a"}),
        (ChatMessage(role="developer", content="d"), {"role": "system", "content": "d"}),
        (ChatMessage(role="user", content="u"), {"role": "user", "content": "u"}),
        (HumanMessage(["a", {"type": "text", "text": "b", "cache_control": {}}]), {"role": "user", "content": "ab"}),
        (FunctionMessage(name="f", content="r"), {"role": "tool", "content": "r", "name": "f", "tool_call_id": ""}),
        (ToolMessage("r", tool_call_id="c1"), {"role": "tool", "content": "r", "tool_call_id": "c1"}),
        (
            ToolMessage([{"type": "text", "text": "r"}, {"type": "json", "json": {"a": "é"}}], tool_call_id="c1"),
            {"role": "tool", "content": 'r{"a": "é"}', "tool_call_id": "c1"},
        ),
        (
            ToolMessage("no such order", tool_call_id="c1", status="error"),
            {"role": "tool", "content": "Error: no such order", "tool_call_id": "c1"},
        ),
        (
            ToolMessage("Error: no", tool_call_id="c1", status="error"),
            {"role": "tool", "content": "Error: no", "tool_call_id": "c1"},
        ),
        (
            AIMessage("", tool_calls=[tool_call(name="look_up", args={"n": 1}, id="c1")]),
            {"role": "assistant", "content": "", "tool_calls": [CALL]},
        ),
        (
            AIMessage([{"type": "thinking", "thinking": "hm"}, {"type": "text", "text": "a"}]),
            {"role": "assistant", "content": "a", "reasoning_content": "hm"},
        ),
        (
            AIMessage("a", additional_kwargs={"reasoning_content": "hm"}),
            {"role": "assistant", "content": "a", "reasoning_content": "hm"},
        ),
        (
            AIMessage("a", invalid_tool_calls=[invalid_tool_call(name=None, args="<tool_call>{", id="c", error=None)]),
            {"role": "assistant", "content": "a", "invalid_calls": [{"name": None, "args": "<tool_call>{", "id": "c"}]},
        ),
    ],
)
def test_one_message(message: BaseMessage, turn: dict[str, Any]) -> None:
    assert only(message) == turn


def test_two_system_and_two_user_messages_stay_two() -> None:
    turns = to_template_messages([SystemMessage("a"), SystemMessage("b"), HumanMessage("c"), HumanMessage("d")])
    assert [(turn["role"], turn["content"]) for turn in turns] == [
        ("system", "a"),
        ("system", "b"),
        ("user", "c"),
        ("user", "d"),
    ]


def test_anthropic_blocks_become_calls_and_tool_turns() -> None:
    use = {"type": "tool_use", "id": "c1", "name": "look_up", "input": {"n": 1}}
    result = {
        "type": "tool_result",
        "tool_use_id": "c1",
        "is_error": True,
        "content": [{"type": "text", "text": "gone"}],
    }
    turns = to_template_messages(
        [
            AIMessage([{"type": "text", "text": "I look."}, use]),
            HumanMessage([result, {"type": "text", "text": "and?"}]),
        ]
    )
    assert turns == [
        {"role": "assistant", "content": "I look.", "tool_calls": [CALL]},
        {"role": "tool", "content": "Error: gone", "tool_call_id": "c1", "name": "look_up"},
        {"role": "user", "content": "and?"},
    ]


def test_a_call_that_stands_in_content_and_in_tool_calls_is_one() -> None:
    use = {"type": "tool_use", "id": "c1", "name": "look_up", "input": {"n": 1}}
    message = AIMessage([use], tool_calls=[tool_call(name="look_up", args={"n": 1}, id="c1")])
    assert only(message)["tool_calls"] == [CALL]


@pytest.mark.parametrize("kind", ["image_url", "image", "audio", "file", "document"])
def test_what_is_not_text_is_refused_by_name(kind: str) -> None:
    with pytest.raises(UnsupportedError, match=f"message 2 holds a block of type '{kind}'"):
        to_template_messages([HumanMessage("x"), HumanMessage([{"type": "text", "text": "see"}, {"type": kind}])])


def test_no_messages() -> None:
    with pytest.raises(PromptError, match="message list is empty"):
        to_template_messages([])


@pytest.mark.parametrize("message", [ChatMessage(role="narrator", content="x"), RemoveMessage(id="1")])
def test_an_unknown_role(message: BaseMessage) -> None:
    with pytest.raises(PromptError, match="message 1 has role"):
        to_template_messages([message])
