"""An answer that Ray's proxy leaves without an end gets one."""

from __future__ import annotations

import json
from typing import Any

import pytest

pytest.importorskip("precedent_ray.settings", reason="precedent-ray is not installed")
from starlette.types import Receive, Scope, Send

from precedent_ray.ingress import WholeAnswers, middlewares

START = {
    "type": "http.response.start",
    "status": 200,
    "headers": [(b"content-type", b"text/event-stream; charset=utf-8")],
}
JSON_START = {**START, "headers": [(b"content-type", b"application/json")]}
PART = {"type": "http.response.body", "body": b"data: 1\n\n", "more_body": True}
END = {"type": "http.response.body", "body": b"", "more_body": False}


async def answered(*sent: dict[str, Any], path: str = "/v1/completions", leaves: bool = False) -> list[dict[str, Any]]:
    """What a client gets of a proxy that sends this and returns."""
    got: list[Any] = []

    async def proxy(scope: Scope, receive: Receive, send: Send) -> None:
        for message in sent:
            await send(message)
        if leaves:
            await receive()

    async def receive() -> dict[str, Any]:
        return {"type": "http.disconnect"}

    async def send(message: Any) -> None:
        got.append(message)

    await WholeAnswers(proxy)({"type": "http", "path": path}, receive, send)
    return got


async def test_a_whole_answer_passes_as_it_is() -> None:
    for start in (START, JSON_START):
        assert await answered(start, PART, END) == [start, PART, END]


async def test_a_stream_that_was_cut_ends_in_an_error_event() -> None:
    *passed, last = await answered(START, PART)
    assert passed == [START, PART]
    assert not last["more_body"]
    event = last["body"].decode()
    assert event.startswith("data: ")
    assert event.endswith("\n\n")
    assert json.loads(event[6:])["error"]["code"] == "replica_lost"


async def test_an_answer_that_never_began_is_a_503_that_says_when_to_try_again() -> None:
    start, body = await answered()
    headers = dict(start["headers"])
    assert (start["status"], headers[b"retry-after"]) == (503, b"1")
    assert int(headers[b"content-length"]) == len(body["body"])
    assert json.loads(body["body"])["error"]["type"] == "server_error"


async def test_a_body_of_known_length_stays_cut() -> None:
    """What could be added would be read as its end."""
    assert await answered(JSON_START, PART) == [JSON_START, PART]


async def test_a_client_that_left_is_told_nothing() -> None:
    assert await answered(START, PART, leaves=True) == [START, PART]
    assert await answered(leaves=True) == []


async def test_paths_of_the_proxy_and_what_is_no_request_pass() -> None:
    assert await answered(path="/-/healthz") == []
    seen: list[str] = []

    async def proxy(scope: Scope, receive: Any, send: Any) -> None:
        seen.append(scope["type"])

    await WholeAnswers(proxy)({"type": "lifespan"}, proxy, proxy)  # type: ignore[arg-type]
    assert seen == ["lifespan"]
    assert [made.cls for made in middlewares()] == [WholeAnswers]
