"""Schemas are read in every form that they are written in."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from helpers.refunds import DICT, METHODS, Refund, answering, last_request, text_of

from precedent.errors import ConfigError, PrecedentError, PromptError
from precedent.langchain.schemas import described_schema, schema_of
from precedent.langchain.tools import openai_tools

pytestmark = pytest.mark.filterwarnings("ignore:Core Pydantic V1")


BARE = {"type": "object", "properties": {"amount": {"type": "integer"}}, "required": ["amount"]}
NAMED = {
    "name": "Refund",
    "description": "Pay back.",
    "strict": True,
    "schema": {**BARE, "additionalProperties": False},
}
WRAPPINGS: dict[str, Callable[[], dict[str, Any]]] = {
    "OpenAI's": lambda: NAMED,
    "OpenAI's response_format": lambda: {"type": "json_schema", "json_schema": NAMED},
    "that of the Responses interface": lambda: {"type": "json_schema", **NAMED},
}


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("form", WRAPPINGS)
def test_openais_forms_keep_their_schema(form: str, method: str) -> None:
    """The scripted model would write something else: the schema makes it write this."""
    wrapped = WRAPPINGS[form]()
    free = {"json_mode": text_of("", DICT, amount=7)}.get(method, "prose")
    model = answering(free)
    assert model.with_structured_output(wrapped, method=method).invoke("hi").keys() == {"amount"}
    if method != "json_mode":
        assert "amount" in str(last_request(model).grammar)
    assert described_schema(wrapped)[0]["title"] == "Refund"


def test_a_wrapping_says_whether_it_is_strict_and_the_call_says_it_louder() -> None:
    unique = {"type": "array", "items": {"enum": [1, 2]}, "uniqueItems": True}
    wrapped = {**NAMED, "schema": {"type": "object", "properties": {"a": unique}, "required": ["a"]}}
    with pytest.raises(PrecedentError, match=r"cannot be enforced in full"):
        answering("x").with_structured_output(wrapped).invoke("hi")
    assert isinstance(answering("x").with_structured_output(wrapped, strict=False).invoke("hi"), dict)


@pytest.mark.parametrize("method", ["json_schema", "function_calling"])
def test_a_json_schema_without_a_title_gets_one(method: str) -> None:
    model = answering("prose")
    assert model.with_structured_output(BARE, method=method).invoke("hi") == {"amount": 0}
    assert described_schema(BARE)[0]["title"] == "answer"
    assert "title" not in BARE


@pytest.mark.parametrize(
    "schema",
    [
        {"title": "Numbers", "type": "array", "items": {"type": "integer"}, "minItems": 1},
        {"title": "Number", "$ref": "#/$defs/N", "$defs": {"N": {"type": "integer"}}},
        {"title": "Number", "anyOf": [{"type": "integer"}]},
    ],
    ids=lambda schema: schema["title"],
)
def test_a_schema_that_is_no_object_is_not_lost(schema: dict[str, Any]) -> None:
    """LangChain's conversion to a tool keeps those with properties alone."""
    assert answering("prose").with_structured_output(schema).invoke("hi") in ([0], 0)


def test_what_a_method_says_itself_is_not_said_again() -> None:
    for method, name in (("json_schema", "response_format"), ("json_mode", "response_format"), (METHODS[2], "tools")):
        answering("x").with_structured_output(Refund, method=method, **{name: None})
        with pytest.raises(ConfigError, match=f"method='{method}' sets {name}= itself: leave it out"):
            answering("x").with_structured_output(Refund, method=method, **{name: [1]})


def test_what_holds_no_schema_is_refused() -> None:
    for wrong in ({"name": "x", "schema": 3}, {"type": "json_schema"}, {"type": "json_schema", "json_schema": 3}):
        with pytest.raises(ConfigError, match="is not a schema: give"):
            answering("x").with_structured_output(wrong)
    with pytest.raises(ConfigError, match=r"is not a JSON Schema: it\.properties\.a\.type is \"text\""):
        answering("x").with_structured_output({"properties": {"a": {"type": "text"}}})
    with pytest.raises(ConfigError, match="is not a schema"):
        answering("x").with_structured_output({"foo": 1})


@pytest.mark.parametrize("form", WRAPPINGS)
def test_a_tool_in_openais_schema_form_keeps_its_schema(form: str) -> None:
    (tool,) = openai_tools([WRAPPINGS[form]()])
    assert tool["function"]["name"] == "Refund"
    assert tool["function"]["description"] == "Pay back."
    assert tool["function"]["parameters"]["properties"] == BARE["properties"]
    assert tool["function"]["strict"] is True


def test_a_flat_tool_of_the_responses_interface_is_read_and_one_without_a_title_is_told_of_it() -> None:
    (tool,) = openai_tools([{"type": "function", "name": "pay", "parameters": BARE}])
    assert tool == {"type": "function", "function": {"name": "pay", "parameters": BARE}}
    with pytest.raises(PromptError, match='give a "title" for its name'):
        openai_tools([BARE])


def test_a_strict_tool_holds_calls_of_the_models_own_accord() -> None:
    call = '<tool_call>\n{"name": "Refund", "arguments": {"amount": "much"}}\n</tool_call>'
    message = answering(call).bind_tools([NAMED]).invoke("hi")
    assert message.tool_calls[0]["args"]["amount"] == 0
    message = answering(call).bind_tools([{**NAMED, "strict": False}]).invoke("hi")
    assert message.tool_calls[0]["args"]["amount"] == "much"


PATTERN = {"title": "T", "type": "object", "properties": {"a": {"type": "string", "pattern": "["}}}
ASKED_WITH_A_PATTERN: dict[str, Callable[[Any], Any]] = {
    "response_format": lambda model: model.with_structured_output(PATTERN),
    "response_format, not strict": lambda model: model.with_structured_output(PATTERN, strict=False),
    "a tool that must be called": lambda model: model.bind_tools([PATTERN], tool_choice="any"),
    "a tool, not strict": lambda model: model.bind_tools([PATTERN], tool_choice="any", strict=False),
    "a tool that may be called": lambda model: model.bind_tools([PATTERN]),
}


@pytest.mark.parametrize("how", ASKED_WITH_A_PATTERN)
def test_a_pattern_that_is_none_is_refused_by_name(how: str) -> None:
    asked = ASKED_WITH_A_PATTERN[how](answering("x"))
    with pytest.raises(ConfigError, match=r"has pattern='\[', which is not a regular expression"):
        asked.invoke("hi")
    fine = {"title": "T", "type": "object", "properties": {"a": {"type": "string", "pattern": r"(?<n>x)"}}}
    assert answering('{"a": "x"}').with_structured_output(fine).invoke("hi") == {"a": "x"}


def test_schemas_of_response_formats() -> None:
    assert schema_of({"type": "json_schema", **NAMED})[1] is True
    assert schema_of(NAMED)[0]["properties"] == BARE["properties"]  # type: ignore[index]
