"""Settings of a chat model behind a server, each with what it adds to the body of a request."""

from __future__ import annotations

from typing import Any

from langchain_core.tools import tool
from pydantic import BaseModel

from precedent.config import SpeculationConfig
from precedent.text.templates import Templates


class Order(BaseModel):
    """An order."""

    number: int


ORDER = {
    "title": "Order",
    "description": "An order.",
    "type": "object",
    "properties": {"number": {"title": "Number", "type": "integer"}},
    "required": ["number"],
}


@tool
def look_up(number: str) -> str:
    """Look up an order."""
    return number


LOOK_UP = {
    "type": "function",
    "function": {
        "name": "look_up",
        "description": "Look up an order.",
        "parameters": {"type": "object", "properties": {"number": {"type": "string"}}, "required": ["number"]},
    },
}


def strictly(value: bool) -> dict[str, Any]:
    return {**LOOK_UP, "function": {**LOOK_UP["function"], "strict": value}}  # type: ignore[dict-item]


def described(**schema: Any) -> dict[str, Any]:
    return {"type": "json_schema", "json_schema": schema}


BY_NAME = {"type": "function", "function": {"name": "look_up"}}

SETTINGS: list[tuple[dict[str, Any], dict[str, Any]]] = [
    ({"temperature": 0.7}, {"temperature": 0.7}),
    ({"temperature": None}, {}),
    ({"max_tokens": 7}, {"max_completion_tokens": 7}),
    ({"max_completion_tokens": 7}, {"max_completion_tokens": 7}),
    ({"top_p": 0.9}, {"top_p": 0.9}),
    ({"top_k": 5}, {"top_k": 5}),
    ({"media": "placeholder"}, {}),
    ({"min_p": 0.1}, {"min_p": 0.1}),
    ({"repetition_penalty": 1.1}, {"repetition_penalty": 1.1}),
    ({"frequency_penalty": 0.5}, {"frequency_penalty": 0.5}),
    ({"presence_penalty": -0.5}, {"presence_penalty": -0.5}),
    ({"logit_bias": {5: -100, 7: 1.5}}, {"logit_bias": {"5": -100.0, "7": 1.5}}),
    ({"seed": 0}, {"seed": 0}),
    ({"stop": "END"}, {"stop": ["END"]}),
    ({"stop": ["END", "STOP"]}, {"stop": ["END", "STOP"]}),
    ({"stop_token_ids": [9, 3]}, {"stop_token_ids": [3, 9]}),
    ({"logprobs": True}, {"logprobs": True}),
    ({"logprobs": True, "top_logprobs": 3}, {"logprobs": True, "top_logprobs": 3}),
    ({"speculation": True}, {}),
    ({"speculation": False}, {"speculation": False}),
    ({"speculation": {"mode": "greedy"}}, {"speculation": {"mode": "greedy"}}),
    (
        {"speculation": SpeculationConfig(enabled=False, drafters=("prompt",), write_back=False)},
        {"speculation": {"enabled": False, "drafters": ["prompt"], "write_back": False}},
    ),
    ({"drafters": ["prompt"]}, {"speculation": {"drafters": ["prompt"]}}),
    ({"drafters": []}, {"speculation": {"drafters": []}}),
    (
        {"drafters": ["prompt"], "speculation": {"max_draws": 2}},
        {"speculation": {"max_draws": 2, "drafters": ["prompt"]}},
    ),
    ({"templates": ["Order {number} is {state}."]}, {"templates": ["Order {number} is {state}."]}),
    ({"templates": Templates(["Order {number}."])}, {"templates": ["Order {number}."]}),
    ({"templates": []}, {}),
    ({"chat_template_kwargs": {"thinking": True}}, {"chat_template_kwargs": {"thinking": True}}),
    ({"reasoning": False}, {"reasoning": False}),
    ({"reasoning": True}, {"reasoning": True}),
    ({"reasoning_effort": "low"}, {"reasoning_effort": "low"}),
]
"""Settings of the constructor or a call, and what they add to the body."""

ONLY_IN_CALLS: list[tuple[dict[str, Any], dict[str, Any]]] = [
    ({"top_k": 0, "top_p": 1.0}, {"top_k": 0, "top_p": 1.0}),  # a server may have defaults of its own
    ({"repetition_penalty": 1.0}, {"repetition_penalty": 1.0}),
    ({"max_nodes": 4}, {"speculation": {"max_nodes": 4}}),
    ({"workflow_step": "refund"}, {"workflow_step": "refund"}),
    ({"prediction": "It is."}, {"prediction": {"type": "content", "content": "It is."}}),
    (
        {"prediction": {"type": "content", "content": [{"type": "text", "text": "It is."}]}},
        {"prediction": {"type": "content", "content": "It is."}},
    ),
    ({"model": "other"}, {"model": "other"}),
    ({"tools": [look_up]}, {"tools": [LOOK_UP]}),
    ({"tools": [look_up], "tool_choice": "auto"}, {"tools": [LOOK_UP]}),
    ({"tools": [look_up], "tool_choice": "any"}, {"tools": [LOOK_UP], "tool_choice": "required"}),
    ({"tools": [look_up], "tool_choice": "none"}, {"tools": [LOOK_UP], "tool_choice": "none"}),
    ({"tools": [look_up], "tool_choice": "look_up"}, {"tools": [LOOK_UP], "tool_choice": BY_NAME}),
    (
        {"tools": [look_up], "tool_choice": {"type": "tool", "name": "look_up"}},
        {"tools": [LOOK_UP], "tool_choice": BY_NAME},
    ),
    ({"tools": [look_up], "parallel_tool_calls": False}, {"tools": [LOOK_UP], "parallel_tool_calls": False}),
    *(
        ({"tools": [look_up], name: value}, {"tools": [strictly(value)]})
        for name, value in (("strict", True), ("strict_tools", False))
    ),
    ({"tools": []}, {}),
    ({"response_format": {"type": "text"}}, {}),
    ({"response_format": {"type": "json_object"}}, {"response_format": {"type": "json_object"}}),
    ({"format": "json"}, {"response_format": {"type": "json_object"}}),
    ({"response_format": Order}, {"response_format": described(name="Order", schema=ORDER)}),
    (
        {"response_format": Order, "strict": True},
        {"response_format": described(name="Order", schema=ORDER, strict=True)},
    ),
    (
        {"response_format": described(name="o", strict=False, schema={"type": "object"})},
        {"response_format": described(name="o", strict=False, schema={"title": "o", "type": "object"})},
    ),
]
