"""Hostile requests to a real server on a real socket: nonsense bodies, broken HTTP, slow and vanishing clients.

    python plugins/precedent-server/tests/hostile_requests.py REQUESTS [SEED]

A well-meant request comes after every few hostile ones and must be answered as ever. Whatever comes: no 500, no hang,
and at the end no place taken, no request running, no thread, open file or memory left behind. Prints counts as JSON;
whatever fails ends it with a traceback. Run by `test_hostile_requests.py`.
"""

from __future__ import annotations

import gc
import http.client
import json
import os
import random
import socket
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, closing, contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import uvicorn

from precedent.cache import SpeculationCache
from precedent_server.running import uvicorn_config
from precedent_server.serving import PREPARING_THREADS, Served, Serving
from precedent_server.settings import ServerLimits
from precedent_testing.embedders import HashEmbedder
from precedent_testing.scripted_model import scripted_model_engine

ANSWER = "Order 1042 was sent on Monday."
PREPARE, CLIENT = "precedent-prepare", "hostile-client"
"""How the names of threads begin, of those that prepare requests and of our own."""

PATIENCE = 60
"""Seconds for one request, after which it counts as a hang."""
LIMITS = ServerLimits(upload_seconds=5.0, request_seconds=20.0, prepare_seconds=10.0)
ROUTES = ("/v1/chat/completions", "/v1/completions", "/v1/responses", "/v1/embeddings")
GOOD: dict[str, dict[str, Any]] = {
    ROUTES[0]: {"messages": [{"role": "user", "content": "Where?"}], "temperature": 0, "max_tokens": 40},
    ROUTES[1]: {"prompt": "Where?", "temperature": 0, "max_tokens": 40},
    ROUTES[2]: {"input": "Where?", "temperature": 0, "max_output_tokens": 40},
    ROUTES[3]: {"input": "Where?"},
}
STRANGE: tuple[Any, ...] = (
    *(None, True, -1, 0, 1e308, 10**30, "", "\ud800", "\x00", "x" * 5000, [], {}, [[]], [None], {"": {}}, [1e400]),
    *({"type": "function"}, [{"role": "user"}], [{"role": "tool", "content": "x"}], {"type": "json_schema"}),
    {"type": "json_schema", "json_schema": {"name": "x", "schema": {"pattern": "(a+)+$" * 50, "type": "string"}}},
    {"type": "json_schema", "json_schema": {"name": "x", "schema": {"pattern": ".*" * 300, "type": "string"}}},
    {"type": "json_schema", "json_schema": {"name": "x", "strict": True, "schema": {"$ref": "file:///etc/passwd"}}},
    [{"type": "function", "function": {"name": "x", "parameters": {"type": "array", "minItems": 10**9}}}],
)

Random = random.Random


def strange_value(rng: Random, body: dict[str, Any]) -> bytes:
    """A value of another kind somewhere in a good body, or a key that is not OpenAI's."""
    names = ("model", "stream", "tools", "response_format", "stop", "n", "seed", "logit_bias", "speculation", "user")
    changed = json.loads(json.dumps(body))
    for _ in range(rng.choice((1, 1, 2, 5))):
        changed[rng.choice([*changed, *names, "x-" + str(rng.random())])] = rng.choice(STRANGE)
    return json.dumps(changed).encode()


def damaged_bytes(rng: Random, body: dict[str, Any]) -> bytes:
    """A good body with bytes cut off, doubled or changed."""
    raw = bytearray(json.dumps(body).encode())
    for _ in range(rng.randrange(1, 6)):
        at = rng.randrange(len(raw))
        raw[at : at + rng.randrange(4)] = rng.randbytes(rng.randrange(4))
        raw = raw or bytearray(b"x")
    return bytes(raw)


def long_body(rng: Random, body: dict[str, Any]) -> bytes:
    """Ten megabytes."""
    return json.dumps({**body, "user": "x" * 10_000_000}).encode()


def long_prompt(rng: Random, body: dict[str, Any]) -> bytes:
    """A million tokens, as a text."""
    text = "word " * 1_000_000
    return json.dumps(json.loads(json.dumps(body).replace("Where?", text))).encode()


def deep_body(rng: Random, body: dict[str, Any]) -> bytes:
    """Lists in lists."""
    depth = rng.choice((70, 1000, 100_000))
    return b'{"model": ' + b"[" * depth + b"]" * depth + b"}"


BODIES: dict[Callable[[Random, dict[str, Any]], bytes], float] = {
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


def hostile_body(port: int, rng: Random, route: str) -> str:
    (make,) = rng.choices(list(BODIES), list(BODIES.values()))
    return f"{make.__name__} {posted(port, route, make(rng, {'model': 'scripted', **GOOD[route]}))}"


def broken_http(port: int, rng: Random, route: str) -> str:
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


def slow_or_gone(port: int, rng: Random, route: str) -> str:
    """A client that sends its body byte by byte, reads nothing, or leaves in the middle of a stream."""
    raw = json.dumps({"model": "scripted", **GOOD[route], "stream": route != ROUTES[3]}).encode()
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


def one(port: int, rng: Random) -> str:
    """One hostile request and how it ended."""
    kind = rng.choices((hostile_body, broken_http, slow_or_gone), (88, 8, 4))[0]
    ended = kind(port, rng, rng.choice(ROUTES))
    assert not ended.endswith((" 500", " 502")), ended
    if rng.random() < 0.05:
        route = rng.choice(ROUTES)
        status = posted(port, route, json.dumps({"model": "scripted", **GOOD[route]}).encode())
        assert status in (200, 429, 503), (route, status)
    return ended


@contextmanager
def running_server() -> Iterator[tuple[int, Serving]]:
    with ExitStack() as held:
        cache = held.enter_context(SpeculationCache.open(None, embedder=HashEmbedder()))
        script = scripted_model_engine(lambda prompt: ANSWER, name="scripted", cache=cache, may_stray=True)
        engine = held.enter_context(closing(script))
        serving = held.enter_context(closing(Serving({"scripted": Served.of("scripted", engine)}, LIMITS)))
        server = uvicorn.Server(uvicorn_config(serving))
        listener = held.enter_context(closing(socket.create_server(("127.0.0.1", 0))))
        thread = threading.Thread(target=server.run, args=([listener],))
        thread.start()
        try:
            yield listener.getsockname()[1], serving
        finally:
            server.should_exit = True
            thread.join()


def at_rest(serving: Serving) -> tuple[int, int]:
    """Waits until nothing runs; returns how many threads and open files there are.

    Threads of the two pools that are bounded do not count: each starts when work first waits for it, be it late.
    """
    engine = serving.models["scripted"].engine
    deadline = time.monotonic() + PATIENCE
    while serving.places.total or engine.metrics().num_requests_running or engine.metrics().num_requests_waiting:
        assert time.monotonic() < deadline, "a request is never given up"
        time.sleep(0.05)
    gc.collect()
    names = [thread.name for thread in threading.enumerate()]
    assert sum(name.startswith(PREPARE) for name in names) <= PREPARING_THREADS
    return sum(not name.startswith((PREPARE, CLIENT)) for name in names), len(list(Path("/proc/self/fd").iterdir()))


def resident_mebibytes() -> float:
    pages = Path("/proc/self/statm").read_text(encoding="ascii").split()[1]
    return int(pages) * os.sysconf("SC_PAGE_SIZE") / 2**20


def bombard(number: int, seed: int) -> dict[str, Any]:
    """Send so many requests, eight at once; returns how they ended."""
    ended, memory = Counter[str](), list[float]()
    with running_server() as (port, serving), ThreadPoolExecutor(8, CLIENT) as pool:
        tenths = [range(start, number, 10) for start in range(10)]
        before = at_rest(serving)
        for turn, numbers in enumerate(tenths):
            ended.update(pool.map(partial(_numbered, port, seed), numbers))
            now = at_rest(serving)
            before = now if turn == 0 else before  # the first requests open what is opened once
            memory.append(round(resident_mebibytes(), 1))
        while (after := at_rest(serving)) > before and number:
            time.sleep(0.5)  # the last connections are being closed
            number -= 1
        assert after[0] <= before[0], (before, after)
        assert after[1] <= before[1] + 2, (before, after)
    return {"ended": dict(sorted(ended.items())), "mebibytes": memory}


def _numbered(port: int, seed: int, number: int) -> str:
    return one(port, random.Random(f"{seed} {number}"))


if __name__ == "__main__":
    print(json.dumps(bombard(int(sys.argv[1]), int(sys.argv[2]) if len(sys.argv) > 2 else 1), indent=1))
