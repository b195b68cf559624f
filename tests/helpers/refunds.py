"""Refunds as answers, in every kind of schema, from a scripted model."""

from __future__ import annotations

import json
from typing import Any

from pydantic import BaseModel
from pydantic.v1 import BaseModel as BaseModelV1

from precedent.langchain import ChatPrecedent
from precedent_testing.scripted_engine import ScriptedEngine, ScriptedRequest, chatml_tokenizer

TOKENIZER = chatml_tokenizer()
METHODS = ("json_schema", "json_mode", "function_calling")


class Refund(BaseModel):
    """A refund."""

    order: str
    amount: int
    note: str = ""


class RefundV1(BaseModelV1):
    """A refund."""

    order: str
    amount: int
    note: str = ""


DICT = {**Refund.model_json_schema(), "title": "Refund"}
GIVEN = {"order": "A17", "amount": 1200, "note": "late"}


def answering(text: str, **settings: Any) -> ChatPrecedent:
    engine: Any = ScriptedEngine(TOKENIZER, lambda prompt: text, max_burst=3, may_stray=True)
    return ChatPrecedent.from_engine(engine, **settings)


def text_of(method: str, schema: Any, **arguments: Any) -> str:
    whole = json.dumps(arguments)
    name = schema.__name__ if isinstance(schema, type) else "Refund"
    return f'<tool_call>\n{{"name": "{name}", "arguments": {whole}}}\n</tool_call>' if "call" in method else whole


def last_request(model: ChatPrecedent) -> ScriptedRequest:
    engine: Any = model.engine
    return engine.requests[-1]
