"""A client that goes away ends its request; a stream that takes too long ends with an error; nothing keeps a place."""

from __future__ import annotations

import asyncio
import json
from typing import Any

import pytest

from precedent_server.settings import ServerLimits

LONG = " ".join(f"word{number}" for number in range(3000))
TEXT: dict[str, Any] = {"model": "scripted", "temperature": 0, "max_tokens": 12_000}
ASKED: dict[str, Any] = {**TEXT, "messages": [{"role": "user", "content": "Hello?"}]}


class Visitor:
    """A client at the other end of ASGI, which leaves after some parts of the answer; 0: before there is any."""

    def __init__(self, body: Any, leaves_after: int | None, *, unfinished: bool = False) -> None:
        self._unsent: list[Any] = [{"type": "http.request", "body": json.dumps(body).encode(), "more_body": unfinished}]
        self._left, self._leaves_after = asyncio.Event(), leaves_after
        self.parts: list[bytes] = []
        if leaves_after == 0:
            self._left.set()

    async def receive(self) -> Any:
        if self._unsent:
            return self._unsent.pop()
        await self._left.wait()
        return {"type": "http.disconnect"}

    async def send(self, message: Any) -> None:
        if message["type"] == "http.response.body":
            self.parts.append(message["body"])
            if self._leaves_after is not None and len(self.parts) >= self._leaves_after:
                self._left.set()


async def visited(client: Any, path: str, body: Any, leaves_after: int | None, **how: bool) -> Visitor:
    visitor = Visitor(body, leaves_after, **how)
    scope = {
        "type": "http", "asgi": {"version": "3.0"}, "http_version": "1.1", "method": "POST", "path": path,
        "raw_path": path.encode(), "query_string": b"", "root_path": "", "scheme": "http",
        "headers": [(b"host", b"127.0.0.1")], "client": ("127.0.0.1", 1), "server": ("127.0.0.1", 8000),
    }  # fmt: skip
    await client.app(scope, visitor.receive, visitor.send)
    return visitor


async def ended(client: Any) -> Any:
    """The engine's metrics once nothing runs."""
    engine = client.serving.models["scripted"].engine
    while (found := engine.metrics()).num_requests_running + found.num_requests_waiting:
        await asyncio.sleep(0.01)
    return found


@pytest.mark.parametrize("path", ["/v1/chat/completions", "/v1/completions"])
@pytest.mark.parametrize(("stream", "leaves_after"), [(False, 0), (True, 0), (True, 3)])
async def test_a_client_that_leaves_ends_its_request(serve: Any, path: str, stream: bool, leaves_after: int) -> None:
    client = serve([LONG, "again"])
    body = ASKED if path.endswith("chat/completions") else {**TEXT, "prompt": "Hello?"}
    await visited(client, path, {**body, "stream": stream}, leaves_after)
    found = await ended(client)
    assert found.num_requests_finished == 0
    assert found.generation_tokens < len(LONG) // 3
    assert client.serving.places.total == 0
    assert (await client.post(path, json={**body, "max_tokens": 20})).status_code == 200


async def test_one_of_several_answers_takes_all_with_it(serve: Any) -> None:
    client = serve([LONG, LONG, LONG])
    await visited(client, "/v1/chat/completions", {**ASKED, "stream": True, "n": 3}, 5)
    found = await ended(client)
    assert (found.num_requests_finished, found.num_requests_cancelled) == (0, 3)
    assert client.serving.places.total == 0


@pytest.mark.parametrize("stream", [False, True])
async def test_an_answer_that_takes_too_long(serve: Any, stream: bool) -> None:
    client = serve([LONG], limits=ServerLimits(request_seconds=0.05))
    visitor = await visited(client, "/v1/chat/completions", {**ASKED, "stream": stream}, None)
    last = [part for part in visitor.parts if part][-1].decode().removeprefix("data: ")
    assert json.loads(last)["error"]["code"] == "timeout"
    assert (await ended(client)).num_requests_finished == 0
    assert client.serving.places.total == 0


async def test_a_body_that_never_ends(serve: Any) -> None:
    client = serve(["x"], limits=ServerLimits(upload_seconds=0.05))
    visitor = await visited(client, "/v1/chat/completions", ASKED, None, unfinished=True)
    assert "the request took longer than 0.05 seconds" in json.loads(b"".join(visitor.parts))["error"]["message"]


async def test_a_server_that_stops_takes_no_more(serve: Any) -> None:
    client = serve(["x"])
    client.serving.closed = True
    answer = await client.post("/v1/chat/completions", json=ASKED)
    assert (answer.status_code, "retry-after" in answer.headers) == (503, True)
    assert (await client.get("/health")).status_code == 503


async def test_more_answers_than_ever_fit_are_no_matter_of_waiting(serve: Any) -> None:
    client = serve(["x"], limits=ServerLimits(max_queued_per_key=2))
    answer = await client.post("/v1/chat/completions", json={**ASKED, "n": 3})
    assert (answer.status_code, answer.json()["error"]["param"]) == (400, "n")
