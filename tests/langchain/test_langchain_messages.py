"""Messages of every kind become what chat templates read, those of other providers too; ids of calls are unique."""

from __future__ import annotations

import logging
from collections.abc import Callable
from contextlib import suppress
from typing import Any

import httpx
import pytest
from helpers.fake_server import Echo
from helpers.format_models import MODELS, TOKENIZERS, TOOLS
from helpers.scripted_models import asked, calling, look_up, merged
from helpers.scripted_models import model as scripted
from hypothesis import given, settings
from hypothesis import strategies as st
from langchain.agents import create_agent
from langchain_core.messages import (
    AIMessage,
    BaseMessage,
    ChatMessage,
    FunctionMessage,
    HumanMessage,
    RemoveMessage,
    SystemMessage,
    ToolMessage,
)
from langchain_core.messages.tool import invalid_tool_call, tool_call
from langchain_core.tools import tool
from langchain_openai import ChatOpenAI

from precedent.cache import SpeculationCache
from precedent.errors import PrecedentError, PromptError, UnsupportedError
from precedent.langchain import ChatPrecedent
from precedent.langchain.messages import to_template_messages
from precedent.text.prompt import render_prompt
from precedent_testing.embedders import HashEmbedder
from precedent_testing.scripted_model import scripted_model_engine

CALL = {"type": "function", "id": "c1", "function": {"name": "look_up", "arguments": {"n": 1}}}
USE = {"type": "tool_use", "id": "c1", "name": "look_up", "input": {"n": 1}}
SAID, THOUGHT = {"content": "a"}, {"content": "", "reasoning_content": "hm"}
TEXT = {"type": "text", "text": "a"}
IMAGE = {"type": "image_url", "image_url": {"url": "data:image/png;base64,AAAA"}}


def turn(*content: Any, **fields: Any) -> dict[str, Any]:
    """The one turn of an assistant's message, without its role."""
    (read,) = to_template_messages([AIMessage(list(content), **fields)])
    assert read.pop("role") == "assistant"
    return read


@pytest.mark.parametrize(
    ("message", "turn"),
    [
        (HumanMessage("u", name="ann"), {"role": "user", "content": "u", "name": "ann"}),
        (ChatMessage(role="developer", content="d"), {"role": "system", "content": "d"}),
        (HumanMessage(["a", {"type": "text", "text": "b", "cache_control": {}}]), {"role": "user", "content": "ab"}),
        (FunctionMessage(name="f", content="r"), {"role": "tool", "content": "r", "name": "f", "tool_call_id": ""}),
        (
            ToolMessage([{"type": "text", "text": "r"}, {"type": "json", "json": {"a": "é"}}], tool_call_id="c1"),
            {"role": "tool", "content": 'r{"a": "é"}', "tool_call_id": "c1"},
        ),
        (
            ToolMessage("no such order", tool_call_id="c1", status="error"),
            {"role": "tool", "content": "Error: no such order", "tool_call_id": "c1"},
        ),
        (
            AIMessage("a", invalid_tool_calls=[invalid_tool_call(name=None, args="<tool_call>{", id="c", error=None)]),
            {"role": "assistant", "content": "a", "invalid_calls": [{"name": None, "args": "<tool_call>{", "id": "c"}]},
        ),
    ],
)
def test_one_message(message: BaseMessage, turn: dict[str, Any]) -> None:
    assert to_template_messages([message]) == [turn]


def test_messages_of_one_role_stay_apart_and_anthropic_blocks_become_calls_and_tool_turns() -> None:
    result = {"type": "tool_result", "tool_use_id": "c1", "is_error": True, "content": [{"type": "text", "text": "no"}]}
    turns = to_template_messages(
        [SystemMessage("a"), SystemMessage("b"), AIMessage([TEXT, USE]), HumanMessage([result, TEXT])]
    )
    assert turns == [
        {"role": "system", "content": "a"},
        {"role": "system", "content": "b"},
        {"role": "assistant", "content": "a", "tool_calls": [CALL]},
        {"role": "tool", "content": "Error: no", "tool_call_id": "c1", "name": "look_up"},
        {"role": "user", "content": "a"},
    ]


def test_what_is_no_message_is_refused_by_its_place() -> None:
    for wrong in (ChatMessage(role="narrator", content="x"), RemoveMessage(id="1")):
        with pytest.raises(PromptError, match="message 1 has role"):
            to_template_messages([wrong])
    with pytest.raises(PromptError, match=r"message 2 .* without a name, or with arguments"):
        to_template_messages([AIMessage("x"), AIMessage([{"type": "tool_use", "id": "1", "input": {}}])])


# What other providers' models wrote


@pytest.mark.parametrize(
    ("block", "read"),
    [
        # text
        ({"type": "output_text", "text": "a", "annotations": []}, SAID),
        ({"type": "refusal", "refusal": "a"}, SAID),
        ({"text": "a"}, SAID),
        ({"type": "non_standard", "value": {"type": "refusal", "refusal": "a"}}, SAID),
        # reasoning: Anthropic, Mistral, OpenAI Responses (a summary, or an open model's own), Bedrock, LangChain
        ({"type": "thinking", "thinking": "hm", "signature": "x"}, THOUGHT),
        ({"type": "thinking", "thinking": [{"type": "text", "text": "h"}, {"type": "text", "text": "m"}]}, THOUGHT),
        ({"type": "reasoning", "id": "rs_1", "summary": [{"type": "summary_text", "text": "hm"}]}, THOUGHT),
        ({"type": "reasoning", "summary": [], "content": [{"type": "reasoning_text", "text": "hm"}]}, THOUGHT),
        ({"type": "reasoning_content", "reasoning_content": {"text": "hm", "signature": "x"}}, THOUGHT),
        ({"type": "reasoning", "reasoning": "hm"}, THOUGHT),
        ({"type": "redacted_thinking", "data": "x"}, {"content": ""}),
        ({"type": "reasoning", "id": "rs_1", "summary": None, "encrypted_content": "x"}, {"content": ""}),
        # calls
        ({"type": "function_call", "id": "fc", "call_id": "c1", "name": "look_up", "arguments": '{"n": 1}'}, [CALL]),
        ({**USE, "input": '{"n": 1}'}, [CALL]),
        ({"type": "tool_call", "id": "c1", "name": "look_up", "args": {"n": 1}}, [CALL]),
    ],
    ids=str,
)
def test_text_reasoning_and_calls_are_read_in_every_providers_form(block: Any, read: Any) -> None:
    expected = {"content": "", "tool_calls": read} if isinstance(read, list) else read
    assert turn(block) == expected
    if isinstance(read, list):
        calls = [tool_call(name="look_up", args={"n": 1}, id="c1")]
        assert turn(block, tool_calls=calls) == expected, "most providers write a call twice"
    chat = to_template_messages([ChatMessage(role="assistant", content=[block])])
    assert chat == [{"role": "assistant", **expected}]


@pytest.mark.parametrize(
    ("extra", "read"),
    [
        ({"refusal": "a"}, SAID),
        ({"refusal": None}, {"content": ""}),
        ({"reasoning": {"id": "rs_1", "summary": [{"type": "summary_text", "text": "hm"}]}}, THOUGHT),
        ({"reasoning_content": {"type": "text", "text": "hm"}}, THOUGHT),
        (
            {"function_call": {"name": "look_up", "arguments": '{"n": 1}'}},
            {"content": "", "tool_calls": [{**CALL, "id": ""}]},
        ),
        (
            {"function_call": {"name": "look_up", "arguments": '{"n": '}},
            {"content": "", "invalid_calls": [{"name": "look_up", "args": '{"n": '}]},
        ),
    ],
    ids=str,
)
def test_what_providers_put_beside_the_content_is_read(extra: Any, read: Any) -> None:
    assert turn(additional_kwargs=extra) == read


FOREIGN = [
    {"type": "web_search_call", "id": "ws_1", "status": "completed", "action": {"query": "x"}},
    {"type": "mcp_list_tools", "tools": []},
    {"type": "server_tool_use", "id": "s1", "name": "web_search", "input": {"query": "x"}},
    {"type": "web_search_tool_result", "tool_use_id": "s1", "content": [{"type": "web_search_result", "title": "t"}]},
    {"type": "server_tool_call", "id": "s1", "name": "web_search", "args": {}},
    {"type": "server_tool_result", "tool_call_id": "s1", "status": "success", "output": []},
    {"type": "non_standard", "value": {"type": "container_upload", "file_id": "x"}},
    {"cachePoint": {"type": "default"}},
    {"type": "cache_point"},
    {"type": None},
    {},
]


def test_blocks_of_other_providers_are_dropped_with_one_warning_for_each_kind(caplog: pytest.LogCaptureFixture) -> None:
    assert [turn(block, TEXT) for block in FOREIGN] == [SAID] * len(FOREIGN)
    caplog.clear()
    with caplog.at_level(logging.WARNING):
        for kind in ("new_kind", "newer_kind", "new_kind"):
            turn(TEXT, {"type": kind}, {"type": kind})
    said = [record.getMessage() for record in caplog.records]
    assert [text.split(" are ")[0] for text in said] == ["blocks of type new_kind", "blocks of type newer_kind"]


def test_cache_points_are_dropped_and_search_results_read_in_messages_of_users_and_tools() -> None:
    found = {"type": "search_result", "title": "t", "source": "u", "content": [{"type": "text", "text": "x"}]}
    plain = {"type": "document", "source": {"type": "text", "media_type": "text/plain", "data": "d"}}
    turns = to_template_messages(
        [
            SystemMessage([TEXT, {"cachePoint": {"type": "default"}}]),
            HumanMessage([TEXT, {"type": "cache_point"}, plain]),
            ToolMessage([found], tool_call_id="c1"),
        ]
    )
    assert [one["content"] for one in turns] == ["a", "ad", "t\nu\nx"]
    with pytest.raises(UnsupportedError, match="message 1 holds a block of type 'guessed'"):
        to_template_messages([HumanMessage([TEXT, {"type": "guessed", "text": "x"}])])


CONTENT = st.recursive(
    st.none() | st.booleans() | st.integers() | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=2) | st.dictionaries(st.text(max_size=5), inner, max_size=2),
    max_leaves=5,
)
KINDS = (
    *("text", "refusal", "thinking", "reasoning", "reasoning_content", "function_call", "custom_tool_call", "tool_use"),
    *("tool_call", "invalid_tool_call", "search_result", "document", "json", "non_standard", "input_image", "x"),
)
KEYS = st.sampled_from(
    [*KINDS[:6], *("summary", "content", "arguments", "input", "args", "id", "call_id", "name", "source", "value")]
)
BLOCKS = st.builds(
    lambda kind, rest: {**rest, "type": kind}, st.sampled_from(KINDS), st.dictionaries(KEYS, CONTENT, max_size=4)
)


@given(st.lists(BLOCKS, max_size=3), st.sampled_from([AIMessage, HumanMessage]), st.dictionaries(KEYS, CONTENT))
@settings(max_examples=60, deadline=None)
def test_whatever_blocks_hold_they_are_read_or_refused_by_name(content: Any, kind: Any, extra: Any) -> None:
    with suppress(PrecedentError):
        turns = to_template_messages([kind(content, additional_kwargs=extra)], media="placeholder")
        assert all(isinstance(one["content"], str) for one in turns)
        model = scripted(["fine"])
        assert model.invoke([("user", "hi"), kind(content, additional_kwargs=extra), ("user", "go on")]).text == "fine"


@pytest.mark.parametrize("provider", ["anthropic", "google_genai", "openai", None])
def test_a_message_in_langchains_own_blocks_reads_as_the_providers(provider: str | None) -> None:
    native = {
        "anthropic": [{"type": "thinking", "thinking": "hm", "signature": "x"}, TEXT, FOREIGN[2]],
        "google_genai": [{"type": "thinking", "thinking": "hm", "signature": "x"}, TEXT],
        "openai": [{"type": "reasoning", "summary": [{"type": "summary_text", "text": "hm"}]}, TEXT, FOREIGN[0]],
        None: [{"type": "reasoning", "reasoning": "hm"}, TEXT],
    }[provider]
    named = {"response_metadata": {"model_provider": provider}} if provider else {}
    message = AIMessage(list(native), **named)
    standard = AIMessage(content=message.content_blocks, response_metadata={**named, "output_version": "v1"})
    assert turn(*message.content) == turn(*standard.content) == THOUGHT | SAID


@pytest.mark.parametrize(
    "message",
    [
        {"content": None, "refusal": "a"},
        {"content": "a", "tool_calls": None, "name": None, "provider_specific_fields": {}},
        {"content": "a", "tool_calls": [{"function": {"name": "look_up", "arguments": {"n": 1}}, "id": "c1"}]},
        {"content": "a", "tool_calls": [{"function": {"name": "look_up", "arguments": '{"n"'}, "id": "c1"}]},
        {"content": "a", "tool_calls": [{"function": {"name": "look_up", "arguments": ""}, "type": "function"}]},
        {"content": "a", "reasoning": "hm", "cache_control": {"type": "ephemeral"}},
    ],
    ids=str,
)
def test_dicts_that_clients_write_are_read(message: dict[str, Any]) -> None:
    model = scripted(["fine"])
    talk = [("user", "hi"), {"role": "assistant", **message}, {"role": "tool", "content": "r"}, ("user", "go on")]
    assert model.invoke(talk).text == "fine"
    assert "assistant\na" in asked(model).prompt.replace("<think>\nhm\n</think>\n\n", "")


# Images


@tool
def screenshot() -> list[dict[str, Any]]:
    """Take a screenshot."""
    return [{"type": "text", "text": "the page: "}, IMAGE]


SEEN = ['<tool_call>\n{"name": "screenshot", "arguments": {}}\n</tool_call>', "I cannot see it."]
REFUSED = r"holds a block of type 'image.*media=\"placeholder\""


def test_a_screenshot_ends_no_agents_run_if_a_placeholder_is_asked_for() -> None:
    model = scripted(list(SEEN), media="placeholder")
    messages = create_agent(model, [screenshot]).invoke({"messages": [("user", "Look.")]})["messages"]
    assert messages[-1].text == "I cannot see it."
    assert "the page: [image omitted: this model reads text only]" in asked(model).prompt
    with pytest.raises(UnsupportedError, match=f"message 3 {REFUSED}"):
        create_agent(scripted(list(SEEN)), [screenshot]).invoke({"messages": [("user", "Look.")]})


def test_every_medium_has_its_word_and_a_call_says_what_happens_to_it() -> None:
    for kind, word in {"image": "image", "input_audio": "audio", "video": "video", "file": "file"}.items():
        for message in (HumanMessage, AIMessage):
            (read,) = to_template_messages([message([{"type": kind}])], media="placeholder")
            assert read["content"] == f"[{word} omitted: this model reads text only]"
            with pytest.raises(UnsupportedError, match=f"block of type '{kind}'"):
                to_template_messages([message([{"type": kind}])])
    picture = [HumanMessage([{"type": "text", "text": "Look: "}, IMAGE])]
    model = scripted(lambda prompt: "x")
    model.invoke(picture, media="placeholder")
    assert "Look: [image omitted: this model reads text only]" in asked(model).prompt
    for refusing, call in ((model, {"media": None}), (scripted(media="placeholder"), {"media": "refuse"})):
        with pytest.raises(UnsupportedError, match=REFUSED):
            refusing.invoke(picture, **call)


def test_the_client_of_a_server_has_the_setting() -> None:
    server = Echo()
    server.client(media="placeholder").invoke([HumanMessage([IMAGE])])
    assert server.bodies[0]["messages"][0]["content"] == "[image omitted: this model reads text only]"
    with pytest.raises(UnsupportedError, match=REFUSED):
        server.client().invoke([HumanMessage([IMAGE])])


# Ids of tool calls: no two calls ever share one, and the prompt does not depend on them


def test_every_call_has_an_id_of_its_own() -> None:
    model = scripted(["\n".join([calling(number="7")] * 2)] * 12).bind_tools([look_up])
    answers: list[Any] = model.batch(["hi"] * 3)
    for own in ({}, {"seed": 7, "temperature": 1.0}, {"tenant": "another"}):
        answers += [model.invoke("hi", **own), model.invoke("hi", **own)]
        answers.append(merged(list(model.stream("hi", **own))))
    ids = [str(call["id"]) for answer in answers for call in answer.tool_calls]
    assert len(set(ids)) == len(ids) == 24
    assert all(call_id.startswith("call_") for call_id in ids)


def conversation(name: Callable[[str], str], order: tuple[str, ...] = ("1", "2", "3")) -> list[dict[str, Any]]:
    """Two calls at once, then a third; `order` is that of their results."""

    def called(*numbers: str) -> AIMessage:
        return AIMessage("", tool_calls=[{"name": "look_up", "args": {"number": n}, "id": name(n)} for n in numbers])

    def results(numbers: tuple[str, ...]) -> list[BaseMessage]:
        return [ToolMessage(f'"result {number}"', tool_call_id=name(number)) for number in numbers]

    return to_template_messages(
        [HumanMessage("hi"), called("1", "2"), *results(order[:2]), called("3"), *results(order[2:])]
    )


@pytest.mark.parametrize("name", MODELS)
def test_a_prompt_does_not_depend_on_the_ids(name: str) -> None:
    tokenizer = TOKENIZERS[name]
    ways: list[Callable[[str], str]] = [
        lambda number: f"call_{number}",
        lambda number: f"chatcmpl-tool-{number * 20}",
        lambda number: f"Abcd{number * 5}",  # nine letters and digits, as Mistral's templates want them
        lambda number: "",  # a client that lost them: results are in the order of the calls
        lambda number: "always the same",
    ]
    prompts = [render_prompt(tokenizer, conversation(way), TOOLS) for way in ways]
    assert prompts == [prompts[0]] * len(ways)
    if name == "mistral":  # its template prints the id of a call and of its result
        mixed = render_prompt(tokenizer, conversation(ways[0], order=("2", "1", "3")), TOOLS)
        text = tokenizer.decode(mixed)
        printed = [text.split(f'"number": "{n}"')[1].split('"id": "')[1][:9] for n in "123"]
        assert len(set(printed)) == 3
        assert [text.split(f'"result {n}"')[1].split('"call_id": "')[1][:9] for n in "123"] == printed


def test_the_history_that_a_template_prints_ids_of_still_gets_the_drafts_of_an_earlier_run() -> None:
    """Two runs of one agent have calls with different ids; recall drafts the second run's answer all the same."""
    answer = "The order 1042 was sent to the new address, and the refund is on its way to the customer."
    with SpeculationCache.open(None, embedder=HashEmbedder()) as cache:
        engine = scripted_model_engine([answer, answer], tokenizer=TOKENIZERS["mistral"], cache=cache)
        model = ChatPrecedent.from_engine(engine, temperature=0.0).bind_tools(TOOLS)
        first, second = (
            model.invoke(
                [
                    HumanMessage("hi"),
                    AIMessage("", tool_calls=[{"name": "look_up", "args": {"number": "1042"}, "id": call_id}]),
                    ToolMessage('"sent"', tool_call_id=call_id),
                ]
            )
            for call_id in ("call_0a1b2c3d", "call_9f8e7d6c")
        )
        engine.close()
    assert first.text == second.text == answer
    assert first.usage_metadata is not None
    assert second.usage_metadata is not None
    assert second.usage_metadata["input_token_details"]["cache_read"] >= first.usage_metadata["input_tokens"] - 1
    assert second.response_metadata["speculation"]["num_accepted_tokens"] > len(answer) // 2


OUTPUT = [
    {"type": "reasoning", "id": "rs", "summary": [], "content": [{"type": "reasoning_text", "text": "hm"}]},
    {"type": "web_search_call", "id": "ws", "status": "completed", "action": {"type": "search", "query": "x"}},
    {"type": "message", "id": "m", "role": "assistant", "status": "completed", "content": [
        {"type": "output_text", "text": "a", "annotations": []}, {"type": "refusal", "refusal": " No."}]},
    {"type": "function_call", "id": "fc", "call_id": "c1", "name": "look_up", "arguments": '{"n": 1}',
     "status": "completed"},
]  # fmt: skip


@pytest.mark.parametrize("version", ["v0", "responses/v1", "v1"])
def test_answers_of_the_responses_api_continue_here(version: str) -> None:
    head = {"id": "r", "object": "response", "created_at": 1, "model": "m", "status": "completed"}
    response = {**head, "parallel_tool_calls": True, "tool_choice": "auto", "tools": [], "output": OUTPUT}
    transport = httpx.MockTransport(lambda request: httpx.Response(200, json=response))
    client = {"base_url": "http://localhost/v1", "http_client": httpx.Client(transport=transport)}
    other = ChatOpenAI(model="m", api_key="x", use_responses_api=True, output_version=version, **client)
    _, read, _ = to_template_messages([HumanMessage("hi"), other.invoke("hi"), ToolMessage("r", tool_call_id="c1")])
    assert read["content"].startswith("a")
    assert read["tool_calls"] == [CALL]
