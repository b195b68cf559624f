"""A server in a process of its own: signals, slow and silent clients, bounds on connections, and what it logs."""

from __future__ import annotations

import http.client
import json
import signal
import socket
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, closing, contextmanager
from pathlib import Path
from typing import Any

import pytest

from precedent.cache import SpeculationCache
from precedent_server.keys import add_key
from precedent_server.running import hangups_ignored
from precedent_testing.embedders import HashEmbedder

LONG = " ".join(f"word{number}" for number in range(150))
HEALTH = b"GET /health HTTP/1.1\r\nHost: 127.0.0.1\r\n\r\n"
LAST_HEALTH = HEALTH.replace(b"\r\n\r\n", b"\r\nConnection: close\r\n\r\n")
MOST_TOKENS = 3000
PATIENCE = 60
"""Seconds after which a connection counts as never closed."""


@contextmanager
def connected(port: int) -> Iterator[http.client.HTTPConnection]:
    with closing(http.client.HTTPConnection("127.0.0.1", port, timeout=PATIENCE)) as connection:
        yield connection


def ask(connection: http.client.HTTPConnection, *, stream: bool = False, headers: Any = None) -> None:
    messages = [{"role": "user", "content": "Hello?"}]
    asked = {"model": "scripted", "messages": messages, "temperature": 0, "max_tokens": MOST_TOKENS, "stream": stream}
    connection.request("POST", "/v1/chat/completions", json.dumps(asked), headers or {})


def begin(connection: http.client.HTTPConnection, headers: Any = None) -> http.client.HTTPResponse:
    """Ask for a long answer; returns once its first words are there."""
    ask(connection, stream=True, headers=headers)
    answer = connection.getresponse()
    for _ in range(8):  # the role, an empty line, and a few tokens
        assert answer.readline()
    return answer


def text_of(events: str) -> str:
    chunks = [json.loads(event[6:]) for event in events.split("\n\n") if event.startswith("data: {")]
    return "".join(choice["delta"].get("content") or "" for chunk in chunks for choice in chunk.get("choices", ()))


def check_closed(process: Any) -> None:
    assert process.stdout.read().split() == ["stopped", "closed"]
    assert process.wait() == 0


@pytest.mark.parametrize("kind", [signal.SIGTERM, pytest.param(signal.SIGINT, marks=pytest.mark.exhaustive)])
def test_running_answers_end_and_everything_is_closed_and_a_hangup_ends_nothing(
    start_process: Any, tmp_path: Path, kind: signal.Signals
) -> None:
    headers = {"Authorization": f"Bearer {add_key(tmp_path / 'keys.json', 'desk', 'shop')}"}
    place = tmp_path / "cache.db"
    with (
        start_process(answer=LONG, cache=place, keys=tmp_path / "keys.json") as (process, port),
        connected(port) as connection,
    ):
        answer = begin(connection, headers)
        process.send_signal(signal.SIGHUP)
        assert answer.readline()
        with connected(port) as other:
            other.request("GET", "/v1/models", headers=headers)
            assert other.getresponse().status == 200
        process.send_signal(kind)
        rest = answer.read().decode()
        assert text_of(rest).endswith(LONG[-100:])
        assert rest.endswith("data: [DONE]\n\n")
        check_closed(process)
    with SpeculationCache.open(place, embedder=HashEmbedder()) as cache:
        assert [one.text for one in cache.list(tenant="shop")] == [LONG]


def until_running(port: int, number: int) -> None:
    """Wait until the server answers so many requests."""
    found, deadline = b"", time.monotonic() + PATIENCE
    while f'num_requests_running{{model_name="scripted",engine="0"}} {number}'.encode() not in found:
        assert time.monotonic() < deadline, found
        with connected(port) as connection:
            connection.request("GET", "/metrics")
            found = connection.getresponse().read()


def test_answers_that_outlast_the_grace_end_in_an_error(start_process: Any) -> None:
    longer = LONG * 3
    with start_process(answer=longer, limits={"grace_seconds": 0.01}) as (process, port), connected(port) as connection:
        streamed = begin(connection)
        with connected(port) as other:
            ask(other)
            until_running(port, 2)
            process.send_signal(signal.SIGTERM)
            answer = other.getresponse()
            assert (answer.status, answer.headers["Retry-After"]) == (503, "5")
            assert json.loads(answer.read())["error"]["message"] == "the server is stopping: try again"
        *events, last, nothing = streamed.read().decode().split("\n\n")
        assert 0 < len(text_of("\n\n".join(events))) < MOST_TOKENS
        assert json.loads(last.removeprefix("data: "))["error"]["message"] == "the server is stopping: try again"
        assert not nothing
        check_closed(process)


def test_a_hangup_while_models_are_loaded_ends_nothing() -> None:
    before = signal.getsignal(signal.SIGHUP)
    with hangups_ignored():
        signal.raise_signal(signal.SIGHUP)
    assert signal.getsignal(signal.SIGHUP) == before


FORGED = "\n2026-01-01T00:00:00 - GET /forged 200\r\x1b[2J\u2028request forged"


def test_an_error_with_a_clients_text_forges_no_line(start_process: Any, capfd: pytest.CaptureFixture[str]) -> None:
    with start_process(answer=None) as (process, port):
        for stream in (False, True):
            with connected(port) as connection:
                asked = {"model": "scripted", "prompt": FORGED, "stream": stream, "max_tokens": 4}
                connection.request("POST", "/v1/completions", json.dumps(asked))
                assert "its log says why" in connection.getresponse().read().decode()
        process.send_signal(signal.SIGTERM)
        process.wait()
    written = capfd.readouterr().err
    assert written.count("nothing answers") >= 2, "the log says why"
    assert "/forged 200" in written
    lines = written.split("\n")
    assert not [line for line in lines if line.startswith(("2026-01-01", "request forged"))]
    assert all(line.isprintable() for line in lines)


@pytest.fixture
def bounded(start_process: Any) -> Any:
    """Starts a server under limits and makes connections to it. At the end it must still answer."""

    @contextmanager
    def started(**limits: float) -> Iterator[Callable[[], socket.socket]]:
        with start_process(limits=limits) as (_, port), ExitStack() as held:

            def connect() -> socket.socket:
                return held.enter_context(closing(socket.create_connection(("127.0.0.1", port), timeout=PATIENCE)))

            yield connect
            held.close()
            assert b" 200 " in all_of(connect(), LAST_HEALTH)

    return started


def all_of(connection: socket.socket, sent: bytes = b"") -> bytes:
    """Everything that the server sends until it closes the connection."""
    connection.sendall(sent)
    parts = list[bytes]()
    try:
        while part := connection.recv(65536):
            parts.append(part)
    except ConnectionResetError:
        pass
    return b"".join(parts)


def dribbled(connection: socket.socket, sent: bytes) -> bytes:
    """The same, while a byte is sent every now and then, as slow as is possible without falling silent."""
    connection.sendall(sent)
    connection.settimeout(0.05)
    received, deadline = b"", time.monotonic() + PATIENCE
    while time.monotonic() < deadline:
        try:
            connection.sendall(b"x")
            part = connection.recv(65536)
            if not part:
                return received
            received += part
        except TimeoutError:
            continue
        except OSError:
            return received
    raise AssertionError(f"still open after {PATIENCE} seconds, and received {received!r}")


HEAD = b"POST /v1/completions HTTP/1.1\r\nHost: 127.0.0.1\r\n"
BODY = HEAD + b"Content-Length: 100000000\r\n\r\n"


def test_headers_have_a_time_and_so_has_the_rest_of_a_refused_body(bounded: Any) -> None:
    with bounded(header_seconds=0.3, max_body_bytes=1000) as connect:
        assert all_of(connect()).startswith(b"HTTP/1.1 408 ")
        assert all_of(connect(), b"GET /health HTTP/1.1\r\n").startswith(b"HTTP/1.1 408 ")
        for before in (b"", HEALTH):  # the first request of a connection, or the second
            received = dribbled(connect(), before + b"GET /health HTTP/1.1\r\nX-Slow: ")
            assert received.count(b" 200 ") == before.count(b"GET")
            assert b"HTTP/1.1 408 " in received
        assert dribbled(connect(), BODY).startswith(b"HTTP/1.1 413 ")


def test_headers_and_body_share_one_time(bounded: Any) -> None:
    """It runs from the first byte, and nothing is waited for after it."""
    with bounded(header_seconds=1000, upload_seconds=0.3, max_body_bytes=200_000) as connect:
        assert dribbled(connect(), HEAD + b"Content-Length: 100000\r\n\r\n").startswith(b"HTTP/1.1 408 ")
        for begun in (b"", b"x\r\nContent-Length: 10000\r\n\r\n", b"x\r\nTransfer-Encoding: chunked\r\n\r\n1000\r\n"):
            assert dribbled(connect(), HEAD + b"X-Slow: " + begun).startswith(b"HTTP/1.1 408 ")
        assert dribbled(connect(), BODY).startswith(b"HTTP/1.1 413 ")


def until_not_full(connect: Callable[[], socket.socket]) -> None:
    """Wait until the server has noticed that another connection is gone."""
    deadline = time.monotonic() + PATIENCE
    while b" 503 " in all_of(connect(), LAST_HEALTH):
        assert time.monotonic() < deadline


def test_only_so_many_connections_are_open(bounded: Any) -> None:
    def answered(connection: socket.socket) -> bytes:
        connection.sendall(HEALTH)
        received = b""
        while not received.endswith(b"}"):
            received += connection.recv(65536)
        return received

    with bounded(max_connections=4) as connect:
        held = [connect() for _ in range(4)]
        for connection in held:
            assert b" 200 " in answered(connection)
        assert all_of(connect()).startswith(b"HTTP/1.1 503 ")
        assert b" 200 " in answered(held[0])
        held[1].close()
        until_not_full(connect)
        for connection in held:
            connection.close()


def test_a_client_that_never_reads_is_cut_off(bounded: Any) -> None:
    """It asks for far more than the system's buffers hold, and begins to read when it is too late."""
    asked, number = HEALTH.replace(b"/health", b"/openapi.json"), 100
    with bounded(request_seconds=1.0, max_connections=1) as connect:
        whole = all_of(connect(), LAST_HEALTH.replace(b"/health", b"/openapi.json"))
        slow = connect()
        slow.sendall(asked * number)
        assert slow.recv(12) == b"HTTP/1.1 200"
        until_not_full(connect)
        assert len(all_of(slow)) < len(whole) * number / 2
