"""Messages that other providers' models wrote are part of a history: in fallbacks, in agents and in `warm`."""

from __future__ import annotations

import json
import logging
from contextlib import suppress
from pathlib import Path
from typing import Any

import httpx
import pytest
from helpers.scripted_kinds import asked
from helpers.scripted_talk import model as scripted
from hypothesis import given, settings
from hypothesis import strategies as st
from langchain.agents import create_agent
from langchain_core.language_models import FakeMessagesListChatModel
from langchain_core.messages import AIMessage, ChatMessage, HumanMessage, SystemMessage, ToolMessage
from langchain_core.messages.tool import tool_call
from langchain_core.tools import tool
from langchain_openai import ChatOpenAI

from precedent import SpeculationCache
from precedent.errors import ConfigError, PrecedentError, PromptError, UnsupportedError
from precedent.langchain import ChatPrecedent
from precedent.langchain.messages import to_template_messages
from precedent_server.client import ChatPrecedentServer
from precedent_testing.embedders import HashEmbedder
from precedent_testing.scripted_model import scripted_model_engine

CALL = {"type": "function", "id": "c1", "function": {"name": "look_up", "arguments": {"n": 1}}}
SAID, THOUGHT = {"content": "a"}, {"reasoning_content": "hm"}
TEXT = {"type": "text", "text": "a"}
IMAGE = {"type": "image_url", "image_url": {"url": "data:image/png;base64,AAAA"}}


def turn(*content: Any, **fields: Any) -> dict[str, Any]:
    """The one turn of an assistant's message, without its role."""
    (read,) = to_template_messages([AIMessage(list(content), **fields)])
    assert read.pop("role") == "assistant"
    return read


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
        ({"type": "redacted_thinking", "data": "x"}, {}),
        ({"type": "reasoning", "id": "rs_1", "summary": None, "encrypted_content": "x"}, {}),
        # calls
        ({"type": "function_call", "id": "fc", "call_id": "c1", "name": "look_up", "arguments": '{"n": 1}'}, [CALL]),
        ({"type": "tool_use", "id": "c1", "name": "look_up", "input": '{"n": 1}'}, [CALL]),
        ({"type": "tool_call", "id": "c1", "name": "look_up", "args": {"n": 1}}, [CALL]),
    ],
    ids=str,
)
def test_text_reasoning_and_calls_are_read_in_every_providers_form(block: Any, read: Any) -> None:
    expected = {"tool_calls": read} if isinstance(read, list) else read
    assert turn(block) == {"content": "", **expected}
    if isinstance(read, list):
        calls = [tool_call(name="look_up", args={"n": 1}, id="c1")]
        assert turn(block, tool_calls=calls) == {"content": "", **expected}, "most providers write a call twice"
    (read_of_chat,) = to_template_messages([ChatMessage(role="assistant", content=[block])])
    assert read_of_chat == {"role": "assistant", "content": "", **expected}


@pytest.mark.parametrize(
    ("extra", "read"),
    [
        ({"refusal": "a"}, SAID),
        ({"refusal": None}, {"content": ""}),
        (
            {"reasoning": {"id": "rs_1", "summary": [{"type": "summary_text", "text": "hm"}]}},
            {"content": "", **THOUGHT},
        ),
        ({"reasoning_content": {"type": "text", "text": "hm"}}, {"content": "", **THOUGHT}),
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
    {"type": "code_execution_result", "outcome": 1},
    {"type": "server_tool_call", "id": "s1", "name": "web_search", "args": {}},
    {"type": "server_tool_result", "tool_call_id": "s1", "status": "success", "output": []},
    {"type": "non_standard", "value": {"type": "container_upload", "file_id": "x"}},
    {"cachePoint": {"type": "default"}},
    {"type": "cache_point"},
    {"type": None},
    {},
]


@pytest.mark.parametrize("block", FOREIGN, ids=str)
def test_blocks_of_other_providers_are_dropped(block: dict[str, Any]) -> None:
    assert turn(block, TEXT) == SAID


def test_a_dropped_kind_is_said_once(caplog: pytest.LogCaptureFixture) -> None:
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


def test_what_would_change_the_answer_is_refused_in_messages_of_users() -> None:
    with pytest.raises(UnsupportedError, match="message 1 holds a block of type 'guessed'"):
        to_template_messages([HumanMessage([TEXT, {"type": "guessed", "text": "x"}])])


CONTENT = st.recursive(
    st.none() | st.booleans() | st.integers() | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=2) | st.dictionaries(st.text(max_size=5), inner, max_size=2),
    max_leaves=5,
)
KINDS = st.sampled_from(
    [
        *("text", "refusal", "thinking", "reasoning", "reasoning_content", "function_call", "custom_tool_call"),
        *(
            "tool_use",
            "tool_call",
            "invalid_tool_call",
            "search_result",
            "document",
            "json",
            "non_standard",
            "input_image",
        ),
        "x",
    ]
)
KEYS = st.sampled_from(
    [
        *("text", "refusal", "thinking", "reasoning", "reasoning_content", "summary", "content", "arguments"),
        *("input", "args", "id", "call_id", "name", "source", "value", "json"),
    ]
)
BLOCKS = st.builds(lambda kind, rest: {**rest, "type": kind}, KINDS, st.dictionaries(KEYS, CONTENT, max_size=4))


@given(st.lists(BLOCKS, max_size=3), st.sampled_from([AIMessage, HumanMessage]), st.dictionaries(KEYS, CONTENT))
@settings(max_examples=100, deadline=None)
def test_whatever_blocks_hold_they_are_read_or_refused_by_name(content: Any, kind: Any, extra: Any) -> None:
    with suppress(PrecedentError):
        turns = to_template_messages([kind(content, additional_kwargs=extra)], media="placeholder")
        assert all(isinstance(one["content"], str) for one in turns)
        model = scripted(["fine"])
        assert model.invoke([("user", "hi"), kind(content, additional_kwargs=extra), ("user", "go on")]).text == "fine"


# Real clients

RESPONSE = {
    "id": "resp_1",
    "object": "response",
    "created_at": 1,
    "model": "m",
    "status": "completed",
    "parallel_tool_calls": True,
    "tool_choice": "auto",
    "tools": [],
    "output": [
        {"type": "reasoning", "id": "rs", "summary": [], "content": [{"type": "reasoning_text", "text": "hm"}]},
        {"type": "web_search_call", "id": "ws", "status": "completed", "action": {"type": "search", "query": "x"}},
        {
            "type": "message",
            "id": "m",
            "role": "assistant",
            "status": "completed",
            "content": [
                {"type": "output_text", "text": "a", "annotations": []},
                {"type": "refusal", "refusal": " No."},
            ],
        },
        {
            "type": "function_call",
            "id": "fc",
            "call_id": "c1",
            "name": "look_up",
            "arguments": '{"n": 1}',
            "status": "completed",
        },
    ],
}


@pytest.mark.parametrize("version", ["v0", "responses/v1", "v1"])
def test_answers_of_the_responses_api_continue_here(version: str) -> None:
    transport = httpx.MockTransport(lambda request: httpx.Response(200, json=RESPONSE))
    other = ChatOpenAI(
        model="m",
        api_key="x",
        base_url="http://localhost/v1",
        use_responses_api=True,
        output_version=version,
        http_client=httpx.Client(transport=transport),
    )
    answer = other.invoke("hi")
    _, read, _ = to_template_messages([HumanMessage("hi"), answer, ToolMessage("r", tool_call_id="c1")])
    assert read["content"].startswith("a")
    assert read["tool_calls"] == [CALL]
    model = scripted(["fine"])
    assert model.invoke([HumanMessage("hi"), answer, ToolMessage("r", tool_call_id="c1")]).text == "fine"
    assert "look_up" in asked(model).prompt


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
    assert turn(*message.content) == turn(*standard.content) == SAID | THOUGHT


def test_a_fallback_goes_on_where_another_model_began() -> None:
    class Broken(FakeMessagesListChatModel):
        def _generate(self, *args: Any, **kwargs: Any) -> Any:
            raise RuntimeError("out of credit")

    history = [HumanMessage("hi"), AIMessage([FOREIGN[2], FOREIGN[3], TEXT]), HumanMessage("go on")]
    model = scripted(["fine"])
    assert Broken(responses=[]).with_fallbacks([model]).invoke(history).text == "fine"
    assert "<|im_start|>assistant\na<|im_end|>" in asked(model).prompt


# Messages as dicts

DICTS: list[tuple[dict[str, Any], dict[str, Any]]] = [
    ({"content": None, "refusal": "a"}, SAID),
    ({"content": "a", "tool_calls": None, "name": None, "provider_specific_fields": {}}, SAID),
    ({"content": "a", "tool_calls": [{"function": {"name": "look_up", "arguments": {"n": 1}}, "id": "c1"}]}, {}),
    ({"content": "a", "tool_calls": [{"function": {"name": "look_up", "arguments": '{"n"'}, "id": "c1"}]}, {}),
    ({"content": "a", "tool_calls": [{"function": {"name": "look_up", "arguments": ""}, "type": "function"}]}, {}),
    ({"content": "a", "reasoning": "hm", "cache_control": {"type": "ephemeral"}}, SAID),
]


@pytest.mark.parametrize("message", [one for one, _ in DICTS], ids=str)
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


def test_a_screenshot_ends_no_agents_run_if_a_placeholder_is_asked_for() -> None:
    model = scripted(list(SEEN), media="placeholder")
    messages = create_agent(model, [screenshot]).invoke({"messages": [("user", "Look.")]})["messages"]
    assert messages[-1].text == "I cannot see it."
    assert "the page: [image omitted: this model reads text only]" in asked(model).prompt


def test_without_being_asked_images_are_refused_with_the_setting() -> None:
    model = scripted(list(SEEN))
    with pytest.raises(UnsupportedError, match=r"message 3 holds a block of type 'image.*media=\"placeholder\""):
        create_agent(model, [screenshot]).invoke({"messages": [("user", "Look.")]})


@pytest.mark.parametrize(
    ("kind", "word"), {"image": "image", "input_audio": "audio", "video": "video", "file": "file"}.items()
)
def test_every_medium_has_its_word(kind: str, word: str) -> None:
    for message in (HumanMessage, AIMessage):
        (read,) = to_template_messages([message([{"type": kind}])], media="placeholder")
        assert read["content"] == f"[{word} omitted: this model reads text only]"
        with pytest.raises(UnsupportedError, match=f"block of type '{kind}'"):
            to_template_messages([message([{"type": kind}])])


def test_a_call_says_what_happens_to_media() -> None:
    picture = [HumanMessage([{"type": "text", "text": "Look: "}, IMAGE])]
    model = scripted(lambda prompt: "x")
    model.invoke(picture, media="placeholder")
    assert "Look: [image omitted: this model reads text only]" in asked(model).prompt
    for media in (None, "refuse"):
        with pytest.raises(UnsupportedError, match="block of type 'image"):
            model.invoke(picture, media=media)
    with pytest.raises(UnsupportedError, match="block of type 'image"):
        scripted(lambda prompt: "x", media="placeholder").invoke(picture, media="refuse")
    with pytest.raises(ConfigError, match="media='drop' must be 'refuse' or 'placeholder'"):
        model.invoke(picture, media="drop")


def test_the_setting_is_checked() -> None:
    with pytest.raises(ConfigError, match="media='drop' must be 'refuse' or 'placeholder'"):
        ChatPrecedent(model="m", media="drop")
    assert ChatPrecedent(model="m", media=None).media == "refuse"
    assert scripted(media="placeholder")._get_llm_string() != scripted()._get_llm_string()


def test_the_client_of_a_server_has_the_setting() -> None:
    sent: list[Any] = []

    def answer(request: httpx.Request) -> httpx.Response:
        sent.append(json.loads(request.content)["messages"])
        return httpx.Response(200, json={"choices": [{"index": 0, "message": {"role": "assistant", "content": "x"}}]})

    client = httpx.Client(transport=httpx.MockTransport(answer))
    made = {"model": "m", "base_url": "http://localhost", "api_key": "x", "http_client": client}
    ChatPrecedentServer(**made, media="placeholder").invoke([HumanMessage([IMAGE])])
    assert sent[0][0]["content"] == "[image omitted: this model reads text only]"
    with pytest.raises(UnsupportedError, match="message 1 holds a block of type 'image"):
        ChatPrecedentServer(**made).invoke([HumanMessage([IMAGE])])


# Logs


@pytest.fixture
def llm() -> Any:
    engine = scripted_model_engine(["x"], cache=SpeculationCache.open(embedder=HashEmbedder()))
    yield ChatPrecedent.from_engine(engine)
    engine.close()


HI = {"role": "user", "content": "hi"}


def test_warming_reads_what_other_models_wrote(llm: ChatPrecedent, tmp_path: Path) -> None:
    answers = [{"role": "assistant", "content": [block, TEXT]} for block in FOREIGN[:4]]
    answers += [{"role": "assistant", **one} for one, _ in DICTS[:2]]
    log = tmp_path / "log.jsonl"
    log.write_text("".join(json.dumps({"messages": [HI, one]}) + "\n" for one in answers))
    assert llm.warm(log) == len(answers)
    assert llm.warm([[HI, one] for one in answers]) == len(answers)


ODD_LINES: list[Any] = [
    "{",
    "[" * 100_000,
    {"messages": [{"role": "user", "content": [IMAGE]}, {"role": "assistant", "content": "x"}]},
    {"messages": [HI, {"role": "narrator", "content": "x"}]},
    {"messages": [HI, 3]},
    {"messages": [HI], "response": {"choices": [3]}},
    {"messages": [HI, {"role": "assistant", "content": "x"}], "tools": 3},
    {"messages": []},
]


@pytest.mark.parametrize("odd", ODD_LINES, ids=lambda odd: str(odd)[:60])
def test_a_line_that_cannot_be_read_is_skipped_and_named(
    llm: ChatPrecedent, tmp_path: Path, caplog: pytest.LogCaptureFixture, odd: Any
) -> None:
    good = json.dumps({"messages": [HI, {"role": "assistant", "content": "x"}]})
    lines = [good, odd if isinstance(odd, str) else json.dumps(odd), good]
    log = tmp_path / "log.jsonl"
    log.write_text("\n".join(lines) + "\n")
    with caplog.at_level(logging.WARNING):
        assert llm.warm(log) == 2
    (said,) = (record.getMessage() for record in caplog.records if "skipped" in record.getMessage())
    assert said.startswith(f"skipped conversations of {log}: 1, the first because of {log} line 2")


def test_a_list_that_cannot_be_read_is_named_by_its_number(llm: ChatPrecedent) -> None:
    good = [("user", "hi"), ("ai", "x")]
    with pytest.raises(UnsupportedError, match="conversation 2: message 1 holds a block of type 'image_url'"):
        llm.warm([good, [HumanMessage([IMAGE]), AIMessage("x")]])
    with pytest.raises(PromptError, match="conversation 3: "):
        llm.warm([good, good, [("narrator", "x")]])
    blind = llm.model_copy(update={"media": "placeholder"})
    assert blind.warm([[HumanMessage([IMAGE]), AIMessage("x")]]) == 1
