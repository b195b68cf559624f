"""Models that answer from a script, what they were asked, and a talk about orders with ways to damage it."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

import pytest
from langchain_core.callbacks import BaseCallbackHandler
from langchain_core.messages import AIMessage, AIMessageChunk, AnyMessage, HumanMessage, SystemMessage, ToolMessage
from langchain_core.tools import tool

from precedent.langchain import ChatPrecedent, PrecedentLLM, chat_model
from precedent.text.prompt import hermes_template
from precedent_testing.scripted_engine import ScriptedEngine, ScriptedRequest, chatml_tokenizer

TOKENIZER = chatml_tokenizer(chat_template=hermes_template())
NOT_CHATML = chatml_tokenizer(
    chat_template="{% for m in messages %}[{{ m.role }}] {{ m.content }}{{ m.tool_calls or '' }}{% endfor %}{{ tools }}"
)
HALF = "a\ud800"
"""Half a surrogate pair, which no encoding takes."""

MODELS = pytest.mark.parametrize("kind", [ChatPrecedent, PrecedentLLM])


@tool
def look_up(number: str) -> str:
    """Look up the state of an order."""
    return f"order {number} is {'sent' if number == '1042' else 'open'}"


def calling(name: str = "look_up", /, **arguments: Any) -> str:
    """A call as the scripted model writes it."""
    text = json.dumps({"name": name, "arguments": arguments}, ensure_ascii=False)
    return f"<tool_call>\n{text}\n</tool_call>"


CALL = calling(number="10 €")
BROKEN = '<tool_call>\n{"name": "look_up", "arguments": {"number": "10'


def scripted(kind: Any = ChatPrecedent, answer: str = "one STOP two", **fields: Any) -> Any:
    """A model that always says the same, or ends as soon as a grammar that forbids it allows."""
    engine: Any = ScriptedEngine(fields.pop("tokenizer", TOKENIZER), lambda prompt: answer, may_stray=True)
    return kind.from_engine(engine, **fields)


def model(script: Any = ("fine",) * 9, tokenizer: Any = TOKENIZER, **fields: Any) -> Any:
    return ChatPrecedent.from_engine(ScriptedEngine(tokenizer, script), **fields)  # type: ignore[arg-type]


def asked(model: Any) -> ScriptedRequest:
    return model.engine.requests[-1]


def text_of(answer: Any) -> str:
    return answer if isinstance(answer, str) else str(answer.text)


def merged(chunks: list[AIMessageChunk]) -> AIMessageChunk:
    total = chunks[0]
    for chunk in chunks[1:]:
        total = total + chunk  # type: ignore[assignment]
    return total


class Streaming(BaseCallbackHandler):
    """Makes LangChain answer `invoke` through `_stream`, as LangGraph's stream modes do."""

    def __init__(self) -> None:
        self.texts: list[str] = []

    def on_llm_new_token(self, token: str, **kwargs: Any) -> None:
        self.texts.append(token)


def _call(number: str) -> dict[str, Any]:
    return {"name": "look_up", "args": {"number": number}, "id": f"call {number}"}


TALK: list[AnyMessage] = [
    SystemMessage("Be kind."),
    HumanMessage("Where are 1042 and 7?"),
    AIMessage("I look.", tool_calls=[_call("1042"), _call("7")]),
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
