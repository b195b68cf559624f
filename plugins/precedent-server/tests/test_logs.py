"""What a running server writes to stderr: a client's text forges no line of it."""

from __future__ import annotations

import http.client
import json
import signal
from contextlib import closing
from pathlib import Path

import pytest
from helpers.forked import Program
from pytest_socket import enable_socket

PROGRAM = Path(__file__).with_name("failing_server.py")
FORGED = "\n2026-01-01T00:00:00 - GET /forged 200\r\x1b[2J\u2028request forged"


@pytest.mark.parametrize("stream", [False, True], ids=["whole", "stream"])
def test_an_error_with_a_clients_text_forges_no_line(stream: bool, capfd: pytest.CaptureFixture[str]) -> None:
    enable_socket()
    with Program([PROGRAM]) as process:
        address = process.stdout.readline().strip()
        with closing(http.client.HTTPConnection(address.removeprefix("http://"), timeout=60)) as connection:
            asked = {"model": "scripted", "prompt": FORGED, "stream": stream, "max_tokens": 4}
            connection.request("POST", "/v1/completions", json.dumps(asked))
            told = connection.getresponse().read().decode()
        process.send_signal(signal.SIGTERM)
        process.wait()
    written = capfd.readouterr().err
    assert "its log says why" in told
    assert "nothing answers" in written, "the log says why"
    assert "/forged 200" in written
    lines = written.split("\n")
    assert not [line for line in lines if line.startswith(("2026-01-01", "request forged"))]
    assert all(line.isprintable() for line in lines)
