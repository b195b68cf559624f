"""What `ChatPrecedentServer` sends: every setting arrives under its key, and nothing else is sent."""

from __future__ import annotations

from typing import Any

import pytest
from helpers.fake_server import HELLO, STREAMED, Echo
from langchain_core.messages import AIMessage, HumanMessage, SystemMessage, ToolMessage
from langchain_core.runnables import ConfigurableField
from langchain_core.tools import tool
from pydantic import BaseModel

from precedent import SpeculationConfig, Templates
from precedent.client.names import FIELDS, OF_THE_CONNECTION, OF_THE_ENGINE, OF_THE_REQUEST
from precedent.errors import ConfigError, UnsupportedError
from precedent.langchain import ChatPrecedent
from precedent.langchain.arguments import OF_THE_CALL
from precedent.langchain.settings import OF_THE_ENGINE as OF_THE_ENGINE_IN_PROCESS


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
BY_NAME = {"type": "function", "function": {"name": "look_up"}}

SETTINGS: list[tuple[dict[str, Any], dict[str, Any]]] = [
    ({"temperature": 0.7}, {"temperature": 0.7}),
    ({"temperature": None}, {}),
    ({"max_tokens": 7}, {"max_completion_tokens": 7}),
    ({"max_completion_tokens": 7}, {"max_completion_tokens": 7}),
    ({"top_p": 0.9}, {"top_p": 0.9}),
    ({"top_k": 5}, {"top_k": 5}),
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
        {
            "speculation": {
                "enabled": False,
                "drafters": ["prompt"],
                "max_nodes": 32,
                "max_draws": 6,
                "mode": "auto",
                "write_back": False,
            }
        },
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
    ({"reasoning": False}, {"chat_template_kwargs": {"enable_thinking": False}}),
    ({"reasoning": True}, {"chat_template_kwargs": {"enable_thinking": True}}),
    ({"reasoning_effort": "low"}, {"reasoning_effort": "low"}),
]
"""Settings of the constructor or a call, and what they add to the body."""

ONLY_IN_CALLS: list[tuple[dict[str, Any], dict[str, Any]]] = [
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
    (
        {"tools": [look_up], "strict": True},
        {"tools": [{**LOOK_UP, "function": {**LOOK_UP["function"], "strict": True}}]},  # type: ignore[dict-item]
    ),
    (
        {"tools": [look_up], "strict_tools": False},
        {"tools": [{**LOOK_UP, "function": {**LOOK_UP["function"], "strict": False}}]},  # type: ignore[dict-item]
    ),
    ({"tools": []}, {}),
    ({"response_format": {"type": "text"}}, {}),
    ({"response_format": {"type": "json_object"}}, {"response_format": {"type": "json_object"}}),
    ({"format": "json"}, {"response_format": {"type": "json_object"}}),
    (
        {"response_format": Order},
        {"response_format": {"type": "json_schema", "json_schema": {"name": "Order", "schema": ORDER}}},
    ),
    (
        {"response_format": Order, "strict": True},
        {"response_format": {"type": "json_schema", "json_schema": {"name": "Order", "schema": ORDER, "strict": True}}},
    ),
    (
        {
            "response_format": {
                "type": "json_schema",
                "json_schema": {"name": "o", "strict": False, "schema": {"type": "object"}},
            }
        },
        {
            "response_format": {
                "type": "json_schema",
                "json_schema": {"name": "o", "strict": False, "schema": {"title": "o", "type": "object"}},
            }
        },
    ),
]


@pytest.mark.parametrize(("given", "sent"), SETTINGS, ids=str)
def test_a_field_arrives(given: dict[str, Any], sent: dict[str, Any]) -> None:
    assert Echo().body_of(fields=given) == {**HELLO, **sent}


@pytest.mark.parametrize(("given", "sent"), [*SETTINGS, *ONLY_IN_CALLS], ids=str)
def test_an_argument_of_a_call_arrives(given: dict[str, Any], sent: dict[str, Any]) -> None:
    assert Echo().body_of(**given) == {**HELLO, **sent}


@pytest.mark.parametrize(("given", "sent"), [*SETTINGS, *ONLY_IN_CALLS], ids=str)
async def test_every_way_in_sends_the_same(given: dict[str, Any], sent: dict[str, Any]) -> None:
    server = Echo()
    llm = server.client()
    await llm.ainvoke("hello", **given)
    list(llm.stream("hello", **given))
    assert [chunk async for chunk in llm.astream("hello", **given)]
    assert server.bodies == [{**HELLO, **sent}, {**HELLO, **sent, **STREAMED}, {**HELLO, **sent, **STREAMED}]


def test_every_setting_is_in_these_tables() -> None:
    shown = {name for given, _ in [*SETTINGS, *ONLY_IN_CALLS] for name in given}
    assert set(OF_THE_REQUEST) <= shown


def test_the_fields_are_those_of_the_model_in_this_process() -> None:
    in_process = set(ChatPrecedent.model_fields) - {"tenant", "tenant_from", "engines"}
    assert set(FIELDS) - set(OF_THE_CONNECTION) == in_process - set(OF_THE_ENGINE)
    assert set(OF_THE_ENGINE) == set(OF_THE_ENGINE_IN_PROCESS)
    assert set(OF_THE_CALL) - set(OF_THE_REQUEST) == {"tenant", "learning"}
    both = set(FIELDS) & set(ChatPrecedent.model_fields) - set(OF_THE_CONNECTION) - {"model", "metadata"}
    ours, theirs = Echo().client(), ChatPrecedent(model="m")
    assert {name: getattr(ours, name) for name in both} == {name: getattr(theirs, name) for name in both}


def test_a_call_overrides_the_fields_and_stop_strings_add_up() -> None:
    fields = {"temperature": 0.7, "top_p": 0.9, "stop": ["A"], "speculation": False, "templates": ["It {is}."]}
    call = {"temperature": 0.2, "top_p": 1.0, "stop": ["B"], "speculation": True, "templates": [], "max_tokens": 3}
    assert Echo().body_of(fields=fields, **call) == {
        **HELLO,
        **{"temperature": 0.2, "max_completion_tokens": 3, "stop": ["A", "B"]},
    }


def test_none_in_a_call_is_the_field() -> None:
    fields = {"temperature": 0.7, "seed": 3, "drafters": ["prompt"], "reasoning": "low"}
    sent = {"temperature": 0.7, "seed": 3, "speculation": {"drafters": ["prompt"]}, "reasoning_effort": "low"}
    assert Echo().body_of(fields=fields, temperature=None, seed=None, drafters=None, reasoning=None) == {
        **HELLO,
        **sent,
    }


def test_variables_of_the_template_add_up() -> None:
    fields = {"chat_template_kwargs": {"a": 1, "b": 1}, "reasoning": True}
    body = Echo().body_of(fields=fields, chat_template_kwargs={"b": 2}, reasoning=False)
    assert body["chat_template_kwargs"] == {"a": 1, "b": 2, "enable_thinking": False}


def test_thinking_is_set_once() -> None:
    with pytest.raises(ConfigError, match="both set 'enable_thinking'"):
        Echo().client(reasoning=True, chat_template_kwargs={"enable_thinking": False})
    with pytest.raises(ConfigError, match="both set 'reasoning_effort'"):
        Echo().client(reasoning="low", chat_template_kwargs={"reasoning_effort": "high"})


@pytest.mark.parametrize("name", ["gpt-5-mine", "o1-mine", "gpt-6-x", "gpt-5-pro", "codex"])
def test_a_models_name_decides_nothing(name: str) -> None:
    """langchain-openai changes temperatures, roles and the endpoint by the names of OpenAI's models."""
    server = Echo()
    llm = server.client(model=name, temperature=0.3)
    llm.bind_tools([look_up]).invoke([SystemMessage("Be short."), HumanMessage("hello")])
    assert [request.url.path for request in server.requests] == ["/v1/chat/completions"]
    assert server.bodies[0]["temperature"] == 0.3
    assert [message["role"] for message in server.bodies[0]["messages"]] == ["system", "user"]
    assert llm.profile is None


def test_a_conversation_arrives_as_this_process_would_read_it() -> None:
    call = {"name": "look_up", "args": {"number": "größe 1"}, "id": "call_1", "type": "tool_call"}
    broken = {"name": "look_up", "args": '{"numb', "id": "call_2", "error": None, "type": "invalid_tool_call"}
    body = Echo().body_of(
        [
            SystemMessage("Be short."),
            HumanMessage([{"type": "text", "text": "Where "}, {"type": "text", "text": "is it?"}], name="Ada"),
            AIMessage(
                "", tool_calls=[call], invalid_tool_calls=[broken], additional_kwargs={"reasoning_content": "hm"}
            ),
            ToolMessage("not there", tool_call_id="call_1", name="look_up", status="error"),
            AIMessage([{"type": "reasoning", "reasoning": "well"}, {"type": "text", "text": "Lost."}]),
            HumanMessage([{"type": "tool_result", "tool_use_id": "call_3", "content": "found"}]),
        ]
    )
    assert body["messages"] == [
        {"role": "system", "content": "Be short."},
        {"role": "user", "content": "Where is it?", "name": "Ada"},
        {
            "role": "assistant",
            "content": None,
            "reasoning_content": "hm",
            "tool_calls": [
                {
                    "type": "function",
                    "id": "call_1",
                    "function": {"name": "look_up", "arguments": '{"number": "größe 1"}'},
                },
                {"type": "function", "id": "call_2", "function": {"name": "look_up", "arguments": '{"numb'}},
            ],
        },
        {"role": "tool", "content": "Error: not there", "tool_call_id": "call_1"},
        {"role": "assistant", "content": "Lost.", "reasoning_content": "well"},
        {"role": "tool", "content": "found", "tool_call_id": "call_3"},
    ]


async def test_the_run_names_the_workflow_step() -> None:
    server = Echo()
    llm = server.client()
    config: Any = {"metadata": {"lc_agent_name": "desk", "langgraph_node": "model"}}
    llm.invoke("hello", config)
    await llm.ainvoke("hello", config)
    list(llm.stream("hello", config))
    assert [chunk async for chunk in llm.astream("hello", config)]
    llm.batch(["hello"], config)
    assert [body.get("workflow_step") for body in server.bodies] == ["desk/model"] * 5
    assert server.client().invoke("hello", config, workflow_step="mine")
    assert server.bodies[-1]["workflow_step"] == "mine"


def test_a_bound_choice_is_checked_at_once() -> None:
    llm = Echo().client()
    with pytest.raises(ConfigError, match="names no bound tool"):
        llm.bind_tools([look_up], tool_choice="look")
    with pytest.raises(ConfigError, match="strict='yes' must be"):
        llm.bind_tools([look_up], strict="yes")


def test_a_template_that_no_text_expresses_is_refused() -> None:
    with pytest.raises(UnsupportedError, match="which a request cannot carry"):
        Echo().client(templates=Templates(["It is {state}."], choices={"state": ["open"]}))


@pytest.mark.parametrize(
    ("given", "url"),
    [
        ("http://server", "http://server/v1/chat/completions"),
        ("http://server:8000/", "http://server:8000/v1/chat/completions"),
        ("https://server/v1", "https://server/v1/chat/completions"),
        ("http://server/models/v1/", "http://server/models/v1/chat/completions"),
    ],
)
def test_a_url_without_a_path_gets_v1(given: str, url: str) -> None:
    server = Echo()
    server.client(base_url=given).invoke("hello")
    assert str(server.requests[0].url) == url


def test_fields_of_the_connection_reach_it() -> None:
    server = Echo()
    llm = server.client(
        api_key="k1", timeout=3.0, max_retries=4, default_headers={"x-team": "desk"}, default_query={"a": "b"}
    )
    llm.invoke("hello")
    request = server.requests[0]
    assert (request.headers["authorization"], request.headers["x-team"]) == ("Bearer k1", "desk")
    assert request.url.query == b"a=b"
    assert request.extensions["timeout"]["read"] == 3.0
    assert llm.root_client.max_retries == llm.root_async_client.max_retries == 4


def test_a_copy_with_other_settings_has_a_connection_of_its_own() -> None:
    """LangChain copies a model with its HTTP clients, which hold the first model's key."""
    server = Echo()
    llm = server.client(api_key="first", temperature=0.5)
    other = llm.configurable_fields(
        openai_api_key=ConfigurableField(id="key"), temperature=ConfigurableField(id="temperature")
    )
    other.with_config(configurable={"key": "second", "temperature": 0.9}).invoke("hello")
    llm.invoke("hello")
    assert [request.headers["authorization"] for request in server.requests] == ["Bearer second", "Bearer first"]
    assert [body["temperature"] for body in server.bodies] == [0.9, 0.5]
