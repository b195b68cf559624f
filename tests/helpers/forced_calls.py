"""Scripted models that call tools as they are told, or would rather write prose."""

from __future__ import annotations

import json
from typing import Any, Literal

from langchain_core.messages import AIMessage
from langchain_core.tools import tool
from pydantic import BaseModel, Field

from precedent.langchain import ChatPrecedent
from precedent_testing.scripted_engine import ScriptedEngine, ScriptedRequest, chatml_tokenizer

TEXT = "I would rather write prose."
TOKENIZER = chatml_tokenizer()


@tool
def look_up(number: str) -> str:
    """Look up an order."""
    return f"order {number} was sent"


@tool
def refund(number: str, percent: Literal[50, 100]) -> str:
    """Refund an order."""
    return "done"


def call(name: str, **arguments: Any) -> str:
    return f'<tool_call>\n{{"name": "{name}", "arguments": {json.dumps(arguments)}}}\n</tool_call>'


def scripted(script: Any, *, may_stray: bool = False, **settings: Any) -> ChatPrecedent:
    answer = script if callable(script) else lambda prompt: script[0]
    engine: Any = ScriptedEngine(TOKENIZER, answer, may_stray=may_stray)
    return ChatPrecedent.from_engine(engine, **settings)


def reluctant(script: Any, **settings: Any) -> ChatPrecedent:
    """A model that would say something else: where a grammar forbids it, it ends as soon as it may."""
    return scripted(script, may_stray=True, **settings)


def request_of(model: ChatPrecedent) -> ScriptedRequest:
    engine: Any = model.engine
    return engine.requests[-1]


def called(message: AIMessage) -> list[tuple[str, dict[str, Any]]]:
    assert message.invalid_tool_calls == []
    return [(one["name"], one["args"]) for one in message.tool_calls]


class Ticket(BaseModel):
    """A ticket."""

    title: str = Field(max_length=20)
    urgent: bool = False
    tags: list[Literal["bug", "wish"]] = Field(default_factory=list, max_length=2)


GIVEN = {"title": "No sound", "urgent": True}
