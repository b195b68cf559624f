"""Forced calls and structured output through `ChatPrecedent`: what is asked for comes, or is refused by name."""

from __future__ import annotations

import json
from typing import Annotated, Any, Literal

import pytest
from langchain.agents import create_agent
from langchain.agents.structured_output import ProviderStrategy, ToolStrategy
from langchain_core.callbacks import UsageMetadataCallbackHandler
from langchain_core.messages import AIMessage
from langchain_core.tools import tool
from pydantic import BaseModel, Field
from pydantic.v1 import BaseModel as BaseModelV1
from typing_extensions import TypedDict

from precedent.errors import ConfigError, UnsupportedError
from precedent.grammar import Answer
from precedent.langchain import ChatPrecedent
from precedent.langchain.schemas import schema_of
from precedent.langchain.structured import call_form
from precedent.langchain.tools import tool_choice_of
from precedent.testing.scripted_engine import ScriptedEngine, ScriptedRequest, chatml_tokenizer
from precedent.text.tool_formats import known_formats

pytestmark = pytest.mark.filterwarnings("ignore:Core Pydantic V1")

TEXT = "I would rather write prose."
TOKENIZER = chatml_tokenizer()


@tool
def look_up(number: str) -> str:
    """Look up an order."""
    return f"order {number} was sent"


@tool
def refund(number: str, percent: Literal[50, 100]) -> str:
    """Refund an order."""
    return "done"


def call(name: str, **arguments: Any) -> str:
    return f'<tool_call>\n{{"name": "{name}", "arguments": {json.dumps(arguments)}}}\n</tool_call>'


def scripted(script: Any, *, may_stray: bool = False, **settings: Any) -> ChatPrecedent:
    answer = script if callable(script) else lambda prompt: script[0]
    engine: Any = ScriptedEngine(TOKENIZER, answer, may_stray=may_stray)
    return ChatPrecedent.from_engine(engine, **settings)


def reluctant(script: Any, **settings: Any) -> ChatPrecedent:
    """A model that would say something else: where a grammar forbids it, it ends as soon as it may."""
    return scripted(script, may_stray=True, **settings)


def request_of(model: ChatPrecedent) -> ScriptedRequest:
    engine: Any = model.engine
    return engine.requests[-1]


def called(message: AIMessage) -> list[tuple[str, dict[str, Any]]]:
    assert message.invalid_tool_calls == []
    return [(one["name"], one["args"]) for one in message.tool_calls]


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
    assert merged.tool_calls == invoked.tool_calls != []
    assert merged.response_metadata["grammar"] == {"engine": "llguidance", "relaxed": []}


@pytest.mark.parametrize(
    ("choice", "said"),
    [
        ("look_upp", "did you mean 'look_up'"),
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
    assert note.startswith("the schema of tool 'pick': Unimplemented keys")


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


# Structured output


class Ticket(BaseModel):
    """A ticket."""

    title: str = Field(max_length=20)
    urgent: bool = False
    tags: list[Literal["bug", "wish"]] = Field(default_factory=list, max_length=2)


class TicketV1(BaseModelV1):
    """A ticket."""

    title: str
    urgent: bool


class TicketDict(TypedDict):
    """A ticket."""

    title: Annotated[str, ..., "what it is about"]
    urgent: Annotated[bool, ..., "whether it is"]


METHODS = pytest.mark.parametrize("method", ["json_schema", "function_calling", "json_mode"])
GIVEN = {"title": "No sound", "urgent": True}


def answer_for(method: str, name: str, **arguments: Any) -> list[str]:
    return [call(name, **arguments) if method == "function_calling" else json.dumps(arguments)]


@METHODS
@pytest.mark.parametrize("schema", [Ticket, TicketV1, TicketDict, Ticket.model_json_schema()])
def test_structured_output_of_every_kind_of_schema(schema: Any, method: str) -> None:
    name = schema.get("title") if isinstance(schema, dict) else schema.__name__
    model = scripted(answer_for(method, name, **GIVEN)).with_structured_output(schema, method=method)
    found = model.invoke("hi")
    if isinstance(schema, type) and schema is not TicketDict:
        assert isinstance(found, schema)
        assert (found.title, found.urgent) == ("No sound", True)
    else:
        assert found == GIVEN
    *_, last = model.stream("hi")
    assert last == found


@METHODS
async def test_structured_output_is_awaited_as_well(method: str) -> None:
    model = scripted(answer_for(method, "Ticket", **GIVEN)).with_structured_output(Ticket, method=method)
    assert await model.ainvoke("hi") == Ticket(**GIVEN)


@pytest.mark.parametrize("method", ["json_schema", "function_calling"])
def test_a_model_that_would_rather_write_prose_gives_the_schemas_json(method: str) -> None:
    """The first thing that the schema lets it: nothing is repaired afterwards."""
    assert reluctant([TEXT]).with_structured_output(Ticket, method=method).invoke("hi") == Ticket(title="")


def test_json_mode_needs_no_schema_and_gives_any_object() -> None:
    assert scripted(['{"a": [1]}']).with_structured_output(method="json_mode").invoke("hi") == {"a": [1]}
    assert isinstance(reluctant([TEXT]).with_structured_output(method="json_mode").invoke("hi"), dict)


@METHODS
def test_include_raw(method: str) -> None:
    model = scripted(answer_for(method, "Ticket", **GIVEN))
    found = model.with_structured_output(Ticket, method=method, include_raw=True).invoke("hi")
    assert found["parsed"] == Ticket(**GIVEN)
    assert found["parsing_error"] is None
    assert isinstance(found["raw"], AIMessage)
    cut = model.with_structured_output(Ticket, method=method, include_raw=True, max_tokens=9).invoke("hi")
    assert cut["raw"].response_metadata["finish_reason"] == "length"
    assert cut["parsed"] is None


def test_a_recursive_schema() -> None:
    schema = {
        "title": "Tree",
        "type": "object",
        "properties": {"value": {"type": "integer"}, "below": {"type": "array", "items": {"$ref": "#"}}},
        "required": ["value", "below"],
    }
    wanted = {"value": 1, "below": [{"value": 2, "below": []}]}
    assert scripted([json.dumps(wanted)]).bind(
        response_format={"type": "json_schema", "json_schema": {"name": "Tree", "schema": schema}}
    ).invoke("hi").content == json.dumps(wanted)


@pytest.mark.parametrize(
    ("schema", "settings", "said"),
    [
        (Ticket, {"method": "magic"}, "method='magic' is not one of"),
        (None, {}, "method='json_schema' needs a schema"),
        (17, {}, "17 is not a schema"),
        (Ticket, {"temprature": 1}, "did you mean 'temperature'"),
    ],
)
def test_wrong_arguments_of_structured_output(schema: Any, settings: Any, said: str) -> None:
    with pytest.raises((ConfigError, ValueError), match=said):
        scripted([TEXT]).with_structured_output(schema, **settings)


@pytest.mark.parametrize(
    "response_format",
    ["json", {"type": "xml"}, {"type": "json_schema"}, {"type": "json_schema", "json_schema": {"name": "x"}}, [Ticket]],
)
def test_a_response_format_that_is_none(response_format: Any) -> None:
    with pytest.raises(ConfigError, match=r"is neither a class nor a dict of type|is not a schema: give"):
        scripted([TEXT]).invoke("hi", response_format=response_format)


def test_response_formats() -> None:
    assert schema_of(None) == schema_of({"type": "text"}) == (None, False)
    assert schema_of({"type": "json_object"}) == ({"type": "object"}, False)
    assert schema_of(Ticket)[0] == Ticket.model_json_schema()
    assert scripted([TEXT]).invoke("hi", response_format={"type": "text"}).content == TEXT
    assert json.loads(reluctant([TEXT]).invoke("hi", response_format=Ticket).content)["title"] == ""


def test_tools_beside_a_response_format_give_a_call_or_the_json() -> None:
    for script, calls in ((call("look_up", number="17"), 1), (json.dumps(GIVEN), 0)):
        message = scripted([script]).bind_tools([look_up], response_format=Ticket).invoke("hi")
        assert len(called(message)) == calls
        assert calls or json.loads(message.content) == GIVEN
    forced = reluctant([json.dumps(GIVEN)])
    message = forced.bind_tools([look_up], tool_choice="any", response_format=Ticket).invoke("hi")
    assert len(called(message)) == 1


def test_a_reasoning_model_thinks_first() -> None:
    tokenizer = chatml_tokenizer()
    tokenizer.add_tokens(["<think>", "</think>"])
    engine: Any = ScriptedEngine(tokenizer, lambda prompt: f"<think>\nHm.\n</think>\n\n{json.dumps(GIVEN)}")
    message = ChatPrecedent.from_engine(engine).invoke("hi", response_format=Ticket)
    assert json.loads(message.content) == GIVEN
    assert "Hm." in message.additional_kwargs["reasoning_content"]
    assert isinstance(engine.requests[0].grammar, Answer)


# Agents


@pytest.mark.parametrize("strategy", [ToolStrategy, ProviderStrategy])
def test_create_agent_with_a_response_format(strategy: Any) -> None:
    """A call of a tool first, then the answer in the schema's form, by either strategy."""

    def script(prompt: str) -> str:
        if "<tool_response>" not in prompt:
            return call("look_up", number="17")
        return answer_for("function_calling" if strategy is ToolStrategy else "json_schema", "Ticket", **GIVEN)[0]

    usage = UsageMetadataCallbackHandler()
    agent = create_agent(scripted(script), tools=[look_up], response_format=strategy(Ticket))
    state = agent.invoke({"messages": [("user", "Write a ticket for order 17.")]}, {"callbacks": [usage]})
    assert state["structured_response"] == Ticket(**GIVEN)
    assert any(message.type == "tool" and "was sent" in message.content for message in state["messages"])
    assert usage.usage_metadata["scripted"]["output_tokens"] > 0
