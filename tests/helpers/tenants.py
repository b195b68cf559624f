"""Models that echo their question, and whose requests reached their engine."""

from __future__ import annotations

from typing import Any

from precedent.langchain import ChatPrecedent, PrecedentLLM
from precedent_testing.scripted_engine import ScriptedEngine, chatml_tokenizer

TOKENIZER = chatml_tokenizer()
Model = ChatPrecedent | PrecedentLLM


def echo(prompt: str) -> str:
    return f"said {len(prompt)}"


def model_of(kind: type[Model], **fields: Any) -> Any:
    return kind.from_engine(ScriptedEngine(TOKENIZER, echo), **fields)


def tenants(model: Any) -> list[str]:
    return [request.tenant for request in model.engine.requests]


KINDS: tuple[type[Model], ...] = (ChatPrecedent, PrecedentLLM)
