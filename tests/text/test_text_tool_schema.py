"""Tools are checked before they reach a prompt, and the error names the tool and the problem."""

from __future__ import annotations

from typing import Any

import pytest
from pydantic import BaseModel, Field

from precedent.errors import PromptError
from precedent.text.tool_schema import check_tools


class Item(BaseModel):
    sku: str = Field(pattern="[A-Z]+")
    count: int = Field(ge=1, default=1)


class Order(BaseModel):
    items: list[Item]
    note: str | None = None
    tags: dict[str, int] = {}
    pair: tuple[int, str] = (1, "a")


def tool(parameters: Any, name: Any = "order", **more: Any) -> dict[str, Any]:
    return {"type": "function", "function": {"name": name, "parameters": parameters, **more}}


@pytest.mark.parametrize(
    "parameters",
    [None, {}, {"type": "object", "properties": {}}, Order.model_json_schema(), {"properties": {"a": True}}],
)
def test_real_schemas_pass(parameters: Any) -> None:
    check_tools([tool(parameters)])


@pytest.mark.parametrize(
    ("parameters", "problem"),
    [
        ({"type": "array"}, 'parameters must be a schema of type "object"'),
        ({"properties": ["a"]}, "parameters.properties must map names to schemas, not be a list"),
        ({"properties": {"a": {"type": "str"}}}, 'parameters.properties.a.type is "str", not one of array, boolean'),
        ({"properties": {"a": "string"}}, 'parameters.properties.a must be a schema (an object), not "string"'),
        ({"properties": {"a": {"anyOf": []}}}, "parameters.properties.a.anyOf must be a list of schemas, not an empty"),
        ({"properties": {"a": {"minimum": "1"}}}, "parameters.properties.a.minimum must be a number"),
        ({"properties": {}, "required": ["a", "a"]}, "parameters.required names a property twice"),
        ({"properties": {"a": {"default": float("nan")}}}, "it cannot be written as JSON"),
    ],
)
def test_a_bad_schema_is_named(parameters: Any, problem: str) -> None:
    with pytest.raises(PromptError) as caught:
        check_tools([tool(None, "fine"), tool(parameters)])
    assert str(caught.value).startswith(f"tool 'order' has no valid JSON Schema: {problem}")


@pytest.mark.parametrize("bad", [{}, {"function": {}}, {"function": {"name": " "}}, {"type": "web_search"}, "look_up"])
def test_a_tool_without_a_name(bad: Any) -> None:
    with pytest.raises(PromptError, match="tool number 2 has no name"):
        check_tools([tool(None), bad])
