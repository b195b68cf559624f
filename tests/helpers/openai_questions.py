"""Questions for a model that says again what it is told, and what to ask them with."""

from __future__ import annotations

from typing import Any

from openai import OpenAI
from pydantic import BaseModel

ADA = '{"name": "Ada", "born": 1815}'
CALL = '<tool_call>\n{"name": "look_up", "arguments": {"number": "1042"}}\n</tool_call>'
LOOK_UP: Any = {
    "type": "function",
    "function": {
        "name": "look_up",
        "description": "Looks an order up.",
        "parameters": {"type": "object", "properties": {"number": {"type": "string"}}, "required": ["number"]},
    },
}


class Person(BaseModel):
    name: str
    born: int


class look_up(BaseModel):
    number: str


def user(text: str) -> Any:
    return [{"role": "user", "content": text}]


def ask(client: OpenAI, text: str, **more: Any) -> Any:
    return client.chat.completions.create(model="echo", messages=user(text), **more)
