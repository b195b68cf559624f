"""Classes, provider tools and tool choices as libraries write them: they work, or the error says what is wrong."""

from __future__ import annotations

import json
from enum import StrEnum
from typing import Any, Generic, Literal, TypeVar

import httpx
import pytest
from helpers.refunds import answering, last_request
from langchain.agents import create_agent
from langchain.agents.structured_output import ProviderStrategy, ToolStrategy
from langchain_core.tools import tool
from langchain_openai import custom_tool
from pydantic import BaseModel, ConfigDict, RootModel
from pydantic.v1 import BaseModel as BaseModelV1
from typing_extensions import TypedDict

from precedent.client import ChatPrecedentServer
from precedent.errors import ConfigError, UnsupportedError
from precedent.grammar import JsonSchema, closed, unenforceable
from precedent.langchain.tools import openai_tools

pytestmark = pytest.mark.filterwarnings("ignore:Core Pydantic V1")

Value = TypeVar("Value")


class Node(BaseModel):
    """A node of a tree."""

    name: str
    children: list[Node] = []


class Pair(BaseModel):
    left: Other | None = None


class Other(BaseModel):
    right: Pair | None = None


class Tree(BaseModel):
    root: Node


class NodeV1(BaseModelV1):
    """A node of a tree."""

    name: str
    children: list[NodeV1] = []


NodeV1.update_forward_refs()


class TreeV1(BaseModelV1):
    root: NodeV1


class Untitled(BaseModel):
    model_config = ConfigDict(json_schema_extra=lambda schema: schema.pop("title"))
    name: str


class Box(BaseModel, Generic[Value]):
    value: Value


class Plain(TypedDict):
    """A plain dict."""

    name: str


LEAF = {"name": "a", "children": [{"name": "b", "children": []}]}
CLASSES: list[tuple[Any, dict[str, Any]]] = [
    (Node, LEAF),
    (Pair, {"left": {"right": {"left": None}}}),
    (Tree, {"root": LEAF}),
    (NodeV1, LEAF),
    (TreeV1, {"root": LEAF}),
    (Untitled, {"name": "a"}),
    (Box[int], {"value": 3}),
    (Plain, {"name": "a"}),
]


def call_of(name: str, arguments: Any) -> str:
    return f'<tool_call>\n{{"name": "{name}", "arguments": {json.dumps(arguments)}}}\n</tool_call>'


@pytest.mark.parametrize("method", ["json_schema", "function_calling"])
@pytest.mark.parametrize(("schema", "value"), CLASSES, ids=lambda one: getattr(one, "__name__", ""))
def test_answers_of_every_class(schema: Any, value: dict[str, Any], method: str) -> None:
    written = json.dumps(value) if method == "json_schema" else call_of(schema.__name__, value)
    answer = answering(written).with_structured_output(schema, method=method).invoke("hi")
    dumped = answer if isinstance(answer, dict) else json.loads(getattr(answer, "model_dump_json", answer.json)())
    assert dumped == value


@pytest.mark.parametrize("method", ["json_schema", "function_calling"])
@pytest.mark.parametrize("schema", [Node, Tree, NodeV1, TreeV1])
def test_a_grammar_holds_the_inner_levels_of_a_recursive_class(schema: Any, method: str) -> None:
    """The model would write numbers where there are nodes."""
    wrong = {"name": "a", "children": [7]}
    wrong = wrong if schema in (Node, NodeV1) else {"root": wrong}
    written = json.dumps(wrong) if method == "json_schema" else call_of(schema.__name__, wrong)
    asked = answering(written).with_structured_output(schema, method=method, include_raw=True).invoke("hi")
    assert "7" not in f"{asked['raw'].content}{[call['args'] for call in asked['raw'].tool_calls]}"


def test_tools_keep_recursive_arguments() -> None:
    @tool
    def plant(root: Node) -> str:
        """Plant a tree."""
        return root.name

    (described,) = openai_tools([plant])
    assert described["function"]["name"] == "plant"
    assert described["function"]["parameters"]["$defs"]["Node"]["properties"]["children"]["items"]["$ref"]


@pytest.mark.parametrize("strategy", [ProviderStrategy, ToolStrategy])
def test_an_agent_answers_with_a_recursive_class(strategy: Any) -> None:
    written = json.dumps(LEAF) if strategy is ProviderStrategy else call_of("Node", LEAF)
    state = create_agent(answering(written), [], response_format=strategy(Node)).invoke({"messages": [("user", "hi")]})
    assert state["structured_response"] == Node(**LEAF)


def test_a_class_that_is_no_object_is_an_answer() -> None:
    class Names(RootModel[list[str]]):
        pass

    assert answering('["a"]').with_structured_output(Names).invoke("hi") == Names(["a"])


# Dicts with named keys


class Colour(StrEnum):
    RED = "red"
    BLUE = "blue"


class Counts(BaseModel):
    by_colour: dict[Colour, int]


class Letters(BaseModel):
    words: list[dict[Literal["a", "b"], str]]


@pytest.mark.parametrize(
    ("schema", "right", "wrong"),
    [
        (Counts, {"by_colour": {"red": 1}}, {"by_colour": {"green": 1}}),
        (Counts, {"by_colour": {"red": 1, "blue": 2}}, {"by_colour": {"red": "many"}}),
        (Letters, {"words": [{"a": "x"}, {}]}, {"words": [{"c": "x"}]}),
    ],
)
def test_keys_of_an_enum_are_held(schema: type[BaseModel], right: Any, wrong: Any) -> None:
    model = answering(json.dumps(right)).with_structured_output(schema, strict=True, include_raw=True)
    answer = model.invoke("hi")
    assert answer["parsed"] == schema(**right)
    assert answer["raw"].response_metadata["grammar"]["relaxed"] == []
    held = answering(json.dumps(wrong)).with_structured_output(schema, include_raw=True).invoke("hi")
    assert held["raw"].content != json.dumps(wrong)


def test_keys_with_a_pattern_are_held_and_any_text_as_key_is_free() -> None:
    for names in ({"pattern": "^x+$"}, {"type": "string"}, {}):
        schema = {"type": "object", "propertyNames": names, "additionalProperties": {"type": "integer"}}
        assert unenforceable(JsonSchema.of(closed(schema))) is None


UNENFORCEABLE: list[tuple[dict[str, Any], str]] = [
    ({"type": "object", "propertyNames": {"minLength": 3}}, "propertyNames"),
    ({"type": "object", "properties": {"a": {}}, "propertyNames": {"enum": ["a"]}}, "propertyNames"),
    ({"type": "array", "uniqueItems": True}, "uniqueItems"),
    ({"type": "string", "pattern": "(?=a)"}, "look-around"),
]


@pytest.mark.parametrize(("part", "why"), UNENFORCEABLE)
@pytest.mark.parametrize(
    ("place", "around"),
    {
        "by": lambda part: {"properties": {"x": {"type": "integer"}, "by": part}},
        "list[]": lambda part: {"properties": {"list": {"type": "array", "items": part}}},
        "a.b": lambda part: {"properties": {"a": {"type": "object", "properties": {"b": part}}}},
        "map{}": lambda part: {"properties": {"map": {"type": "object", "additionalProperties": part}}},
        "maybe": lambda part: {"properties": {"maybe": {"anyOf": [part, {"type": "null"}]}}},
        "item": lambda part: {"properties": {"item": {"$ref": "#/$defs/Item"}}, "$defs": {"Item": part}},
    }.items(),
)
def test_what_cannot_be_enforced_is_named_by_its_field(place: str, around: Any, part: Any, why: str) -> None:
    schema = {"title": "Order", "type": "object", **around(part)}
    with pytest.raises(UnsupportedError) as refused:
        answering("x").with_structured_output(schema, strict=True).invoke("hi")
    assert f"field {place!r}" in str(refused.value)
    assert why in str(refused.value)
    (note,) = (
        answering("x")
        .with_structured_output(schema, include_raw=True)
        .invoke("hi")["raw"]
        .response_metadata["grammar"]["relaxed"]
    )
    for said in (str(refused.value), note):
        assert "%json" not in said
        assert len(said) < 300


# Tools of providers


@custom_tool
def shell(command: str) -> str:
    """Run a command."""
    return command


@pytest.mark.parametrize(
    ("given", "name"),
    [
        ({"type": "web_search"}, "web_search"),
        ({"type": "web_search_20250305", "name": "web_search", "max_uses": 3}, "web_search_20250305"),
        ({"type": "computer_use_preview", "display_width": 1}, "computer_use_preview"),
        ({"type": "bash_20250124", "name": "bash"}, "bash_20250124"),
        ({"type": "mcp", "server_label": "x", "server_url": "https://x"}, "mcp"),
        ({"type": "code_interpreter", "container": {"type": "auto"}}, "code_interpreter"),
        ({"type": "custom", "name": "shell", "format": {"type": "text"}}, "custom"),
        ({"google_search": {}}, "google_search"),
        (shell, "custom"),
    ],
    ids=lambda value: value if isinstance(value, str) else None,  # an address differs between processes
)
def test_tools_that_a_provider_runs_are_refused_by_name(given: Any, name: str) -> None:
    with pytest.raises(UnsupportedError, match=f"tool number 2 is '{name}', which only its provider runs"):
        answering("x").bind_tools([Plain, given])
    with pytest.raises(UnsupportedError, match=f"is '{name}', which only its provider runs"):
        create_agent(answering("x"), [given]).invoke({"messages": [("user", "hi")]})


def test_anthropics_own_form_of_a_function_stays_one() -> None:
    given = {"type": "custom", "name": "pay", "input_schema": {"type": "object", "properties": {}}}
    (described,) = openai_tools([given])
    assert described["function"]["name"] == "pay"


# Allowed tools


def named(*names: str) -> list[Any]:
    return [{"type": "function", "function": {"name": name, "parameters": {"type": "object"}}} for name in names]


def allowed(mode: str | None, *names: str, flat: bool = False) -> dict[str, Any]:
    """OpenAI's choice, in the form of chat completions or of Responses."""
    tools = [
        {"type": "function", "name": name} if flat else {"type": "function", "function": {"name": name}}
        for name in names
    ]
    inner = {**({"mode": mode} if mode else {}), "tools": tools}
    return {"type": "allowed_tools", **inner} if flat else {"type": "allowed_tools", "allowed_tools": inner}


@pytest.mark.parametrize("flat", [False, True])
def test_only_allowed_tools_are_shown_and_called(flat: bool) -> None:
    model = answering("prose")
    for mode in ("auto", None, "required"):
        answer = model.bind_tools(named("a", "b", "c"), tool_choice=allowed(mode, "c", "a", flat=flat)).invoke("hi")
        prompt = last_request(model).prompt
        assert [f'"name": "{name}"' in prompt for name in "abc"] == [True, False, True]
        assert bool(answer.tool_calls) is (mode == "required")
        assert {call["name"] for call in answer.tool_calls} <= {"a", "c"}


@pytest.mark.parametrize(
    "choice",
    [
        allowed("auto", "d"),
        allowed("auto"),
        allowed("sometimes", "a"),
        {"type": "allowed_tools"},
        {"type": "allowed_tools", "allowed_tools": {"mode": "auto", "tools": [3, None]}},
    ],
    ids=str,
)
def test_a_choice_of_tools_that_there_are_not_is_refused(choice: Any) -> None:
    with pytest.raises(ConfigError, match="tool_choice="):
        answering("x").bind_tools(named("a"), tool_choice=choice)


def test_the_client_of_a_server_sends_only_allowed_tools() -> None:
    sent: list[Any] = []

    def answer(request: httpx.Request) -> httpx.Response:
        sent.append(json.loads(request.content))
        return httpx.Response(200, json={"choices": [{"index": 0, "message": {"role": "assistant", "content": "x"}}]})

    client = httpx.Client(transport=httpx.MockTransport(answer))
    model = ChatPrecedentServer(model="m", base_url="http://localhost", api_key="x", http_client=client)
    model.bind_tools(named("a", "b"), tool_choice=allowed("required", "b")).invoke("hi")
    assert [one["function"]["name"] for one in sent[0]["tools"]] == ["b"]
    assert sent[0]["tool_choice"] == "required"
