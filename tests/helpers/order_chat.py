"""A scripted chat model, a tool that looks up orders, and answers that call it whole and cut off."""

from __future__ import annotations

from typing import Any

from langchain_core.callbacks import BaseCallbackHandler
from langchain_core.messages import AIMessageChunk
from langchain_core.tools import tool

from precedent.langchain import ChatPrecedent
from precedent.text.prompt import hermes_template
from precedent_testing.scripted_engine import ScriptedEngine, chatml_tokenizer

TOKENIZER = chatml_tokenizer(chat_template=hermes_template())
CALL = '<tool_call>\n{"name": "look_up", "arguments": {"number": "10 €"}}\n</tool_call>'
BROKEN = '<tool_call>\n{"name": "look_up", "arguments": {"number": "10'


@tool
def look_up(number: str) -> str:
    """Look up an order by its number."""
    return f"order {number}: sent"


def scripted(*answers: str, **engine: Any) -> ChatPrecedent:
    return ChatPrecedent.from_engine(ScriptedEngine(TOKENIZER, answers, **engine))


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
