"""What `ChatPrecedentServer` makes of answers: the same messages as `ChatPrecedent`, from every way in."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any

import httpx
import openai
import pytest
from helpers.fake_server import HELLO, SPECULATION, STREAMED, USAGE_METADATA, FakeServer, chunks, completion
from helpers.request_bodies import LOOK_UP, Order, look_up
from langchain_core.exceptions import OutputParserException
from langchain_core.messages import AIMessage


def streamed(llm: Any, *asked: Any, **call: Any) -> AIMessage:
    first, *others = llm.stream(*asked, **call)
    return sum(others, first)  # type: ignore[no-any-return]


async def astreamed(llm: Any, *asked: Any, **call: Any) -> AIMessage:
    first, *others = [chunk async for chunk in llm.astream(*asked, **call)]
    return sum(others, first)  # type: ignore[no-any-return]


WAYS: dict[str, Callable[..., AIMessage]] = {
    "invoke": lambda llm, *asked, **call: llm.invoke(*asked, **call),
    "ainvoke": lambda llm, *asked, **call: asyncio.run(llm.ainvoke(*asked, **call)),
    "stream": streamed,
    "astream": lambda llm, *asked, **call: asyncio.run(astreamed(llm, *asked, **call)),
}


def server_of(body: dict[str, Any], whole: dict[str, Any], pieces: list[dict[str, Any]]) -> FakeServer:
    return FakeServer((body, whole), ({**body, **STREAMED}, pieces))


@pytest.mark.parametrize("way", WAYS)
def test_text_and_thoughts_come_with_all_figures(way: str) -> None:
    server = server_of(
        HELLO,
        completion(content="Hi there.", reasoning_content="A greeting."),
        chunks(
            {"reasoning_content": "A "}, {"reasoning_content": "greeting."}, {"content": "Hi "}, {"content": "there."}
        ),
    )
    blocks = WAYS[way](server.client(output_version="v1"), "hello").content
    assert [{key: value for key, value in block.items() if key != "index"} for block in blocks] == [  # type: ignore[union-attr]
        {"type": "reasoning", "reasoning": "A greeting."},
        {"type": "text", "text": "Hi there."},
    ]
    message = WAYS[way](server.client(), "hello")
    told = message.response_metadata
    assert (message.content, message.additional_kwargs) == ("Hi there.", {"reasoning_content": "A greeting."})
    assert (message.usage_metadata, told["speculation"]) == (USAGE_METADATA, SPECULATION)
    assert [told[key] for key in ("model_provider", "model_name", "finish_reason")] == ["precedent", "smol", "stop"]
    assert [block["type"] for block in message.content_blocks] == ["reasoning", "text"]
    assert "logprobs" not in message.response_metadata


@pytest.mark.parametrize("way", ["stream", "astream"])
@pytest.mark.parametrize("written", ["", "{", '{"number": "10', '{"number": "\\', '{"number": "1042"}'])
def test_a_streamed_call_that_was_cut_is_no_call(way: str, written: str) -> None:
    """LangChain would complete its arguments, and an agent run it. Only a whole one is a call."""
    begun = {"id": "call_1", "type": "function", "function": {"name": "look_up", "arguments": '{"number": "7"}'}}
    open_ = {**begun, "id": "call_2", "function": {"name": "look_up", "arguments": ""}}
    pieces: list[Any] = [{"index": 0, **begun}, {"index": 1, **open_}]
    pieces += ({"index": 1, "function": {"arguments": letter}} for letter in written)
    server = FakeServer(({**HELLO, **STREAMED, "tools": [LOOK_UP], "tool_choice": "required"}, chunks(
        *({"tool_calls": [piece]} for piece in pieces), finish_reason="length"
    )))  # fmt: skip
    message = WAYS[way](server.client().bind_tools([look_up], tool_choice="any"), "hello")
    whole = written.endswith("}")
    assert [call["args"] for call in message.tool_calls] == [{"number": "7"}, {"number": "1042"}][: 1 + whole]
    assert [call["id"] for call in message.invalid_tool_calls] == ["call_2"][whole:]
    if not whole:
        assert str(message.invalid_tool_calls[0]["args"]).startswith(written)


@pytest.mark.parametrize("way", WAYS)
def test_calls_come_whole_and_in_pieces(way: str) -> None:
    arguments = ['{"number": "1042"}', '{"number": "7"}']
    whole = [
        {"id": f"call_{index}", "type": "function", "function": {"name": "look_up", "arguments": text}}
        for index, text in enumerate(arguments)
    ]
    pieces: list[Any] = []
    for index, call in enumerate(whole):
        pieces.append({**call, "index": index, "function": {"name": "look_up", "arguments": ""}})
        pieces += (
            {"index": index, "function": {"arguments": part}} for part in (arguments[index][:5], arguments[index][5:])
        )
    server = server_of(
        {**HELLO, "tools": [LOOK_UP], "tool_choice": "required"},
        completion("tool_calls", tool_calls=whole),
        chunks(*({"tool_calls": [piece]} for piece in pieces), finish_reason="tool_calls"),
    )
    message = WAYS[way](server.client().bind_tools([look_up], tool_choice="any"), "hello")
    assert [(call["id"], call["name"], call["args"]["number"]) for call in message.tool_calls] == [
        *(("call_0", "look_up", "1042"), ("call_1", "look_up", "7")),
    ]
    assert message.content == ""
    assert message.response_metadata["finish_reason"] == "tool_calls"
    assert message.response_metadata["speculation"] == SPECULATION


def test_a_broken_call_stays_as_it_was_written_and_invoke_can_stream() -> None:
    call = {"id": "call_1", "type": "function", "function": {"name": "look_up", "arguments": '{"number": '}}
    server = FakeServer(({**HELLO, "tools": [LOOK_UP]}, completion(tool_calls=[call])))
    message = server.client().bind_tools([look_up]).invoke("hello")
    assert message.tool_calls == []
    assert [broken["args"] for broken in message.invalid_tool_calls] == ['{"number": ']
    server = FakeServer(({**HELLO, **STREAMED}, chunks({"content": "Hi"})))
    message = server.client(streaming=True).invoke("hello")
    assert (message.content, message.usage_metadata) == ("Hi", USAGE_METADATA)


@pytest.mark.parametrize("method", ["json_schema", "function_calling", "json_mode"])
@pytest.mark.parametrize("way", WAYS)
def test_structured_output_is_an_object_of_the_class(way: str, method: str) -> None:
    text = '{"number": 1042}'
    call = {"index": 0, "id": "call_1", "type": "function", "function": {"name": "Order", "arguments": text}}
    said = {"tool_calls": [call]} if method == "function_calling" else {"content": text}
    parameters = {"properties": {"number": {"type": "integer"}}, "required": ["number"], "type": "object"}
    tool = {"type": "function", "function": {"name": "Order", "description": "An order.", "parameters": parameters}}
    sent: dict[str, Any] = {
        "json_schema": {"response_format": body_of_order()["response_format"]},
        "json_mode": {"response_format": {"type": "json_object"}},
        "function_calling": {
            "tools": [tool],
            "tool_choice": {"type": "function", "function": {"name": "Order"}},
            "parallel_tool_calls": False,
        },
    }
    server = server_of({**HELLO, **sent[method]}, completion(**said), chunks(said))
    structured = server.client().with_structured_output(Order, method=method)
    asked = {"stream": lambda: list(structured.stream("hello"))[-1], "invoke": lambda: structured.invoke("hello")}
    assert asked.get(way, lambda: asyncio.run(structured.ainvoke("hello")))() == Order(number=1042)


def test_the_default_method_is_json_schema_with_raw_answers_and_a_cut_one_is_an_error_of_the_parser() -> None:
    """The parser of `openai` raises an error that LangChain's retries do not know."""
    server = FakeServer((body_of_order(), completion(content='{"number": 7}')))
    found = server.client().with_structured_output(Order, include_raw=True).invoke("hello")
    assert found["parsed"] == Order(number=7)
    assert found["raw"].response_metadata["speculation"] == SPECULATION
    server = FakeServer((body_of_order(), completion("length", content='{"numb')))
    with pytest.raises(OutputParserException, match="allow more with max_tokens="):
        server.client().with_structured_output(Order).invoke("hello")


def body_of_order() -> dict[str, Any]:
    schema = Order.model_json_schema()
    return {**HELLO, "response_format": {"type": "json_schema", "json_schema": {"name": "Order", "schema": schema}}}


REFUSED = {
    "error": {"message": "no such model", "type": "invalid_request_error", "param": "model", "code": "model_not_found"}
}


@pytest.mark.parametrize("way", WAYS)
def test_what_the_server_refuses_is_an_error_of_openai(way: str) -> None:
    kinds = {400: openai.BadRequestError, 401: openai.AuthenticationError, 404: openai.NotFoundError}
    for status, kind in (kinds | {429: openai.RateLimitError, 503: openai.InternalServerError}).items():
        answer = httpx.Response(status, json=REFUSED)
        server = FakeServer((HELLO, answer), ({**HELLO, **STREAMED}, answer))
        with pytest.raises(kind, match="no such model"):
            WAYS[way](server.client(), "hello")
