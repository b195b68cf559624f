"""Structured output through `ChatPrecedent`: what is asked for comes, or is refused by name."""

from __future__ import annotations

import json
from typing import Annotated, Any

import pytest
from helpers.forced_calls import GIVEN, TEXT, Ticket, call, called, look_up, reluctant, scripted
from langchain.agents import create_agent
from langchain.agents.structured_output import ProviderStrategy, ToolStrategy
from langchain_core.callbacks import UsageMetadataCallbackHandler
from langchain_core.messages import AIMessage
from pydantic.v1 import BaseModel as BaseModelV1
from typing_extensions import TypedDict

from precedent.errors import ConfigError
from precedent.grammar import Answer
from precedent.langchain import ChatPrecedent
from precedent.langchain.schemas import schema_of
from precedent_testing.scripted_engine import ScriptedEngine, chatml_tokenizer

pytestmark = pytest.mark.filterwarnings("ignore:Core Pydantic V1")


# Structured output


class TicketV1(BaseModelV1):
    """A ticket."""

    title: str
    urgent: bool


class TicketDict(TypedDict):
    """A ticket."""

    title: Annotated[str, ..., "what it is about"]
    urgent: Annotated[bool, ..., "whether it is"]


METHODS = pytest.mark.parametrize("method", ["json_schema", "function_calling", "json_mode"])


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
        (Ticket, {"temprature": 1}, "takes no 'temprature'"),
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
    assert schema_of(None) == schema_of({"type": "text"}) == (None, None)
    assert schema_of({"type": "json_object"}) == ({"type": "object"}, None)
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
