"""Clients that send nothing, send byte by byte, or never read lose their connection; only so many may be open."""

from __future__ import annotations

import http.client
import json
import socket
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, closing, contextmanager
from pathlib import Path

import pytest
from helpers.forked import Program
from pytest_socket import enable_socket

PROGRAM = Path(__file__).with_name("bounded_server.py")
HEALTH = b"GET /health HTTP/1.1\r\nHost: 127.0.0.1\r\n\r\n"
PATIENCE = 60
"""Seconds after which a connection counts as never closed."""


@contextmanager
def server(**limits: float) -> Iterator[Callable[[], socket.socket]]:
    """A server under these limits; makes connections to it. At the end it must still answer."""
    enable_socket()
    with Program([PROGRAM, json.dumps(limits)]) as process, ExitStack() as held:
        port = int(process.stdout.readline().rpartition(":")[2])

        def connect() -> socket.socket:
            return held.enter_context(closing(socket.create_connection(("127.0.0.1", port), timeout=PATIENCE)))

        yield connect
        held.close()
        assert b" 200 " in all_of(connect(), HEALTH.replace(b"\r\n\r\n", b"\r\nConnection: close\r\n\r\n"))


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


def test_silent_connections_are_closed() -> None:
    with server(header_seconds=0.3) as connect:
        assert all_of(connect()).startswith(b"HTTP/1.1 408 ")
        assert all_of(connect(), b"GET /health HTTP/1.1\r\n").startswith(b"HTTP/1.1 408 ")


@pytest.mark.parametrize("before", [b"", HEALTH], ids=["first request", "second request"])
def test_headers_have_a_time(before: bytes) -> None:
    with server(header_seconds=0.3) as connect:
        received = dribbled(connect(), before + b"GET /health HTTP/1.1\r\nX-Slow: ")
        assert received.count(b" 200 ") == before.count(b"GET")
        assert b"HTTP/1.1 408 " in received


def test_the_rest_of_a_refused_body_has_a_time() -> None:
    head = b"POST /v1/completions HTTP/1.1\r\nHost: 127.0.0.1\r\nContent-Length: 100000000\r\n\r\n"
    with server(header_seconds=0.3, max_body_bytes=1000) as connect:
        assert dribbled(connect(), head).startswith(b"HTTP/1.1 413 ")


def test_a_body_has_a_time() -> None:
    head = b"POST /v1/completions HTTP/1.1\r\nHost: 127.0.0.1\r\nContent-Length: 100000\r\n\r\n"
    with server(header_seconds=0.3, upload_seconds=0.3) as connect:
        assert dribbled(connect(), head).startswith(b"HTTP/1.1 408 ")


@pytest.mark.parametrize(
    "begun", [b"", b"Content-Length: 100000\r\n\r\n", b"Transfer-Encoding: chunked\r\n\r\n1000\r\n"]
)
def test_headers_and_body_share_one_time(begun: bytes) -> None:
    """It runs from the first byte, and nothing is waited for after it."""
    head = b"POST /v1/completions HTTP/1.1\r\nHost: 127.0.0.1\r\nX-Slow: "
    with server(header_seconds=1000, upload_seconds=0.5) as connect:
        sent = head + (b"" if not begun else b"x\r\n" + begun)
        assert dribbled(connect(), sent).startswith(b"HTTP/1.1 408 ")


def test_the_rest_of_a_refused_body_has_the_same_time() -> None:
    head = b"POST /v1/completions HTTP/1.1\r\nHost: 127.0.0.1\r\nContent-Length: 100000000\r\n\r\n"
    with server(header_seconds=1000, upload_seconds=0.5, max_body_bytes=1000) as connect:
        assert dribbled(connect(), head).startswith(b"HTTP/1.1 413 ")


def test_only_so_many_connections_are_open() -> None:
    with server(max_connections=4) as connect:
        held = [connect() for _ in range(4)]
        for connection in held:
            assert b" 200 " in answered(connection)
        assert all_of(connect()).startswith(b"HTTP/1.1 503 ")
        assert b" 200 " in answered(held[0])
        held[1].close()
        wait_for_a_place(connect)
        for connection in held:
            connection.close()


def answered(connection: socket.socket) -> bytes:
    """The answer about the server's health on a connection that stays open."""
    connection.sendall(HEALTH)
    received = b""
    while not received.endswith(b"}"):
        received += connection.recv(65536)
    return received


def wait_for_a_place(connect: Callable[[], socket.socket]) -> None:
    """Connect until the server has noticed that another connection is gone."""
    deadline = time.monotonic() + PATIENCE
    while b" 503 " in all_of(connect(), HEALTH.replace(b"\r\n\r\n", b"\r\nConnection: close\r\n\r\n")):
        assert time.monotonic() < deadline


def test_unfinished_bodies_are_bounded_together() -> None:
    """Two clients may not hold more than the bound; the one that came first ends its body and is answered."""
    raw = json.dumps({"model": "scripted", "prompt": "x", "max_tokens": 1}).encode()
    head = b"POST /v1/completions HTTP/1.1\r\nHost: 127.0.0.1\r\nContent-Length: %d\r\n\r\n"
    with server(max_upload_bytes=40_000) as connect:
        first, (host, port) = connect(), connect().getpeername()
        first.sendall(head % (30_000 + len(raw)) + b" " * 30_000)
        deadline, status = time.monotonic() + PATIENCE, 0
        while status != 429 and time.monotonic() < deadline:  # until the server has read the first one's bytes
            with closing(http.client.HTTPConnection(host, port, timeout=PATIENCE)) as second:
                second.request("POST", "/v1/completions", b" " * 20_000 + raw)
                status = second.getresponse().status
        assert status == 429
        first.sendall(raw)
        assert first.recv(65536).startswith(b"HTTP/1.1 200 ")


def test_a_client_that_never_reads_is_cut_off() -> None:
    """It asks for far more than the system's buffers hold, and begins to read when it is too late."""
    asked, number = HEALTH.replace(b"/health", b"/openapi.json"), 100
    with server(request_seconds=1.0) as connect:
        whole = all_of(connect(), asked.replace(b"\r\n\r\n", b"\r\nConnection: close\r\n\r\n"))
        slow = connect()
        slow.sendall(asked * number)
        time.sleep(3)
        assert len(all_of(slow)) < len(whole) * number / 2
