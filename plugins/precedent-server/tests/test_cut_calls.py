"""A call that `max_tokens` cuts is text, or an unfinished call of a stream; never a call with markup.

Every format is cut behind each third of its tokens (behind each in exhaustive runs), whole and streamed, on both routes
and by `ChatPrecedent` itself.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import closing
from typing import Any

import httpx
import pytest
from helpers.format_models import MODELS, TOKENIZERS, TOOLS, answers_of

from precedent.langchain import ChatPrecedent
from precedent_server.app import server_app
from precedent_server.serving import Served, Serving
from precedent_testing.scripted_engine import ScriptedEngine

CHAT, RESPONSES = "/v1/chat/completions", "/v1/responses"
FUNCTIONS = [{"type": "function", **tool["function"]} for tool in TOOLS]
ARGUMENTS = {"number": "10 E", "copies": 2}


def answer_of(name: str) -> str:
    """A call with an ASCII argument, since half a character is no text."""
    return answers_of(MODELS[name])[0].replace("€", "E")


def num_tokens(name: str) -> int:
    return len(TOKENIZERS[name].encode(answer_of(name)))


@pytest.fixture(params=MODELS)
def name(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture(params=[3, pytest.param(1, marks=pytest.mark.exhaustive)])
def lengths(request: pytest.FixtureRequest, name: str) -> range:
    """Tokens after which the answer is cut."""
    return range(1, num_tokens(name) + 1, request.param)


@pytest.fixture
def client(name: str) -> Iterator[httpx.AsyncClient]:
    engine: Any = ScriptedEngine(TOKENIZERS[name], lambda prompt: answer_of(name))
    with closing(Serving({"scripted": Served.of("scripted", engine)})) as serving:
        yield httpx.AsyncClient(transport=httpx.ASGITransport(server_app(serving)), base_url="http://127.0.0.1:8000")


async def posted(client: httpx.AsyncClient, path: str, **more: Any) -> Any:
    """The answer, or the events of its stream."""
    asked = {"messages": [{"role": "user", "content": "hi"}], "tools": TOOLS}
    asked = asked if path == CHAT else {"input": "hi", "tools": FUNCTIONS}
    answer = await client.post(path, json={"model": "scripted", **asked, **more})
    assert answer.status_code == 200, answer.text
    if not more.get("stream"):
        return answer.json()
    datas = [line[6:] for line in answer.text.splitlines() if line.startswith("data: {")]
    return [json.loads(data) for data in datas]


def check_written(name: str, text: str, length: int) -> None:
    """The text of an answer that was cut is what the model wrote, except thoughts and the blanks before a call."""
    written = TOKENIZERS[name].decode(TOKENIZERS[name].encode(answer_of(name))[:length])
    if text.strip():
        assert written.replace(" ", "").replace("\n", "").endswith(text.replace(" ", "").replace("\n", "")), text


@pytest.mark.sampled(3)
async def test_whole_answers_have_whole_calls_alone(client: httpx.AsyncClient, name: str, lengths: range) -> None:
    for length in lengths:
        (choice,) = (await posted(client, CHAT, max_tokens=length))["choices"]
        message = choice["message"]
        calls = [json.loads(call["function"]["arguments"]) for call in message.get("tool_calls", ())]
        assert (choice["finish_reason"], calls) == ("length", [ARGUMENTS] * len(calls))
        if not calls:
            check_written(name, message["content"], length)
        if length % 7 == 1:
            items = (await posted(client, RESPONSES, max_output_tokens=length))["output"]
            assert [json.loads(item["arguments"]) for item in items if item["type"] == "function_call"] == calls
            texts = [part["text"] for item in items if item["type"] == "message" for part in item["content"]]
            assert "".join(texts) == (message["content"] or "")
            assert items[-1]["status"] == ("completed" if calls else "incomplete")


@pytest.mark.sampled(3)
async def test_a_stream_never_has_markup_in_arguments(client: httpx.AsyncClient, name: str, lengths: range) -> None:
    """An unfinished item of a stream of Responses says so."""
    for length in lengths:
        events = await posted(client, CHAT, max_tokens=length, stream=True)
        deltas = [event["choices"][0]["delta"] for event in events]
        calls = [call["function"] for delta in deltas for call in delta.get("tool_calls", ())]
        check_arguments("".join(call["arguments"] for call in calls))
        assert [call["name"] for call in calls if "name" in call] in ([], ["look_up"])
        assert events[-1]["choices"][0]["finish_reason"] == "length"
        if not calls:
            check_written(name, "".join(delta.get("content", "") for delta in deltas), length)
        last = (await posted(client, RESPONSES, max_output_tokens=length, stream=True))[-1]
        assert last["type"] == "response.incomplete"
        for item in (item for item in last["response"]["output"] if item["type"] == "function_call"):
            check_arguments(item["arguments"])
            assert item["arguments"] == json.dumps(ARGUMENTS, ensure_ascii=False) or item["status"] == "incomplete"


def check_arguments(arguments: str) -> None:
    """They are the beginning of the arguments' JSON."""
    assert json.dumps(ARGUMENTS, ensure_ascii=False).startswith(arguments)


@pytest.mark.sampled(3)
def test_a_chat_model_returns_a_cut_call_as_its_text_and_streams_it_without_markup(name: str, lengths: range) -> None:
    engine = ScriptedEngine(TOKENIZERS[name], lambda prompt: answer_of(name))
    model = ChatPrecedent.from_engine(engine).bind_tools(TOOLS)
    for length in lengths:
        whole: Any = model.invoke("hi", max_tokens=length)
        assert (whole.response_metadata["finish_reason"], whole.invalid_tool_calls) == ("length", [])
        first, *others = model.stream("hi", max_tokens=length)
        streamed: Any = sum(others, first)
        for message in (whole, streamed):
            assert [call["args"] for call in message.tool_calls] == [ARGUMENTS] * len(message.tool_calls)
        if not whole.tool_calls:
            check_written(name, whole.text, length)
        for call in streamed.invalid_tool_calls:
            assert call["name"] == "look_up"
            check_arguments(call["args"].removesuffix("<invalid>")[:-2].rstrip("\\"))
