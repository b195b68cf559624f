"""What holds for all routes: health, request ids, bounds, keys."""

from __future__ import annotations

import asyncio
import logging
import threading
from pathlib import Path
from typing import Any

import httpx
import pytest

from precedent_server.keys import KeyFile, add_key
from precedent_server.settings import ServerLimits

Client = httpx.AsyncClient
CHAT = "/v1/chat/completions"
ASKED: dict[str, Any] = {"model": "scripted", "messages": [{"role": "user", "content": "Hello?"}], "temperature": 0}


async def test_health_and_metrics(client: Client) -> None:
    assert (await client.get("/health")).json() == {"status": "ok"}
    metrics = await client.get("/metrics")
    assert metrics.headers["content-type"].startswith("text/plain; version=0.0.4")
    assert 'vllm:request_success_total{model_name="scripted",engine="0"}' in metrics.text


async def test_health_says_degraded_and_names_what_is_switched_off(serve: Any) -> None:
    client = serve(lambda prompt: "x", on_result=fails)
    for _ in range(3):
        assert (await client.post(CHAT, json=ASKED)).status_code == 200
    answer = await client.get("/health")
    assert answer.status_code == 200
    assert answer.json() == {"status": "degraded", "degraded": {"scripted": ["the observer of results"]}}
    metrics = (await client.get("/metrics")).text
    labels = '{model_name="scripted",engine="0",aid="the observer of results"}'
    assert f"precedent:degraded{labels} 1" in metrics
    assert f"precedent:faults_total{labels} 3" in metrics


def fails(prompt_ids: Any, result: Any) -> None:
    raise RuntimeError("injected")


async def test_health_fails_while_requests_fail_and_recovers(serve: Any) -> None:
    client = serve(lambda prompt: "x")
    target = client.serving.models["scripted"].engine.target
    target.score = fails
    for _ in range(3):
        assert (await client.post(CHAT, json=ASKED)).status_code == 500
    answer = await client.get("/health")
    assert (answer.status_code, answer.json()["error"]["type"]) == (503, "server_error")
    assert answer.json()["error"]["message"] == (
        "scripted: 3 of the 3 requests of the last minute ended in internal errors"
    )
    del target.score
    for _ in range(13):
        assert (await client.post(CHAT, json=ASKED)).status_code == 200
    assert (await client.get("/health")).json() == {"status": "ok"}


async def test_health_fails_while_an_engine_does_not_advance(serve: Any) -> None:
    client = serve(lambda prompt: "x", limits=ServerLimits(stalled_seconds=0.05))
    target = client.serving.models["scripted"].engine.target
    score, in_a_step, go_on = target.score, threading.Event(), threading.Event()

    def held_up(*args: Any) -> Any:
        in_a_step.set()
        assert go_on.wait(60.0)
        return score(*args)

    target.score = held_up
    running = asyncio.create_task(client.post(CHAT, json=ASKED))
    while not in_a_step.is_set():
        await asyncio.sleep(0.01)
    await asyncio.sleep(0.1)
    answer = await client.get("/health")
    assert answer.status_code == 503
    assert "has not advanced for" in answer.json()["error"]["message"]
    go_on.set()
    assert (await running).status_code == 200
    async with asyncio.timeout(60):
        while (await client.get("/health")).json() != {"status": "ok"}:  # a busy machine may delay the engine's thread
            await asyncio.sleep(0.01)


@pytest.mark.parametrize(("path", "asked"), [(CHAT, "messages"), ("/v1/completions", "prompt")])
async def test_a_hundred_thousand_tokens(client: Client, path: str, asked: str) -> None:
    text = "word " * 150_000
    body = {"messages": [{"role": "user", "content": text}], "prompt": text}
    answer = await client.post(path, json={"model": "scripted", asked: body[asked]})
    assert (answer.status_code, answer.json()["error"]["code"]) == (400, "context_length_exceeded")
    assert "more than" in answer.json()["error"]["message"], "it was not encoded to its end"


async def test_a_full_queue(serve: Any) -> None:
    client = serve(lambda prompt: "x", limits=ServerLimits(max_queued_per_key=2))
    with client.serving.places.held("local", 1):
        answer = await client.post(CHAT, json=ASKED | {"n": 2})
    assert (answer.status_code, answer.headers["retry-after"]) == (429, "1")
    assert (await client.post(CHAT, json=ASKED | {"n": 2})).status_code == 200, "no place is lost"


async def test_request_ids_and_the_log(client: Client, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO, "precedent.access"):
        mine = await client.post(CHAT, json=ASKED, headers={"X-Request-ID": "mine-1"})
        other = await client.post(CHAT, json=ASKED, headers={"X-Request-ID": "a b\tc" * 50})
    assert mine.headers["x-request-id"] == "mine-1"
    assert other.headers["x-request-id"].startswith("req-")
    lines = [record.request for record in caplog.records if record.name == "precedent.access"]
    assert [line["status"] for line in lines] == [200, 200]
    assert "Hello" not in str(lines)


async def test_a_method_that_is_none_is_told_all_that_are(client: Client) -> None:
    answer = await client.put("/v1/responses/x")
    assert (answer.status_code, answer.headers["allow"]) == (405, "DELETE, GET")


async def test_keys_say_who_asks(serve: Any, path: Path) -> None:
    """Tenants by key: what one stored drafts for it alone; no key, a wrong one and another scheme are refused."""
    keys = {name: add_key(path, name, tenant=name) for name in ("desk", "shop")}
    client = serve(lambda prompt: "The order was sent on Monday.", keys=KeyFile(path))
    for header in (None, "Bearer pk-wrong", "Bearer", f"Basic {keys['desk']}"):
        answer = await client.get("/v1/models", headers={"Authorization": header} if header else {})
        assert (answer.status_code, answer.json()["error"]["code"]) == (401, "invalid_api_key")
    assert (await client.get("/metrics")).status_code == 401
    assert (await client.get("/health")).status_code == 200

    async def recalled(name: str) -> int:
        answer = await client.post(CHAT, json=ASKED, headers={"Authorization": f"Bearer {keys[name]}"})
        return int(answer.json()["speculation"]["accepted_by_source"].get("recall", 0))

    assert await recalled("desk") == 0
    assert await recalled("shop") == 0
    assert await recalled("desk") > 0
