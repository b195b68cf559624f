"""Calls that are forced, limited or held to their schemas: they come, or are refused by name."""

from __future__ import annotations

from typing import Any

import pytest
from helpers.call_ids import numbered
from helpers.forced_calls import TEXT, call, called, look_up, refund, reluctant, request_of, scripted

from precedent.errors import ConfigError, UnsupportedError
from precedent.langchain.structured import call_form
from precedent.langchain.tools import tool_choice_of
from precedent.text.tool_formats import known_formats

pytestmark = pytest.mark.filterwarnings("ignore:Core Pydantic V1")


# Tool choice


@pytest.mark.parametrize("choice", ["any", "required", True, {"type": "any"}])
def test_a_call_can_be_forced(choice: Any) -> None:
    message = reluctant([TEXT]).bind_tools([look_up, refund], tool_choice=choice).invoke("hi")
    assert message.content == ""
    assert called(message) == [("look_up", {"number": ""})]


@pytest.mark.parametrize(
    "choice", ["refund", {"type": "function", "function": {"name": "refund"}}, {"type": "tool", "name": "refund"}]
)
def test_a_call_of_one_tool_can_be_forced(choice: Any) -> None:
    """And only one call of it, whatever the model would have gone on with."""
    model = reluctant([f"{call('refund', number='17', percent=100)}\n{call('refund', number='18', percent=50)}"])
    message = model.bind_tools([look_up, refund], tool_choice=choice).invoke("hi")
    assert called(message) == [("refund", {"number": "17", "percent": 100})]
    other = reluctant([call("look_up", number="17")]).bind_tools([look_up, refund], tool_choice=choice).invoke("hi")
    assert [name for name, _ in called(other)] == ["refund"]


@pytest.mark.parametrize(("parallel", "number"), [(None, 2), (True, 2), (False, 1)])
@pytest.mark.parametrize("choice", ["auto", "any"])
def test_calls_may_be_limited_to_one(choice: str, parallel: bool | None, number: int) -> None:
    script = f"{call('look_up', number='17')}\n{call('look_up', number='18')}"
    model = reluctant([script]).bind_tools([look_up], tool_choice=choice, parallel_tool_calls=parallel)
    assert len(called(model.invoke("hi"))) == number


@pytest.mark.parametrize("choice", [None, "auto", False, {"type": "auto"}])
def test_a_choice_that_is_left_to_the_model_leaves_its_law_alone(choice: Any) -> None:
    """No grammar at all: what the model says of its own accord is its own, malformed calls included."""
    model = scripted([call("refund", number=17)])
    message = model.bind_tools([refund], tool_choice=choice).invoke("hi")
    assert called(message) == [("refund", {"number": 17})]
    assert request_of(model).grammar is None
    assert "grammar" not in message.response_metadata


def test_strict_holds_calls_of_the_models_own_accord_to_their_schemas() -> None:
    script = f"Well. {call('refund', number='17', percent=70)}"
    for strict in ({"strict": True}, {"strict_tools": True}):
        message = reluctant([script]).bind_tools([refund], **strict).invoke("hi")
        assert message.content == "Well. "
        assert called(message)[0][1]["percent"] in (50, 100)
    assert scripted([TEXT], strict_tools=True).bind_tools([refund]).invoke("hi").content == TEXT
    lax = scripted([script], strict_tools=True).bind_tools([refund], strict=False).invoke("hi")
    assert called(lax)[0][1]["percent"] == 70


def test_without_strict_a_forced_call_has_the_outer_form_alone() -> None:
    model = scripted([call("refund", number=17, percent=70)])
    forced = model.bind_tools([refund], tool_choice="any", strict=False).invoke("hi")
    assert called(forced) == [("refund", {"number": 17, "percent": 70})]


def test_a_forced_call_streams_as_it_is_invoked() -> None:
    model = scripted([call("look_up", number="17")]).bind_tools([look_up], tool_choice="any")
    first, *rest = model.stream("hi")
    merged = sum(rest, first)
    invoked = model.invoke("hi")
    assert numbered(merged.tool_calls) == numbered(invoked.tool_calls) != []
    assert merged.response_metadata["grammar"] == {"engine": "llguidance", "relaxed": []}


@pytest.mark.parametrize(
    ("choice", "said"),
    [
        ("look_upp", "names no bound tool.*; tools: look_up"),
        ({"type": "function", "function": {"name": "nothing_near"}}, "names no bound tool"),
        (["look_up"], "names no bound tool"),
        (3, "names no bound tool"),
    ],
)
def test_a_choice_that_is_none_is_refused_when_tools_are_bound(choice: Any, said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        scripted([TEXT]).bind_tools([look_up], tool_choice=choice)


def test_nothing_can_be_forced_without_tools() -> None:
    with pytest.raises(ConfigError, match="no tool is bound"):
        scripted([TEXT]).bind_tools([], tool_choice="any")


def test_the_name_of_a_tool_goes_before_the_words_for_choices() -> None:
    tools = [{"type": "function", "function": {"name": "any"}}]
    assert tool_choice_of("any", tools) == "any"
    assert tool_choice_of({"type": "tool", "name": "any"}, tools) == "any"


# Schemas that a grammar does not hold in full


UNIQUE = {
    "title": "pick",
    "description": "Pick numbers.",
    "type": "object",
    "properties": {"numbers": {"type": "array", "items": {"enum": [1, 2]}, "uniqueItems": True, "maxItems": 2}},
    "required": ["numbers"],
}


def test_what_cannot_be_enforced_is_left_out_and_said() -> None:
    message = reluctant([call("pick", numbers=[3])]).bind_tools([UNIQUE], tool_choice="any").invoke("hi")
    assert called(message) == [("pick", {"numbers": []})]  # the enum still holds
    (note,) = message.response_metadata["grammar"]["relaxed"]
    assert note.startswith("the schema of tool 'pick': field 'numbers': Unimplemented keys")


def test_strict_refuses_it_by_name() -> None:
    with pytest.raises(UnsupportedError, match=r"the schema of tool 'pick' cannot be enforced in full.*uniqueItems"):
        scripted([TEXT]).bind_tools([UNIQUE], strict=True).invoke("hi")
    with pytest.raises(UnsupportedError, match=r"the schema of response_format cannot be enforced in full"):
        scripted([TEXT]).with_structured_output(UNIQUE, strict=True).invoke("hi")


@pytest.mark.parametrize("strict", ["yes", 1, 0])
def test_strict_is_one_of_three(strict: Any) -> None:
    with pytest.raises(ConfigError, match="must be 'auto', True or False"):
        scripted([TEXT], strict_tools=strict)
    with pytest.raises(ConfigError, match="must be 'auto', True or False"):
        scripted([TEXT]).bind_tools([look_up], strict=strict)


def test_formats_without_json_are_refused_by_name_and_the_others_have_a_form() -> None:
    formats = {form.name: form for form in known_formats()}
    for name in ("hermes", "llama-json", "mistral", "mistral-args"):
        assert call_form(formats[name]).name == name
    for name in ("qwen3-coder", "llama-pythonic", "gemma4", "function-gemma", "tool-code", "harmony"):
        with pytest.raises(UnsupportedError, match=f"cannot constrain calls in the tool format '{name}'"):
            call_form(formats[name])
    with pytest.raises(UnsupportedError, match="response template"):
        call_form(None)
