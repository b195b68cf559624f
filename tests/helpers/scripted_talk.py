"""A talk about an order, ways to damage it, and a model that listens to it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from langchain_core.messages import AIMessage, AnyMessage, HumanMessage, SystemMessage, ToolMessage
from langchain_core.tools import tool

from precedent.langchain import ChatPrecedent, chat_model
from precedent.text.prompt import hermes_template
from precedent_testing.scripted_engine import ScriptedEngine, chatml_tokenizer

TOKENIZER = chatml_tokenizer(chat_template=hermes_template())
NOT_CHATML = chatml_tokenizer(
    chat_template="{% for m in messages %}[{{ m.role }}] {{ m.content }}{{ m.tool_calls or '' }}{% endfor %}{{ tools }}"
)


@tool
def look_up(number: str) -> str:
    """Look up the state of an order."""
    return f"order {number} is {'sent' if number == '1042' else 'open'}"


def call(number: str) -> dict[str, Any]:
    return {"name": "look_up", "args": {"number": number}, "id": f"call {number}"}


TALK: list[AnyMessage] = [
    SystemMessage("Be kind."),
    HumanMessage("Where are 1042 and 7?"),
    AIMessage("I look.", tool_calls=[call("1042"), call("7")]),
    ToolMessage("order 1042 is sent", tool_call_id="call 1042"),
    ToolMessage("order 7 is open", tool_call_id="call 7"),
    AIMessage("One is sent."),
    HumanMessage("Which?"),
]

Turns = list[dict[str, Any]]


def damaged(patch: pytest.MonkeyPatch, damage: Callable[[Turns], Turns]) -> None:
    """Let the library lose or change something between LangChain's messages and the prompt."""
    whole = chat_model.to_template_messages
    patch.setattr(chat_model, "to_template_messages", lambda messages, **how: damage(whole(messages, **how)))


def model(script: Any = ("fine",) * 9, tokenizer: Any = TOKENIZER, **fields: Any) -> ChatPrecedent:
    return ChatPrecedent.from_engine(ScriptedEngine(tokenizer, script), **fields)  # type: ignore[arg-type]
