"""`/v1/chat/completions`: what comes back, whole and streamed, is what the model was asked for and wrote; refusals."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import httpx
import pytest
from openai.types.chat import ChatCompletion, ChatCompletionChunk

from precedent_server.keys import KeyFile, add_key

Client = httpx.AsyncClient

URL = "/v1/chat/completions"
ASKED: dict[str, Any] = {"model": "scripted", "messages": [{"role": "user", "content": "Hello?"}], "temperature": 0}
CALL = '<tool_call>\n{"name": "look_up", "arguments": {"number": "10 €"}}\n</tool_call>'
SCHEMA = {"type": "object", "properties": {"number": {"type": "string"}}, "required": ["number"]}
FUNCTION = {"name": "look_up", "parameters": SCHEMA}
TOOL = {"type": "function", "function": FUNCTION}


async def whole(client: Any, **more: Any) -> ChatCompletion:
    answer = await client.post(URL, json=ASKED | more)
    assert answer.status_code == 200, answer.text
    return ChatCompletion.model_validate(answer.json())


async def streamed(client: Any, **more: Any) -> list[ChatCompletionChunk]:
    answer = await client.post(URL, json=ASKED | {"stream": True, **more})
    assert answer.status_code == 200, answer.text
    events = answer.text.split("\n\n")
    assert events[-2:] == ["data: [DONE]", ""]
    return [ChatCompletionChunk.model_validate(json.loads(event.removeprefix("data: "))) for event in events[:-2]]


def texts_of(chunks: Sequence[ChatCompletionChunk]) -> dict[int, str]:
    """The text of each streamed answer."""
    texts = dict[int, str]()
    for choice in (choice for chunk in chunks for choice in chunk.choices):
        texts[choice.index] = texts.get(choice.index, "") + (choice.delta.content or "")
    return texts


async def test_an_answer(serve: Any) -> None:
    completion = await whole(serve(["Good morning."]), logprobs=True, top_logprobs=2)
    (choice,) = completion.choices
    assert choice.message.content == "Good morning."
    assert (choice.finish_reason, choice.index, choice.message.role) == ("stop", 0, "assistant")
    assert completion.usage is not None
    assert choice.logprobs is not None
    assert completion.usage.completion_tokens == len(choice.logprobs.content or ())
    assert all(len(one.top_logprobs) == 2 for one in choice.logprobs.content or ())
    assert completion.speculation["num_steps"] >= 1  # type: ignore[attr-defined]


async def test_a_stream_says_the_same(serve: Any) -> None:
    asked = {"logprobs": True, "top_logprobs": 2}
    completion = await whole(serve(["Good morning, Zoë!"]), **asked)
    chunks = await streamed(serve(["Good morning, Zoë!"]), stream_options={"include_usage": True}, **asked)
    assert chunks[0].choices[0].delta.role == "assistant"
    assert texts_of(chunks) == {0: "Good morning, Zoë!"} == {0: completion.choices[0].message.content}
    assert [chunk.choices[0].finish_reason for chunk in chunks if chunk.choices][-1] == "stop"
    assert (chunks[-1].choices, chunks[-1].usage) == ([], completion.usage)
    assert all(chunk.usage is None for chunk in chunks[:-1])
    assert len({chunk.id for chunk in chunks}) == 1
    told = [chunk.choices[0].logprobs for chunk in chunks if chunk.choices]
    tokens = [one.token for logprobs in told if logprobs for one in logprobs.content or ()]
    assert tokens == [one.token for one in completion.choices[0].logprobs.content]  # type: ignore[union-attr]


@pytest.mark.parametrize("stream", [False, True])
async def test_tool_calls(serve: Any, stream: bool) -> None:
    client = serve([f"Let me see.{CALL}\n{CALL}"])
    if not stream:
        choice = (await whole(client, tools=[TOOL])).choices[0]
        calls = [(call.function.name, call.function.arguments) for call in choice.message.tool_calls or ()]
        reason, text = choice.finish_reason, choice.message.content
    else:
        chunks = await streamed(client, tools=[TOOL])
        deltas = [delta for chunk in chunks for delta in chunk.choices[0].delta.tool_calls or ()]
        heads = [delta for delta in deltas if delta.id]
        assert [head.index for head in heads] == [0, 1]
        written = [[one.function.arguments for one in deltas if one.index == head.index] for head in heads]
        calls = [(head.function.name, "".join(parts)) for head, parts in zip(heads, written, strict=True)]
        reason, text = chunks[-1].choices[0].finish_reason, texts_of(chunks)[0]
    assert [(name, json.loads(arguments)) for name, arguments in calls] == [("look_up", {"number": "10 €"})] * 2
    assert (reason, text) == ("tool_calls", "Let me see.")


async def test_several_answers(serve: Any) -> None:
    client = serve(["one", "two", "three"] * 2)
    found = {choice.index: choice.message.content for choice in (await whole(client, n=3)).choices}
    assert sorted(found) == [0, 1, 2]
    assert sorted(found.values()) == sorted(texts_of(await streamed(client, n=3)).values()) == ["one", "three", "two"]


async def test_a_prediction_is_counted_and_not_billed(serve: Any) -> None:
    text = "The order is sent on Monday, and arrives on Thursday."
    completion = await whole(serve([text]), prediction={"type": "content", "content": text}, logprobs=True)
    assert completion.usage is not None
    details = completion.usage.completion_tokens_details
    assert details is not None
    assert (details.accepted_prediction_tokens or 0) > 10
    told = completion.choices[0].logprobs
    assert told is not None
    assert completion.usage.completion_tokens == len(told.content or ())


async def test_stop_and_length(serve: Any) -> None:
    assert (await whole(serve(["one. two."]), stop=". ")).choices[0].message.content == "one"
    cut = await whole(serve(["one. two."]), max_completion_tokens=3)
    assert cut.usage is not None
    assert (cut.usage.completion_tokens, cut.choices[0].finish_reason) == (3, "length")
    assert "one. two.".startswith(cut.choices[0].message.content or "nothing")


async def test_a_failed_request_says_nothing_about_the_process(serve: Any) -> None:
    """The grammar does not allow what the script wants to write."""
    answer = await serve(["no JSON"]).post(URL, json=ASKED | {"response_format": {"type": "json_object"}})
    assert answer.status_code == 500
    assert answer.json()["error"]["message"] == "the server failed to answer this request; its log says why"


@pytest.mark.parametrize(("strict", "held"), [(True, True), (None, True), (False, False)])
async def test_a_schema_that_is_not_strict_asks_for_some_object(serve: Any, strict: bool | None, held: bool) -> None:
    described = {"name": "person", "schema": SCHEMA, **({} if strict is None else {"strict": strict})}
    wanted = {"type": "json_schema", "json_schema": described}
    found = await whole(serve(['{"other": 1}'], may_stray=True), response_format=wanted, max_tokens=200)
    assert (found.choices[0].message.content != '{"other": 1}') is held


async def ids_of(client: Any, headers: Any = None, **more: Any) -> list[str]:
    """The ids of the calls of a chat's answers, or of a response's."""
    if "input" in more:
        answer = await client.post("/v1/responses", json={"model": "scripted", **more})
        return [item["call_id"] for item in answer.json()["output"] if item["type"] == "function_call"]
    answer = await client.post(URL, json=ASKED | {"tools": [TOOL], **more}, headers=headers)
    assert answer.status_code == 200, answer.text
    if not more.get("stream"):
        return [call["id"] for choice in answer.json()["choices"] for call in choice["message"]["tool_calls"]]
    events = [json.loads(line[6:]) for line in answer.text.split("\n\n") if line.startswith("data: {")]
    deltas = [choice["delta"] for event in events for choice in event["choices"]]
    return [call["id"] for delta in deltas for call in delta.get("tool_calls", ()) if "id" in call]


async def test_samples_streams_routes_and_repeated_requests_share_no_id_of_a_call(serve: Any) -> None:
    client = serve(lambda prompt: f"{CALL}\n{CALL}")
    ids = await ids_of(client, n=3)
    for more in ({"seed": 1}, {"seed": 1}, {"seed": 1, "n": 3}, {}, {}):
        ids += await ids_of(client, **more)
        ids += await ids_of(client, stream=True, **more)
    for _ in range(2):
        ids += await ids_of(client, input="Where is it?", tools=[{"type": "function", **FUNCTION}])
    assert len(ids) == 6 + 2 * (4 * 2 + 6) + 4
    assert len(set(ids)) == len(ids)


async def test_tenants_share_no_id_of_a_call(serve: Any, path: Path) -> None:
    keys = [add_key(path, tenant, tenant) for tenant in ("shop", "bank")]
    client = serve(lambda prompt: CALL, keys=KeyFile(path))
    ids = [one for key in keys for one in await ids_of(client, {"Authorization": f"Bearer {key}"})]
    assert len(set(ids)) == len(ids) == 2


REFUSED = [
    ({"temprature": 1}, "temprature", "known: "),
    ({"functions": []}, "functions", "write tools"),
    ({"tenant": "other"}, "tenant", "API key"),
    ({"n": 17}, "n", "between 1 and 16"),
    ({"n": 0}, "n", "between 1 and 16"),
    ({"temperature": "hot"}, "temperature", "number"),
    ({"temperature": -1}, "temperature", "temperature"),
    ({"messages": []}, "messages", "at least one"),
    ({"messages": [{"role": "robot", "content": "x"}]}, "messages[0].role", "one of"),
    ({"messages": [{"role": "user"}]}, "messages[0]", "content"),
    ({"messages": [{"role": "user", "content": "x" * 20_000}]}, "messages", "context"),
    ({"modalities": ["text", "audio"]}, "modalities", "text"),
    ({"stop": ["x"] * 17}, "stop", "at most 16"),
    *(({"logit_bias": {token: 1}}, "logit_bias", "token ids") for token in ("", "a", "1.5")),
    ({"logit_bias": dict.fromkeys(map(str, range(16_385)), 1)}, "logit_bias", "has 16,385 entries: at most 16,384"),
    ({"max_tokens": 3, "max_completion_tokens": 4}, "max_tokens", "differ"),
    ({"tool_choice": "required"}, "tool_choice", "tool"),
    ({"speculation": {"write_bak": False}}, "", "write_bak"),
    ({"chat_template_kwargs": {"messages": []}}, "chat_template_kwargs", "messages"),
    ({"response_format": {"type": "yaml"}}, "response_format", ""),
    ({"top_k": 1.5}, "top_k", ""),
    ({"stream_options": {"include_sources": 1}}, "stream_options", "valid boolean"),
    ({"stream_options": {"include_source": True}}, "stream_options", ""),
]


@pytest.mark.parametrize(("more", "param", "said"), REFUSED, ids=[f"{one[1]}-{i}" for i, one in enumerate(REFUSED)])
async def test_what_is_not_supported_is_refused_by_name(client: Client, more: Any, param: str, said: str) -> None:
    answer = await client.post(URL, json=ASKED | more)
    error = answer.json()["error"]
    assert (answer.status_code, error["type"]) == (400, "invalid_request_error"), error
    assert (error["param"] or "").startswith(param), error
    assert said in error["message"]


@pytest.mark.parametrize("place", ["file:///etc/passwd", "http://127.0.0.1:1/x", "/etc/passwd", "data:text/plain,x"])
@pytest.mark.parametrize("kind", ["image_url", "input_audio", "file"])
async def test_no_place_in_a_request_is_opened(client: Client, kind: str, place: str) -> None:
    """Only texts are read; a test may not open a socket, so one that did would fail."""
    part = {"type": kind, kind: {"url": place, "data": place, "format": "wav", "file_id": place}}
    answer = await client.post(URL, json=ASKED | {"messages": [{"role": "user", "content": [part]}]})
    assert (answer.status_code, answer.json()["error"]["type"]) == (400, "invalid_request_error")


async def test_habits_change_nothing(client: Client) -> None:
    for habit in ({"user": "u"}, {"store": True}, {"metadata": {"a": "b"}}, {"service_tier": "auto"}):
        assert (await client.post(URL, json=ASKED | habit)).json()["choices"][0]["message"]["content"] == "x"


@pytest.mark.parametrize("body", [b"", b"{", b"[]", b"\xff", b'{"a": NaN}', b"[" * 100_000, b'{"a":' * 3000])
async def test_bodies_that_are_none(client: Client, body: bytes) -> None:
    answer = await client.post(URL, content=body)
    assert (answer.status_code, answer.json()["error"]["type"]) == (400, "invalid_request_error")


@pytest.mark.parametrize(
    "pattern", [".*" * 300, "(a+)+$" * 50, "(a{1,1000}){1,1000}", "((((a{1,30}){1,30}){1,30}){1,30})"]
)
async def test_costly_patterns_are_answered_or_refused_at_once(serve: Any, pattern: str) -> None:
    """Llguidance bounds the work of every grammar; one that it gives up on is the caller's."""
    schema = {"type": "object", "properties": {"a": {"type": "string", "pattern": pattern}}, "required": ["a"]}
    wanted = {"type": "json_schema", "json_schema": {"name": "x", "strict": True, "schema": schema}}
    client = serve(lambda prompt: '{"a": "a"}', may_stray=True)
    answer = await client.post(URL, json=ASKED | {"max_tokens": 9, "response_format": wanted})
    if answer.status_code != 200:
        assert (answer.status_code, answer.json()["error"]["code"]) == (400, "unsupported_value"), answer.text


async def test_the_known_keys_are_listed_once(client: Client) -> None:
    for path in (URL, "/v1/completions", "/v1/responses"):
        known = (await client.post(path, json={"temprature": 1})).json()["error"]["message"].partition("known: ")[2]
        assert "temperature" in known.split(", ")
        assert len(known.split(", ")) == len(set(known.split(", ")))
