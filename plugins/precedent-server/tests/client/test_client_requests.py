"""What `ChatPrecedentServer` sends: every setting arrives under its key, and nothing else is sent."""

from __future__ import annotations

from typing import Any

import pytest
from helpers.fake_server import HELLO, STREAMED, Echo
from helpers.request_bodies import ONLY_IN_CALLS, SETTINGS, look_up
from langchain_core.messages import AIMessage, HumanMessage, SystemMessage, ToolMessage
from langchain_core.runnables import ConfigurableField

from precedent.errors import ConfigError
from precedent.langchain import ChatPrecedent
from precedent.langchain.arguments import OF_THE_CALL
from precedent.langchain.fields import OF_THE_ENGINE as OF_THE_ENGINE_IN_PROCESS
from precedent_server.client.names import FIELDS, OF_THE_CONNECTION, OF_THE_ENGINE, OF_THE_REQUEST


def names_of(settings: dict[str, Any]) -> str:
    """The same in every process: a value may show its address."""
    return "-".join(settings) or "nothing"


@pytest.mark.parametrize(("given", "sent"), SETTINGS, ids=names_of)
def test_a_field_arrives(given: dict[str, Any], sent: dict[str, Any]) -> None:
    assert Echo().body_of(fields=given) == {**HELLO, **sent}


@pytest.mark.parametrize(("given", "sent"), [*SETTINGS, *ONLY_IN_CALLS], ids=names_of)
async def test_an_argument_of_a_call_arrives_whichever_way_it_goes(given: dict[str, Any], sent: dict[str, Any]) -> None:
    server = Echo()
    llm = server.client()
    llm.invoke("hello", **given)
    assert [chunk async for chunk in llm.astream("hello", **given)]
    assert server.bodies == [{**HELLO, **sent}, {**HELLO, **sent, **STREAMED}]


def test_the_fields_are_those_of_the_model_in_this_process() -> None:
    of_its_process = {"tenant", "tenant_from", "engines", "sampling"}  # a server has defaults of its own
    in_process = set(ChatPrecedent.model_fields) - of_its_process
    assert set(FIELDS) - set(OF_THE_CONNECTION) == in_process - set(OF_THE_ENGINE)
    assert set(OF_THE_ENGINE) == set(OF_THE_ENGINE_IN_PROCESS)
    assert set(OF_THE_CALL) - set(OF_THE_REQUEST) == {"tenant", "learning"}
    both = set(FIELDS) & set(ChatPrecedent.model_fields) - set(OF_THE_CONNECTION) - {"model", "metadata"}
    ours, theirs = Echo().client(), ChatPrecedent(model="m")
    assert {name: getattr(ours, name) for name in both} == {name: getattr(theirs, name) for name in both}


def test_a_call_overrides_the_fields_and_stop_strings_add_up() -> None:
    fields = {"temperature": 0.7, "top_p": 0.9, "stop": ["A"], "speculation": False, "templates": ["It {is}."]}
    call = {"temperature": 0.2, "top_p": 1.0, "stop": ["B"], "speculation": True, "templates": [], "max_tokens": 3}
    sent = {"temperature": 0.2, "top_p": 1.0, "max_completion_tokens": 3, "stop": ["A", "B"]}
    assert Echo().body_of(fields=fields, **call) == {**HELLO, **sent}


THINKING = {"chat_template_kwargs": {"thinking": False}}
EFFORT = {"chat_template_kwargs": {"reasoning_effort": "high"}}


@pytest.mark.parametrize(
    ("fields", "call", "sent"),
    [
        (
            {"chat_template_kwargs": {"a": 1, "b": 1}, "reasoning": True},
            {"chat_template_kwargs": {"b": 2}, "reasoning": False},
            {"chat_template_kwargs": {"a": 1, "b": 2}, "reasoning": False},
        ),
        ({"reasoning": False}, {"reasoning": "low"}, {"reasoning_effort": "low"}),
        ({"reasoning": "low"}, {"reasoning": False}, {"reasoning": False}),
        ({"reasoning": True}, THINKING, THINKING),
        ({"chat_template_kwargs": {"enable_thinking": True}}, {"reasoning": False}, {"reasoning": False}),
        ({"reasoning": "low"}, EFFORT, EFFORT),
        (EFFORT, {"reasoning": "low"}, {"reasoning_effort": "low"}),
    ],
)
def test_reasoning_is_sent_once_and_the_call_decides(
    fields: dict[str, Any], call: dict[str, Any], sent: dict[str, Any]
) -> None:
    """The server knows the name of its template's switch, and refuses to be told twice."""
    assert Echo().body_of(fields=fields, **call) == {**HELLO, **sent}


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
                {"type": "function", "id": number, "function": {"name": "look_up", "arguments": text}}
                for number, text in (("call_1", '{"number": "größe 1"}'), ("call_2", '{"numb'))
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


@pytest.mark.parametrize(
    ("given", "url"),
    [
        ("http://server", "http://server/v1/chat/completions"),
        ("http://server:8000/", "http://server:8000/v1/chat/completions"),
        ("https://server/v1", "https://server/v1/chat/completions"),
        ("http://server/models/v1/", "http://server/models/v1/chat/completions"),
    ],
)
def test_fields_of_the_connection_reach_it_and_a_url_without_a_path_gets_v1(given: str, url: str) -> None:
    server, more = Echo(), {"default_headers": {"x-team": "desk"}, "default_query": {"a": "b"}}
    llm = server.client(base_url=given, api_key="k1", timeout=3.0, max_retries=4, **more)
    llm.invoke("hello")
    request = server.requests[0]
    assert str(request.url) == f"{url}?a=b"
    assert (request.headers["authorization"], request.headers["x-team"]) == ("Bearer k1", "desk")
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
