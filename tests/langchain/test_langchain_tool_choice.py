"""Calls that are forced, limited or held to their schemas: they come, or are refused by name."""

from __future__ import annotations

import json
from typing import Any, Literal

import pytest
from helpers.fake_server import Echo
from helpers.scripted_models import asked, calling, look_up, model, scripted
from langchain.agents import create_agent
from langchain_core.messages import AIMessage
from langchain_core.tools import tool
from langchain_openai import custom_tool
from pydantic import BaseModel

from precedent.errors import ConfigError, PromptError, UnsupportedError
from precedent.langchain import ChatPrecedent
from precedent.langchain.answer_rules import call_form
from precedent.text.tool_formats import known_formats

TEXT = "I would rather write prose."


@tool
def refund(number: str, percent: Literal[50, 100]) -> str:
    """Refund an order."""
    return "done"


class Ticket(BaseModel):
    """A ticket."""

    title: str
    urgent: bool = False


def said(text: str, **settings: Any) -> ChatPrecedent:
    """A model that says this, which fails where a grammar forbids it."""
    return model(lambda prompt: text, **settings)


def reluctant(text: str, **settings: Any) -> ChatPrecedent:
    """A model that would say this: where a grammar forbids it, it ends as soon as it may."""
    return scripted(answer=text, **settings)


def called(message: AIMessage) -> list[tuple[str, dict[str, Any]]]:
    assert message.invalid_tool_calls == []
    return [(one["name"], one["args"]) for one in message.tool_calls]


OPENAIS, ANTHROPICS = {"type": "function", "function": {"name": "refund"}}, {"type": "tool", "name": "refund"}


@pytest.mark.parametrize(
    ("choice", "names"),
    [
        *((choice, ["look_up", "refund"]) for choice in ("any", "required", True, {"type": "any"})),
        *((choice, ["refund"]) for choice in ("refund", OPENAIS, ANTHROPICS)),
    ],
    ids=str,
)
def test_a_call_of_some_or_of_one_tool_can_be_forced(choice: Any, names: list[str]) -> None:
    """And only one call of that one, whatever the model would have gone on with."""
    for text in (TEXT, calling("look_up", number="17"), calling("refund", number="17", percent=100)):
        message = reluctant(f"{text}\n{text}").bind_tools([look_up, refund], tool_choice=choice).invoke("hi")
        assert message.content == ""
        found = called(message)
        assert {name for name, _ in found} <= set(names)
        assert len(found) == 1 or len(names) == 2


@pytest.mark.parametrize(("parallel", "number"), [(None, 2), (True, 2), (False, 1)])
@pytest.mark.parametrize("choice", ["auto", "any"])
def test_calls_may_be_limited_to_one(choice: str, parallel: bool | None, number: int) -> None:
    script = f"{calling('look_up', number='17')}\n{calling('look_up', number='18')}"
    model = reluctant(script).bind_tools([look_up], tool_choice=choice, parallel_tool_calls=parallel)
    assert len(called(model.invoke("hi"))) == number


@pytest.mark.parametrize("choice", [None, "auto", False, {"type": "auto"}])
def test_a_choice_that_is_left_to_the_model_leaves_its_distribution_alone(choice: Any) -> None:
    """No grammar at all: what the model says of its own accord is its own, malformed calls included."""
    model = said(calling("refund", number=17))
    message = model.bind_tools([refund], tool_choice=choice).invoke("hi")
    assert called(message) == [("refund", {"number": 17})]
    assert asked(model).grammar is None
    assert "grammar" not in message.response_metadata


def test_strict_holds_calls_of_the_models_own_accord_to_their_schemas() -> None:
    script = f"Well. {calling('refund', number='17', percent=70)}"
    for strict in ({"strict": True}, {"strict_tools": True}):
        message = reluctant(script).bind_tools([refund], **strict).invoke("hi")
        assert message.content == "Well. "
        assert called(message)[0][1]["percent"] in (50, 100)
    assert said(TEXT, strict_tools=True).bind_tools([refund]).invoke("hi").content == TEXT
    lax = said(script, strict_tools=True).bind_tools([refund], strict=False).invoke("hi")
    assert called(lax)[0][1]["percent"] == 70
    forced = said(calling("refund", number=17, percent=70)).bind_tools([refund], tool_choice="any", strict=False)
    assert called(forced.invoke("hi")) == [("refund", {"number": 17, "percent": 70})], "the outer form alone"
    own = {"name": "pay", "schema": {"properties": {"amount": {"type": "integer"}}, "required": ["amount"]}}
    for strict, amount in ((True, 0), (False, "much")):
        message = reluctant(calling("pay", amount="much")).bind_tools([{**own, "strict": strict}]).invoke("hi")
        assert message.tool_calls[0]["args"]["amount"] == amount, "a tool's own `strict`"


def test_tools_beside_a_response_format_give_a_call_or_the_json() -> None:
    given = {"title": "No sound", "urgent": True}
    for script, calls in ((calling("look_up", number="17"), 1), (json.dumps(given), 0)):
        message = said(script).bind_tools([look_up], response_format=Ticket).invoke("hi")
        assert len(called(message)) == calls
        assert calls or json.loads(message.content) == given
    forced = reluctant(json.dumps(given)).bind_tools([look_up], tool_choice="any", response_format=Ticket)
    assert len(called(forced.invoke("hi"))) == 1


def test_formats_without_json_are_refused_by_name_and_the_others_have_a_form() -> None:
    formats = {form.name: form for form in known_formats()}
    for name in ("hermes", "llama-json", "mistral", "mistral-args"):
        assert call_form(formats[name]).name == name
    for name in ("qwen3-coder", "llama-pythonic", "gemma4", "function-gemma", "tool-code", "harmony"):
        with pytest.raises(UnsupportedError, match=f"cannot constrain calls in the tool format '{name}'"):
            call_form(formats[name])
    with pytest.raises(UnsupportedError, match="response template"):
        call_form(None)


# Tools of providers, and other forms


@custom_tool
def shell(command: str) -> str:
    """Run a command."""
    return command


@pytest.mark.parametrize(
    ("given", "name"),
    [
        ({"type": "web_search_20250305", "name": "web_search", "max_uses": 3}, "web_search_20250305"),
        ({"type": "custom", "name": "shell", "format": {"type": "text"}}, "custom"),
        ({"google_search": {}}, "google_search"),
        (shell, "custom"),
    ],
    ids=lambda value: value if isinstance(value, str) else None,  # an address differs between processes
)
def test_tools_that_a_provider_runs_are_refused_by_name(given: Any, name: str) -> None:
    with pytest.raises(UnsupportedError, match=f"tool number 2 is '{name}', which only its provider runs"):
        said(TEXT).bind_tools([look_up, given])
    with pytest.raises(UnsupportedError, match=f"is '{name}', which only its provider runs"):
        create_agent(said(TEXT), [given]).invoke({"messages": [("user", "hi")]})


# Allowed tools


def named(*names: str) -> list[Any]:
    return [{"type": "function", "function": {"name": name, "parameters": {"type": "object"}}} for name in names]


def allowed(mode: str | None, *names: str, flat: bool = False) -> dict[str, Any]:
    """OpenAI's choice, in the form of chat completions or of Responses."""
    tools = [{"type": "function", **({"name": name} if flat else {"function": {"name": name}})} for name in names]
    inner = {**({"mode": mode} if mode else {}), "tools": tools}
    return {"type": "allowed_tools", **inner} if flat else {"type": "allowed_tools", "allowed_tools": inner}


@pytest.mark.parametrize("flat", [False, True])
def test_only_allowed_tools_are_shown_and_called(flat: bool) -> None:
    model = reluctant(TEXT)
    for mode in ("auto", None, "required"):
        answer = model.bind_tools(named("a", "b", "c"), tool_choice=allowed(mode, "c", "a", flat=flat)).invoke("hi")
        prompt = asked(model).prompt
        assert [f'"name": "{name}"' in prompt for name in "abc"] == [True, False, True]
        assert bool(answer.tool_calls) is (mode == "required")
        assert {call["name"] for call in answer.tool_calls} <= {"a", "c"}


def test_a_choice_of_tools_that_there_are_not_is_refused() -> None:
    for choice in (allowed("auto", "d"), allowed("auto"), allowed("sometimes", "a"), {"type": "allowed_tools"}):
        with pytest.raises(ConfigError, match="tool_choice="):
            said(TEXT).bind_tools(named("a"), tool_choice=choice)


def test_the_client_of_a_server_sends_only_allowed_tools() -> None:
    server = Echo()
    server.client().bind_tools(named("a", "b"), tool_choice=allowed("required", "b")).invoke("hi")
    (sent,) = server.bodies
    assert [one["function"]["name"] for one in sent["tools"]] == ["b"]
    assert sent["tool_choice"] == "required"


UNIQUE = {
    "title": "pick",
    "description": "Pick numbers.",
    "type": "object",
    "properties": {"numbers": {"type": "array", "items": {"enum": [1, 2]}, "uniqueItems": True, "maxItems": 2}},
    "required": ["numbers"],
}


def test_what_cannot_be_enforced_is_left_out_and_said_or_refused_by_name() -> None:
    message = reluctant(calling("pick", numbers=[3])).bind_tools([UNIQUE], tool_choice="any").invoke("hi")
    assert called(message) == [("pick", {"numbers": []})]  # the enum still holds
    (note,) = message.response_metadata["grammar"]["relaxed"]
    assert note.startswith("the schema of tool 'pick': field 'numbers': Unimplemented keys")
    with pytest.raises(UnsupportedError, match=r"the schema of tool 'pick' cannot be enforced in full.*uniqueItems"):
        said(TEXT).bind_tools([UNIQUE], strict=True).invoke("hi")
    with pytest.raises(UnsupportedError, match=r"the schema of response_format cannot be enforced in full"):
        said(TEXT).with_structured_output(UNIQUE, strict=True).invoke("hi")


def test_functions_in_anthropics_and_responses_form_are_read_and_one_without_a_title_is_told_of_it() -> None:
    schema = {"type": "object", "properties": {"amount": {"type": "integer"}}}
    for given in (
        {"type": "custom", "name": "pay", "input_schema": schema},
        {"type": "function", "name": "pay", "parameters": schema},
    ):
        model = reluctant(TEXT)
        assert called(model.bind_tools([given], tool_choice="pay").invoke("hi")) == [("pay", {"amount": 0})]
    with pytest.raises(PromptError, match='give a "title" for its name'):
        said(TEXT).bind_tools([schema])
