"""Everything that a request brings has a bound: ten megabytes of it are refused by name while other streams go on."""

from __future__ import annotations

import asyncio
import json
import threading
from contextlib import closing
from functools import partial
from typing import Any

import pytest
from helpers.event_loops import time_passes

from precedent_server.errors import ApiError
from precedent_server.serving import PREPARING_THREADS, Quota, Serving
from precedent_server.settings import ServerLimits

CHAT = "/v1/chat/completions"
LONG = " ".join(f"word{number}" for number in range(20))
TEXT = "word " * 2_000_000
"""Ten megabytes."""

MANY = [f"word {number}" for number in range(200_000)]
TOOL = {"type": "function", "function": {"name": "look_up", "description": TEXT, "parameters": {"type": "object"}}}
SCHEMA = {"type": "object", "properties": {name: {"type": "string"} for name in MANY[:100_000]}}

FIELDS: list[tuple[str, Any]] = [
    ("model", TEXT),
    ("messages", [{"role": "user", "content": TEXT}]),
    ("messages", [{"role": "user", "content": "x"}] * 20_000),
    ("tools", [{**TOOL, "function": {"name": "look_up", "parameters": SCHEMA}}]),
    ("tools", [{"type": "function", "function": {"name": f"f{number}"}} for number in range(3000)]),
    ("response_format", {"type": "json_schema", "json_schema": {"name": "x", "schema": {"pattern": TEXT}}}),
    ("templates", ["x"] * 1000 + [1] * 100_000),
    ("templates", ["{a} " + TEXT]),
    ("prediction", {"type": "content", "content": TEXT}),
    ("stop", [1] * 200_000),
    ("logit_bias", {str(number): "x" for number in range(200_000)}),
    ("stop_token_ids", list(range(200_000))),
    ("metadata", {"note": TEXT}),
    ("workflow_step", TEXT),
    ("chat_template_kwargs", {"note": TEXT}),
    ("n", 10**4000),
    ("seed", TEXT),
    ("reasoning_effort", TEXT),
    ("tool_choice", TEXT),
    ("speculation", {"drafters": MANY}),
    ("stream_options", dict.fromkeys(MANY, 1)),
]
CASES = [pytest.param(*one, id=f"{one[0]}{number}") for number, one in enumerate(FIELDS)]


ROOMY = ServerLimits(max_body_bytes=2**26, max_upload_bytes_per_key=2**27)


def asked(**more: Any) -> dict[str, Any]:
    messages = [{"role": "user", "content": "Hello?"}]
    return {"model": "scripted", "messages": messages, "temperature": 0, "max_tokens": 4, **more}


@pytest.mark.parametrize(("name", "value"), CASES)
@pytest.mark.sampled(5)
async def test_ten_megabytes_of_a_field(serve: Any, name: str, value: Any) -> None:
    """Refused by its name, in a short answer, while a stream that began before goes on to its end."""
    client = serve(lambda prompt: LONG, limits=ROOMY, may_stray=True)
    stream = asyncio.ensure_future(client.post(CHAT, json=asked(stream=True, max_tokens=12_000)))
    while client.serving.models["scripted"].engine.metrics().num_requests_running == 0:
        await asyncio.sleep(0.001)
    answer = await client.post(CHAT, content=json.dumps(asked(**{name: value})))
    error = answer.json()["error"]
    assert answer.status_code == (404 if name == "model" else 400), answer.text[:500]
    assert (error["param"] or "speculation").partition("[")[0] == name, answer.text[:500]
    assert len(answer.content) < 3000
    told = (await stream).text
    assert told.endswith("data: [DONE]\n\n")
    assert '"finish_reason":"stop"' in told


WIDE = {"type": "object", "properties": {name: {"type": "string"} for name in MANY[:6000]}}


@pytest.mark.parametrize("strict", [True, False])
async def test_a_schema_that_is_too_wide_makes_nobody_wait(serve: Any, strict: bool) -> None:
    """A strict one is refused by its name; of another one, any object is asked for. Neither is compiled."""
    client = serve(lambda prompt: '{"word 1": "x"}')
    form = {"type": "json_schema", "json_schema": {"name": "x", "schema": WIDE, "strict": strict}}
    answer = await client.post(CHAT, json=asked(response_format=form, max_tokens=40))
    if strict:
        assert answer.status_code == 400
        told = answer.json()["error"]["message"]
        assert "the schema of response_format cannot be enforced in full (too many optional properties" in told
    else:
        assert answer.json()["choices"][0]["message"]["content"] == '{"word 1": "x"}'


OLLAMA_FIELDS: list[tuple[str, Any]] = [
    ("model", TEXT),
    ("messages", [{"role": "user", "content": TEXT}]),
    ("messages", [{"role": "user", "content": "x"}] * 20_000),
    ("messages", [{"role": "assistant", "tool_calls": [{"function": {"name": "x", "arguments": {"x": TEXT}}}]}]),
    ("tools", [{"function": {"name": "look_up", "parameters": SCHEMA}}]),
    ("format", SCHEMA),
    ("options", dict.fromkeys(MANY, 1)),
    ("options", {"stop": MANY}),
    ("options", {"seed": TEXT}),
    ("keep_alive", "1h" * 1_000_000),
    ("think", TEXT),
]


@pytest.mark.parametrize(("name", "value"), OLLAMA_FIELDS)
@pytest.mark.sampled(2)
async def test_ten_megabytes_of_a_field_of_ollama(serve: Any, name: str, value: Any) -> None:
    client = serve(lambda prompt: "x", limits=ROOMY, may_stray=True)
    body = {"model": "scripted", "messages": [{"role": "user", "content": "Hello?"}], name: value}
    answer = await client.post("/api/chat", content=json.dumps(body))
    assert answer.status_code == (404 if name == "model" else 400), answer.text[:500]
    assert list(answer.json()) == ["error"]
    assert len(answer.content) < 3000


@pytest.mark.parametrize("path", [CHAT, "/v1/completions", "/v1/responses", "/v1/embeddings", "/v1/messages"])
@pytest.mark.parametrize(
    ("raw", "complaint"),
    [
        (b'{"x": [' + b",".join([b"[]"] * 2_500_000) + b"]}", "more than 262,144 values"),
        (b'{"x": [' + b",".join([b'"a,[{"'] * 400_000) + b"]}", "more than 262,144 values"),
        (b"[" * 8_000_000, "more than 262,144 values"),
        (b'{"' + b"x" * 8_000_000 + b'": 1}', "is not supported"),
        (json.dumps({"x": ',"\\' * 1_600_000}).encode(), "'x' is not supported"),
    ],
    ids=["lists", "texts", "depth", "key", "separators in a text"],
)
@pytest.mark.sampled(3)
async def test_eight_megabytes_of_another_kind(serve: Any, path: str, raw: bytes, complaint: str) -> None:
    client = serve(lambda prompt: LONG, limits=ROOMY, may_stray=True)
    answer = await client.post(path, content=raw)
    assert answer.status_code == 400
    assert complaint in answer.json()["error"]["message"]
    assert len(answer.content) < 3000


@pytest.mark.parametrize("declared", [True, False])
@pytest.mark.parametrize("path", [CHAT, "/v1/completions", "/v1/responses", "/api/chat"])
async def test_a_body_that_no_context_can_use_is_refused_before_it_is_parsed(
    serve: Any, path: str, declared: bool
) -> None:
    """That bounds how long a body can make other streams pause: it is not read beyond what the context can use."""
    client = serve(lambda prompt: LONG, may_stray=True)
    most, sent = client.serving.most_body_bytes, 0
    assert most == 32 * client.serving.models["scripted"].engine.context_length + 3 * 256 * 1024

    async def body() -> Any:
        nonlocal sent
        while sent < 10_000_000:
            yield b" " * 65_536
            sent += 65_536

    headers = {"Content-Length": "10000000"} if declared else {}
    answer = await client.post(path, content=body(), headers=headers)
    assert answer.status_code == 413
    assert f"longer than {most:,} bytes" in answer.text
    assert sent <= most


async def test_the_longest_body_is_answered(serve: Any) -> None:
    client = serve(lambda prompt: "x", limits=ServerLimits(prepare_seconds=600), may_stray=True)
    raw = json.dumps(asked()).encode()
    longest = raw + b" " * (client.serving.most_body_bytes - len(raw))
    assert (await client.post(CHAT, content=longest)).status_code == 200
    assert (await client.post(CHAT, content=longest + b" ")).status_code == 413
    texts = ["word " * 6000] * (client.serving.most_body_bytes // 30_000 + 1)  # texts to embed need no context
    answer = await client.post("/v1/embeddings", json={"model": "scripted", "input": texts})
    assert answer.status_code == 200, answer.text[:500]


def test_what_is_held_is_bounded_per_key_and_in_all() -> None:
    quota = Quota("bytes", most=100, most_per_key=60, retry_seconds=5)
    with quota.held("ada", 50), quota.held("ben") as ben:
        with pytest.raises(ApiError, match="this key has too many bytes") as refused, quota.held("ada", 11):
            pass
        assert (refused.value.status, refused.value.headers) == (429, {"Retry-After": "5"})
        ben(50)
        with quota.held("cyd") as cyd, pytest.raises(ApiError, match="there are too many bytes"):
            cyd(1)
        assert quota.total == 100
    assert quota.total == 0


async def test_a_body_counts_until_it_is_read(serve: Any) -> None:
    """While one body has not come to its end there is no room for another; afterwards there is."""
    client = serve(["x", "x"], limits=ServerLimits(max_upload_bytes=600), may_stray=True)
    raw = json.dumps(asked()).encode()
    arrived, go_on = asyncio.Event(), asyncio.Event()

    async def body() -> Any:
        yield b" " * 450
        arrived.set()
        await go_on.wait()
        yield raw

    first = asyncio.ensure_future(client.post(CHAT, content=body()))
    async with asyncio.timeout(60):
        while client.serving.uploads.total < 450:
            await asyncio.sleep(0.001)
    assert (await client.post(CHAT, content=b" " * 200 + raw)).status_code == 429
    go_on.set()
    assert (await first).status_code == 200
    assert client.serving.uploads.total == 0
    assert (await client.post(CHAT, content=raw)).status_code == 200


async def test_who_is_too_slow_and_who_only_waited() -> None:
    enough = threading.Event()
    begun = threading.Barrier(PREPARING_THREADS, partial(time_passes, asyncio.get_running_loop()))

    def slow() -> None:
        begun.wait(60.0)
        enough.wait(60.0)

    with closing(Serving({}, ServerLimits(prepare_seconds=100.0))) as serving:
        jobs = [serving.prepared(slow) for _ in range(PREPARING_THREADS + 1)]
        errors = await asyncio.gather(*jobs, return_exceptions=True)
        begun.abort()
        enough.set()
    assert [error.status for error in errors if isinstance(error, ApiError)] == [400] * PREPARING_THREADS + [503]


async def test_a_result_that_nobody_waits_for_is_disposed_of() -> None:
    enough, disposed, loop = threading.Event(), asyncio.Event(), asyncio.get_running_loop()

    def slow() -> bool:
        time_passes(loop)
        return enough.wait(60.0)

    with closing(Serving({}, ServerLimits(prepare_seconds=100.0))) as serving:
        with pytest.raises(ApiError, match="longer than"):
            await serving.prepared(slow, lambda result: disposed.set())
        enough.set()
        await disposed.wait()


def test_a_long_context_may_have_longer_bodies_up_to_a_bound() -> None:
    assert ServerLimits().most_body_bytes(32_768) == 32 * 32_768 + 3 * 256 * 1024
    assert ServerLimits().most_body_bytes(10**7) == 8 * 2**20
