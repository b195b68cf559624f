"""Scripted models of both kinds, chat and text, and what they were asked."""

from __future__ import annotations

from typing import Any

import pytest

from helpers.order_chat import TOKENIZER
from precedent.langchain import ChatPrecedent, PrecedentLLM
from precedent_testing.scripted_engine import ScriptedEngine, ScriptedRequest

HALF = "a\ud800"
"""Half a surrogate pair, which no encoding takes."""

MODELS = pytest.mark.parametrize("kind", [ChatPrecedent, PrecedentLLM])


def scripted(kind: Any = ChatPrecedent, answer: str = "one STOP two", **fields: Any) -> Any:
    engine: Any = ScriptedEngine(fields.pop("tokenizer", TOKENIZER), lambda prompt: answer, may_stray=True)
    return kind.from_engine(engine, **fields)


def asked(model: Any) -> ScriptedRequest:
    return model.engine.requests[-1]


def text_of(answer: Any) -> str:
    return answer if isinstance(answer, str) else str(answer.text)
