"""Structured output: what is asked for comes whole and strictly read, in every form of a schema, or is refused."""

from __future__ import annotations

import itertools
import json
from enum import StrEnum
from typing import Any, Generic, TypeVar

import pytest
from helpers.scripted_models import TOKENIZER, asked, calling, look_up
from hypothesis import given
from hypothesis import strategies as st
from langchain.agents import create_agent
from langchain.agents.structured_output import ProviderStrategy, ToolStrategy
from langchain_core.exceptions import OutputParserException
from langchain_core.messages import AIMessage
from langchain_core.tools import tool
from pydantic import BaseModel, RootModel, field_validator
from pydantic.v1 import BaseModel as BaseModelV1
from typing_extensions import TypedDict

from precedent.errors import ConfigError, PrecedentError, UnsupportedError
from precedent.langchain import ChatPrecedent
from precedent.langchain.structured_output import AnswerParser
from precedent_testing.scripted_engine import ScriptedEngine, chatml_tokenizer

pytestmark = pytest.mark.filterwarnings("ignore:Core Pydantic V1")

METHODS = ("json_schema", "json_mode", "function_calling")
BY_METHOD = pytest.mark.parametrize("method", METHODS)
BY_HELD_METHOD = pytest.mark.parametrize("method", ["json_schema", "function_calling"])


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


class RefundDict(TypedDict):
    """A refund."""

    order: str
    amount: int
    note: str


DICT = {**Refund.model_json_schema(), "title": "Refund"}
GIVEN = {"order": "A17", "amount": 1200, "note": "late"}


def answering(text: str, **settings: Any) -> ChatPrecedent:
    engine: Any = ScriptedEngine(TOKENIZER, lambda prompt: text, max_burst=3, may_stray=True)
    return ChatPrecedent.from_engine(engine, **settings)


def text_of(method: str, schema: Any, **arguments: Any) -> str:
    name = schema.__name__ if isinstance(schema, type) else "Refund"
    return calling(name, **arguments) if "call" in method else json.dumps(arguments)


async def streamed(runnable: Any) -> list[list[Any]]:
    """What a stream and an async stream gave; an error is the last of them."""
    found: list[list[Any]] = [[], []]
    try:
        found[0].extend(runnable.stream("hi"))
    except Exception as error:
        found[0].append(error)
    try:
        found[1] += [one async for one in runnable.astream("hi")]
    except Exception as error:
        found[1].append(error)
    return found


# Answers


@BY_METHOD
@pytest.mark.parametrize("schema", [Refund, RefundV1, RefundDict, DICT], ids=str)
@pytest.mark.sampled(5)
async def test_an_answer_streams_as_it_comes_and_ends_with_what_invoke_gives(schema: Any, method: str) -> None:
    text = text_of(method, Refund if isinstance(schema, dict) else schema, **GIVEN)
    runnable = answering(text).with_structured_output(schema, method=method)
    whole = runnable.invoke("hi")
    assert whole == await runnable.ainvoke("hi") == (schema(**GIVEN) if schema in (Refund, RefundV1) else GIVEN)
    for found in await streamed(runnable):
        assert found[-1] == whole
        assert len(found) > 3, "parts of it came before"
        assert all(one != other for one, other in itertools.pairwise(found))
    in_blocks = answering(text, output_version="v1").with_structured_output(schema, method=method)
    assert [*in_blocks.stream("hi")][-1] == in_blocks.invoke("hi") == whole


@BY_METHOD
async def test_an_answer_that_was_cut_is_an_error_wherever_it_was_cut(method: str) -> None:
    """Never half of a number, never an object without a field, never None."""
    for schema in (Refund, DICT):
        text = text_of(method, schema, **GIVEN)
        for most in range(1, len(TOKENIZER.encode(text)) + 1, 29):
            runnable = answering(text, max_tokens=most).with_structured_output(schema, method=method)
            with pytest.raises(OutputParserException, match=rf"cut after {most} tokens: .* max_tokens=") as refused:
                runnable.invoke("hi")
            assert isinstance(refused.value, PrecedentError)
            assert "\n" not in str(refused.value)
            for found in await streamed(runnable):
                assert isinstance(found[-1], OutputParserException)
    with pytest.raises(OutputParserException, match="the answer is not JSON"):
        answering(json.dumps(GIVEN), stop=["1200"]).with_structured_output(DICT).invoke("hi")


@BY_METHOD
async def test_include_raw_shows_the_message_and_never_half_of_an_answer(method: str) -> None:
    text = text_of(method, Refund, **GIVEN)
    runnable = answering(text).with_structured_output(Refund, method=method, include_raw=True)
    for found in await streamed(runnable):
        assert [one["parsed"] for one in found if "parsed" in one] == [Refund(**GIVEN)]
        whole = sum(found[1:], found[0])
        assert whole["parsing_error"] is None
        assert whole["raw"].content == runnable.invoke("hi")["raw"].content
    cut = answering(text, max_tokens=40).with_structured_output(Refund, method=method, include_raw=True)
    for one in (cut.invoke("hi"), *(sum(found[1:], found[0]) for found in await streamed(cut))):
        assert one["parsed"] is None
        assert isinstance(one["parsing_error"], OutputParserException)
        assert one["raw"].response_metadata["finish_reason"] == "length"


def test_json_mode_needs_no_schema_and_a_reasoning_model_thinks_first() -> None:
    assert answering('{"a": [1]}').with_structured_output(method="json_mode").invoke("hi") == {"a": [1]}
    assert isinstance(answering("prose").with_structured_output(method="json_mode").invoke("hi"), dict)
    tokenizer = chatml_tokenizer()
    tokenizer.add_tokens(["<think>", "</think>"])
    engine: Any = ScriptedEngine(tokenizer, lambda prompt: f"<think>\nHm.\n</think>\n\n{json.dumps(GIVEN)}")
    message = ChatPrecedent.from_engine(engine).invoke("hi", response_format=Refund)
    assert json.loads(message.content) == GIVEN
    assert "Hm." in message.additional_kwargs["reasoning_content"]


# What is no data


def parsed(message: Any, **parser: Any) -> Any:
    return AnswerParser(**parser).invoke(message)


@pytest.mark.parametrize(
    "text",
    ["", '{"a": 1}}', '```json\n{"a": 1}\n```', '{"a": NaN}', "[" * 5000, f"[{'9' * 5000}]"],
    ids=lambda text: text[:12],
)
def test_json_is_read_strictly(text: str) -> None:
    with pytest.raises(OutputParserException, match=r"the answer is not JSON \(.*\); the answer: ") as refused:
        parsed(AIMessage(text))
    assert refused.value.llm_output == text
    assert len(str(refused.value)) < 1000


@given(st.text(), st.integers(0, 30))
def test_no_prefix_of_an_answer_passes_for_the_whole(note: str, cut: int) -> None:
    whole = json.dumps({"order": "1", "amount": 12, "note": note})
    assert AnswerParser().parse(f" {whole}\n")["note"] == note
    with pytest.raises(OutputParserException):
        parsed(AIMessage(whole[: -1 - cut]), schema_class=Refund)


class Picky(BaseModel):
    """Refuses in words of its own."""

    order: str

    @field_validator("order")
    @classmethod
    def _known(cls, order: str) -> str:
        if order != "A17":
            raise ValueError(f"there is no order {order}")
        return order


BROKEN = {"name": "Refund", "args": '{"order"', "id": "1", "error": None, "type": "invalid_tool_call"}


@pytest.mark.parametrize(
    ("message", "parser", "said"),
    [
        (AIMessage("No."), {"tool": "Refund"}, r"the answer holds no call of 'Refund'; the answer: 'No\.'"),
        (AIMessage("", invalid_tool_calls=[BROKEN]), {"tool": "Refund"}, "holds a broken call of 'Refund'"),
        (AIMessage('{"order": "1"}'), {"schema_class": Refund}, "does not fit Refund: amount is missing; the answer:"),
        (AIMessage('{"order": 1}'), {"schema_class": Refund}, r"order must be a text \(and 1 more\)"),
        (AIMessage('{"order": "", "amount": "x"}'), {"schema_class": RefundV1}, "amount is not a whole number"),
        (AIMessage('{"order": "B1"}'), {"schema_class": Picky}, "order is refused: there is no order B1"),
    ],
)
def test_an_answer_that_does_not_fit_is_said_in_our_words(message: Any, parser: dict[str, Any], said: str) -> None:
    with pytest.raises(OutputParserException, match=said) as refused:
        parsed(message, **parser)
    assert "pydantic" not in str(refused.value)


# Schemas in every form

BARE = {"type": "object", "properties": {"amount": {"type": "integer"}}, "required": ["amount"]}
NAMED = {
    "name": "Refund",
    "description": "Pay back.",
    "strict": True,
    "schema": {**BARE, "additionalProperties": False},
}
WRAPPINGS = [NAMED, {"type": "json_schema", "json_schema": NAMED}, {"type": "json_schema", **NAMED}]


@BY_METHOD
@pytest.mark.parametrize("wrapped", WRAPPINGS, ids=["OpenAI's", "its response_format", "of Responses"])
def test_openais_forms_keep_their_schema(wrapped: dict[str, Any], method: str) -> None:
    """The scripted model would write something else: the schema makes it write this."""
    model = answering('{"amount": 7}' if method == "json_mode" else "prose")
    assert model.with_structured_output(wrapped, method=method).invoke("hi").keys() == {"amount"}
    if method != "json_mode":
        assert "amount" in str(asked(model).grammar)
    shown = answering("x")
    shown.bind_tools([wrapped]).invoke("hi")
    assert '"name": "Refund", "description": "Pay back."' in asked(shown).prompt


@pytest.mark.parametrize(
    ("schema", "value"),
    [
        (BARE, {"amount": 0}),  # without a title
        ({"title": "Numbers", "type": "array", "items": {"type": "integer"}, "minItems": 1}, [0]),
        ({"title": "Number", "$ref": "#/$defs/N", "$defs": {"N": {"type": "integer"}}}, 0),
        ({"title": "Number", "anyOf": [{"type": "integer"}]}, 0),
    ],
    ids=str,
)
def test_a_schema_without_a_title_or_that_is_no_object_is_not_lost(schema: dict[str, Any], value: Any) -> None:
    """LangChain's conversion to a tool keeps those with properties alone."""
    assert answering("prose").with_structured_output(schema).invoke("hi") == value


@pytest.mark.parametrize(
    ("schema", "settings", "said"),
    [
        (Refund, {"method": "magic"}, "method='magic' is not one of"),
        (None, {}, "method='json_schema' needs a schema"),
        (17, {}, "17 is not a schema"),
        (Refund, {"response_format": [1]}, "method='json_schema' sets response_format= itself: leave it out"),
        ({"properties": {"a": {"type": "text"}}}, {}, r"is not a JSON Schema: it\.properties\.a\.type is \"text\""),
    ],
)
def test_wrong_arguments_of_structured_output(schema: Any, settings: Any, said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        answering("x").with_structured_output(schema, **settings)


PATTERN = {"title": "T", "type": "object", "properties": {"a": {"type": "string", "pattern": "["}}}


def test_a_pattern_that_is_none_is_refused_by_name() -> None:
    model = answering("x")
    for bound in (model.with_structured_output(PATTERN, strict=False), model.bind_tools([PATTERN])):
        with pytest.raises(ConfigError, match=r"has pattern='\[', which is not a regular expression"):
            bound.invoke("hi")
    fine = {"title": "T", "type": "object", "properties": {"a": {"type": "string", "pattern": r"(?<n>x)"}}}
    assert answering('{"a": "x"}').with_structured_output(fine).invoke("hi") == {"a": "x"}


# Classes

Value = TypeVar("Value")


class Node(BaseModel):
    """A node of a tree."""

    name: str
    children: list[Node] = []


class NodeV1(BaseModelV1):
    """A node of a tree."""

    name: str
    children: list[NodeV1] = []


NodeV1.update_forward_refs()


class Tree(BaseModel):
    root: Node


class Box(BaseModel, Generic[Value]):
    value: Value


LEAF = {"name": "a", "children": [{"name": "b", "children": []}]}
CLASSES: list[tuple[Any, Any]] = [
    *((Node, LEAF), (NodeV1, LEAF), (Tree, {"root": LEAF}), (Box[int], {"value": 3})),
]


@BY_HELD_METHOD
@pytest.mark.parametrize(("schema", "value"), CLASSES, ids=lambda one: getattr(one, "__name__", ""))
def test_answers_of_every_class(schema: Any, value: dict[str, Any], method: str) -> None:
    found = answering(text_of(method, schema, **value)).with_structured_output(schema, method=method).invoke("hi")
    assert json.loads(getattr(found, "model_dump_json", found.json)()) == value
    if "children" in str(value):  # a grammar holds the inner levels: this model would write numbers for nodes
        wrong = json.loads(json.dumps(value).replace('[{"name": "b", "children": []}]', "[7]"))
        model = answering(text_of(method, schema, **wrong))
        raw = model.with_structured_output(schema, method=method, include_raw=True).invoke("hi")["raw"]
        assert "7" not in f"{raw.content}{[call['args'] for call in raw.tool_calls]}"


@pytest.mark.parametrize("strategy", [ProviderStrategy, ToolStrategy])
def test_an_agent_calls_a_tool_and_answers_with_a_recursive_class(strategy: Any) -> None:
    def script(prompt: str) -> str:
        if "<tool_response>" not in prompt:
            return calling(number="1042")
        return text_of("call" if strategy is ToolStrategy else "json_schema", Node, **LEAF)

    engine: Any = ScriptedEngine(TOKENIZER, script)
    agent = create_agent(ChatPrecedent.from_engine(engine), tools=[look_up], response_format=strategy(Node))
    state = agent.invoke({"messages": [("user", "Where is 17?")]})
    assert state["structured_response"] == Node(**LEAF)
    assert any(message.type == "tool" and "is sent" in message.content for message in state["messages"])


# What a grammar holds, and what it cannot


@pytest.mark.parametrize("names", [{"pattern": "^x+$"}, {"enum": ["x", "y"]}, {"type": "string"}], ids=str)
def test_keys_with_a_pattern_are_held_and_any_text_as_key_is_free(names: dict[str, Any]) -> None:
    schema = {"type": "object", "propertyNames": names, "additionalProperties": {"type": "integer"}}
    assert answering('{"x": 1}').with_structured_output(schema, strict=True).invoke("hi") == {"x": 1}


UNIQUE = {"type": "array", "uniqueItems": True}


@pytest.mark.parametrize(
    ("place", "why", "schema"),
    [
        ("by", "look-around", {"properties": {"by": {"type": "string", "pattern": "(?=a)"}}}),
        ("list[]", "uniqueItems", {"properties": {"list": {"type": "array", "items": UNIQUE}}}),
        ("item", "uniqueItems", {"properties": {"item": {"$ref": "#/$defs/Item"}}, "$defs": {"Item": UNIQUE}}),
    ],
)
def test_what_cannot_be_enforced_is_named_by_its_field(place: str, why: str, schema: dict[str, Any]) -> None:
    schema = {"title": "Order", "type": "object", **schema}
    with pytest.raises(UnsupportedError) as refused:
        answering("x").with_structured_output(schema, strict=True).invoke("hi")
    raw = answering("x").with_structured_output(schema, include_raw=True).invoke("hi")["raw"]
    (note,) = raw.response_metadata["grammar"]["relaxed"]
    for said in (str(refused.value), note):
        assert f"field {place!r}" in said
        assert why in said
        assert "%json" not in said
        assert len(said) < 300


def test_a_stream_that_ends_too_soon_is_an_error() -> None:
    text = json.dumps(GIVEN)
    for size in (1, 7, 100):
        texts = [text[at : at + size] for at in range(0, len(text), size)]
        assert list(AnswerParser().transform(iter(texts)))[-1] == GIVEN
        with pytest.raises(OutputParserException):
            list(AnswerParser().transform(iter(texts[:-1] or [""])))


class Names(RootModel[list[str]]):
    pass


def test_a_class_that_is_no_object_is_an_answer_and_tools_keep_recursive_arguments() -> None:
    assert answering('["a"]').with_structured_output(Names).invoke("hi") == Names(["a"])

    @tool
    def plant(root: Node) -> str:
        """Plant a tree."""
        return root.name

    model = answering("x")
    model.bind_tools([plant]).invoke("hi")
    assert '"items": {"$ref": "#/$defs/Node"}' in asked(model).prompt


class Colour(StrEnum):
    RED = "red"
    BLUE = "blue"


class Counts(BaseModel):
    by_colour: dict[Colour, int]


@pytest.mark.parametrize("wrong", [{"green": 1}, {"red": "many"}])
def test_keys_of_an_enum_are_held(wrong: dict[str, Any]) -> None:
    right = {"by_colour": {"red": 1, "blue": 2}}
    answer = answering(json.dumps(right)).with_structured_output(Counts, strict=True, include_raw=True).invoke("hi")
    assert answer["parsed"] == Counts(**right)
    assert answer["raw"].response_metadata["grammar"]["relaxed"] == []
    text = json.dumps({"by_colour": wrong})
    held = answering(text).with_structured_output(Counts, include_raw=True).invoke("hi")
    assert held["raw"].content != text
