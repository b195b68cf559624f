"""What `/v1/chat/completions` refuses, and how it says so."""

from __future__ import annotations

from typing import Any

import httpx
import pytest

Client = httpx.AsyncClient

URL = "/v1/chat/completions"
ASKED: dict[str, Any] = {"model": "scripted", "messages": [{"role": "user", "content": "Hello?"}], "temperature": 0}

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
    ({"modalities": ["text", "audio"]}, "modalities", "text"),
    ({"stop": ["x"] * 17}, "stop", "at most 16"),
    ({"logit_bias": {"a": 1}}, "logit_bias", "token ids"),
    ({"logit_bias": dict.fromkeys(map(str, range(16_385)), 1)}, "logit_bias", "has 16,385 entries: at most 16,384"),
    ({"max_tokens": 3, "max_completion_tokens": 4}, "max_tokens", "differ"),
    ({"tool_choice": "required"}, "tool_choice", "tool"),
    ({"speculation": {"write_bak": False}}, "", "write_bak"),
    ({"chat_template_kwargs": {"messages": []}}, "chat_template_kwargs", "messages"),
    ({"response_format": {"type": "yaml"}}, "response_format", ""),
    ({"top_k": 1.5}, "top_k", ""),
]


@pytest.mark.parametrize(("more", "param", "said"), REFUSED, ids=[f"{one[1]}-{i}" for i, one in enumerate(REFUSED)])
async def test_what_is_not_supported_is_refused_by_name(client: Client, more: Any, param: str, said: str) -> None:
    answer = await client.post(URL, json={**ASKED, **more})
    error = answer.json()["error"]
    assert answer.status_code == 400, error
    assert error["type"] == "invalid_request_error"
    assert (error["param"] or "").startswith(param), error
    assert said in error["message"]


@pytest.mark.parametrize("place", ["file:///etc/passwd", "http://127.0.0.1:1/x", "/etc/passwd", "data:text/plain,x"])
@pytest.mark.parametrize("kind", ["image_url", "input_audio", "file"])
async def test_no_place_in_a_request_is_opened(client: Client, kind: str, place: str) -> None:
    """Only texts are read; a test may not open a socket, so one that did would fail."""
    part = {"type": kind, kind: {"url": place, "data": place, "format": "wav", "file_id": place}}
    answer = await client.post(URL, json={**ASKED, "messages": [{"role": "user", "content": [part]}]})
    assert (answer.status_code, answer.json()["error"]["type"]) == (400, "invalid_request_error")


@pytest.mark.parametrize("habit", ["user", "store", "metadata", "service_tier"])
async def test_habits_change_nothing(client: Client, habit: str) -> None:
    value = {"user": "u", "store": True, "metadata": {"a": "b"}, "service_tier": "auto"}[habit]
    assert (await client.post(URL, json={**ASKED, habit: value})).json()["choices"][0]["message"]["content"] == "x"


async def test_an_unknown_model_is_a_404(client: Client) -> None:
    answer = await client.post(URL, json=ASKED | {"model": "other"})
    assert (answer.status_code, answer.json()["error"]["code"]) == (404, "model_not_found")


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
    answer = await client.post(URL, json={**ASKED, "max_tokens": 9, "response_format": wanted})
    if answer.status_code != 200:
        assert (answer.status_code, answer.json()["error"]["code"]) == (400, "unsupported_value"), answer.text


async def test_the_known_keys_are_listed_once(client: Client) -> None:
    for path in ("/v1/chat/completions", "/v1/completions", "/v1/responses"):
        answer = await client.post(path, json={"temprature": 1})
        known = answer.json()["error"]["message"].partition("known: ")[2].split(", ")
        assert "temperature" in known
        assert len(known) == len(set(known))
