"""Hostile requests to a real server on a real socket: nonsense bodies, broken HTTP, slow and vanishing clients.

A well-meant request comes after every few hostile ones and must be answered as ever. Whatever comes: no 500, no hang,
and at the end no place taken, no request running, no thread, open file or memory left behind. Ten thousand of them come
in `make test-stress`.
"""

from __future__ import annotations

import http.client
import json
import os
import random
import re
import socket
import time
from collections import Counter
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest

from precedent_server.serving import PREPARING_THREADS

PATIENCE = 60
"""Seconds for one request, after which it counts as a hang."""

LIMITS = {"upload_seconds": 5.0, "request_seconds": 20.0, "prepare_seconds": 10.0}
ROUTES = (
    *("/v1/chat/completions", "/v1/completions", "/v1/responses", "/v1/embeddings"),
    *("/api/chat", "/api/generate", "/api/embed", "/api/embeddings", "/tokenize", "/detokenize"),
    *("/v1/messages", "/v1/messages/count_tokens"),
)
GOOD: dict[str, dict[str, Any]] = {
    ROUTES[0]: {"messages": [{"role": "user", "content": "Where?"}], "temperature": 0, "max_tokens": 40},
    ROUTES[1]: {"prompt": "Where?", "temperature": 0, "max_tokens": 40},
    ROUTES[2]: {"input": "Where?", "temperature": 0, "max_output_tokens": 40},
    ROUTES[3]: {"input": "Where?"},
    ROUTES[4]: {"messages": [{"role": "user", "content": "Where?"}], "options": {"temperature": 0, "num_predict": 40}},
    ROUTES[5]: {"prompt": "Where?", "options": {"temperature": 0, "num_predict": 40}},
    ROUTES[6]: {"input": "Where?"},
    ROUTES[7]: {"prompt": "Where?"},
    ROUTES[8]: {"prompt": "Where?", "return_token_strs": True},
    ROUTES[9]: {"tokens": [1, 2, 3]},
    ROUTES[10]: {"messages": [{"role": "user", "content": "Where?"}], "temperature": 0, "max_tokens": 40},
    ROUTES[11]: {"messages": [{"role": "user", "content": "Where?"}]},
}
STRANGE: tuple[Any, ...] = (
    *(None, True, -1, 0, 1e308, 10**30, "", "\ud800", "\x00", "x" * 5000, [], {}, [[]], [None], {"": {}}, [1e400]),
    *({"type": "function"}, [{"role": "user"}], [{"role": "tool", "content": "x"}], {"type": "json_schema"}),
    {"type": "json_schema", "json_schema": {"name": "x", "schema": {"pattern": "(a+)+$" * 50, "type": "string"}}},
    {"type": "json_schema", "json_schema": {"name": "x", "schema": {"pattern": ".*" * 300, "type": "string"}}},
    {"type": "json_schema", "json_schema": {"name": "x", "strict": True, "schema": {"$ref": "file:///etc/passwd"}}},
    [{"type": "function", "function": {"name": "x", "parameters": {"type": "array", "minItems": 10**9}}}],
    *([{"role": "user", "content": [block]}] for block in ({"type": []}, {"type": "tool_result", "content": [{}]})),
    *([{"name": "x", "input_schema": schema}] for schema in ({}, {"$ref": "file:///etc/passwd"}, {"type": []})),
)


def strange_value(rng: random.Random, body: dict[str, Any]) -> bytes:
    """A value of another kind somewhere in a good body, or a key that is not OpenAI's."""
    names = (
        *("model", "stream", "tools", "response_format", "stop", "n", "seed", "logit_bias", "speculation", "user"),
        *("echo", "logprobs", "max_tokens", "previous_response_id", "store", "messages", "tokens"),
        *("format", "options", "keep_alive", "think", "raw", "images", "truncate"),
        *("system", "thinking", "tool_choice", "stop_sequences", "output_config", "mcp_servers"),
    )
    changed = json.loads(json.dumps(body))
    for _ in range(rng.choice((1, 1, 2, 5))):
        changed[rng.choice([*changed, *names, "x-" + str(rng.random())])] = rng.choice(STRANGE)
    return json.dumps(changed).encode()


def damaged_bytes(rng: random.Random, body: dict[str, Any]) -> bytes:
    """A good body with bytes cut off, doubled or changed."""
    raw = bytearray(json.dumps(body).encode())
    for _ in range(rng.randrange(1, 6)):
        at = rng.randrange(len(raw))
        raw[at : at + rng.randrange(4)] = rng.randbytes(rng.randrange(4))
        raw = raw or bytearray(b"x")
    return bytes(raw)


def long_body(rng: random.Random, body: dict[str, Any]) -> bytes:
    """Ten megabytes."""
    return json.dumps({**body, "user": "x" * 10_000_000}).encode()


def long_prompt(rng: random.Random, body: dict[str, Any]) -> bytes:
    """A million tokens, as a text."""
    text = "word " * 1_000_000
    return json.dumps(json.loads(json.dumps(body).replace("Where?", text))).encode()


def deep_body(rng: random.Random, body: dict[str, Any]) -> bytes:
    """Lists in lists."""
    depth = rng.choice((70, 1000, 100_000))
    return b'{"model": ' + b"[" * depth + b"]" * depth + b"}"


BODIES: dict[Callable[[random.Random, dict[str, Any]], bytes], float] = {
    strange_value: 60, damaged_bytes: 25, deep_body: 2, long_body: 0.5, long_prompt: 0.5,
}  # fmt: skip


def posted(port: int, route: str, raw: bytes, path: str | None = None) -> int:
    """The status of a request; its answer is read to the end."""
    with closing(http.client.HTTPConnection("127.0.0.1", port, timeout=PATIENCE)) as connection:
        try:
            connection.request("POST", path or route, raw, {"Content-Type": "application/json"})
        except (BrokenPipeError, ConnectionResetError):  # the server has refused a body before its end
            return 413
        answer = connection.getresponse()
        answer.read()
        return answer.status


def hostile_body(port: int, rng: random.Random, route: str) -> str:
    (make,) = rng.choices(list(BODIES), list(BODIES.values()))
    return f"{make.__name__} {posted(port, route, make(rng, {'model': 'scripted', **GOOD[route]}))}"


def broken_http(port: int, rng: random.Random, route: str) -> str:
    """Bytes that are no HTTP, a body shorter than said, headers without an end."""
    raw = rng.choice((
        rng.randbytes(200),
        f"POST {route} HTTP/1.1\r\nHost: 127.0.0.1\r\nContent-Length: 1000\r\n\r\n{{".encode(),
        f"POST {route} HTTP/1.1\r\nHost: 127.0.0.1\r\nContent-Length: -1\r\n\r\n".encode(),
        f"POST {route} HTTP/1.1\r\nHost: 127.0.0.1\r\nTransfer-Encoding: chunked\r\n\r\nZZ\r\n".encode(),
        b"GET / HTTP/1.1\r\nX: " + b"x" * 100_000,
        f"GET {'/..' * 50}/etc/passwd HTTP/1.1\r\nHost: 127.0.0.1\r\n\r\n".encode(),
        b"GET /v1/models HTTP/1.1\r\nHost: evil.example\r\n\r\n",
    ))  # fmt: skip
    with socket.create_connection(("127.0.0.1", port), timeout=PATIENCE) as connection:
        connection.sendall(raw)
        if rng.random() < 0.5:
            return "broken, and gone"
        connection.shutdown(socket.SHUT_WR)
        said = connection.recv(64)
        assert b" 500 " not in said, said
    return f"broken {said[9:12].decode() or 'closed'}"


def slow_or_gone(port: int, rng: random.Random, route: str) -> str:
    """A client that sends its body byte by byte, reads nothing, or leaves in the middle of a stream."""
    streams = not any(word in route for word in ("embed", "token"))
    raw = json.dumps({"model": "scripted", **GOOD[route], "stream": streams}).encode()
    head = f"POST {route} HTTP/1.1\r\nHost: 127.0.0.1\r\nContent-Length: {len(raw)}\r\n\r\n".encode()
    with socket.create_connection(("127.0.0.1", port), timeout=PATIENCE) as connection:
        connection.sendall(head + raw[:20])
        if rng.random() < 0.3:
            time.sleep(rng.random() * 1.5)
            return "slow upload"
        connection.sendall(raw[20:])
        if rng.random() < 0.5:
            connection.recv(rng.randrange(1, 300))
        time.sleep(rng.random() * 0.2)
    return "left"


def one(port: int, rng: random.Random) -> str:
    """One hostile request and how it ended."""
    kind = rng.choices((hostile_body, broken_http, slow_or_gone), (88, 8, 4))[0]
    ended = kind(port, rng, rng.choice(ROUTES))
    assert not ended.endswith((" 500", " 502")), ended
    if rng.random() < 0.05:
        route = rng.choice(ROUTES)
        status = posted(port, route, json.dumps({"model": "scripted", **GOOD[route]}).encode())
        assert status in (200, 429, 503), (route, status)
    return ended


def at_rest(process: Any, port: int) -> tuple[int, int]:
    """Waits until nothing runs; returns how many threads and open files the server has."""
    deadline = time.monotonic() + PATIENCE
    with closing(http.client.HTTPConnection("127.0.0.1", port, timeout=PATIENCE)) as connection:
        running = True
        while running:
            assert time.monotonic() < deadline, "a request is never given up"
            time.sleep(0.05)
            connection.request("GET", "/metrics")
            told = connection.getresponse().read().decode()
            running = any(float(number) for number in re.findall(r"num_requests_(?:running|waiting){.*} (.+)", told))
    place = Path(f"/proc/{process.pid}")
    return len(list((place / "task").iterdir())), len(list((place / "fd").iterdir()))


def resident_mebibytes(process: Any) -> float:
    pages = Path(f"/proc/{process.pid}/statm").read_text(encoding="ascii").split()[1]
    return int(pages) * os.sysconf("SC_PAGE_SIZE") / 2**20


@pytest.mark.parametrize("number", [60, pytest.param(10_000, marks=pytest.mark.stress)])
def test_a_server_under_fire(start_process: Any, number: int) -> None:
    ended, memory = Counter[str](), list[float]()
    with start_process(limits=LIMITS) as (process, port), ThreadPoolExecutor(8) as pool:
        before = at_rest(process, port)
        for turn in range(10):
            made = [pool.submit(one, port, random.Random(f"1 {place}")) for place in range(turn, number, 10)]
            ended.update(each.result() for each in made)
            now = at_rest(process, port)
            before = now if turn == 0 else before  # the first requests open what is opened once
            memory.append(round(resident_mebibytes(process), 1))
        deadline = time.monotonic() + PATIENCE
        while (after := at_rest(process, port))[1] > before[1] + 2 and time.monotonic() < deadline:
            time.sleep(0.5)  # the last connections are being closed
        assert after[1] <= before[1] + 2, (before, after)
        assert after[0] <= before[0] + PREPARING_THREADS, (before, after)  # each starts when work first waits for it
    print(json.dumps({"ended": dict(sorted(ended.items())), "mebibytes": memory}, indent=1))
    assert ended.total() == number
    if number > 1000:  # a few first long bodies raise the level of a short run
        assert memory[-1] <= memory[4] * 1.05
