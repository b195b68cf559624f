"""SIGTERM and Ctrl-C: running answers end, no new ones are taken, and everything is closed before the process ends.

SIGHUP ends nothing.
"""

from __future__ import annotations

import http.client
import json
import signal
import time
from collections.abc import Iterator
from contextlib import closing, contextmanager
from pathlib import Path
from typing import Any

import pytest
from helpers.forked import Program
from pytest_socket import enable_socket

from precedent.cache import SpeculationCache
from precedent_server.keys import add_key
from precedent_server.running import hangups_ignored
from precedent_testing.embedders import HashEmbedder

PROGRAM = Path(__file__).with_name("stopping_server.py")
LONG = " ".join(f"word{number}" for number in range(150))


@contextmanager
def started(place: Path, grace: float = 60.0, *keys: Path) -> Iterator[tuple[Any, http.client.HTTPConnection]]:
    with Program([PROGRAM, place, grace, LONG, *keys]) as process:
        try:
            address = process.stdout.readline().strip()
            with closing(http.client.HTTPConnection(address.removeprefix("http://"), timeout=60)) as connection:
                yield process, connection
        finally:
            process.kill()


def ask(connection: http.client.HTTPConnection, *, stream: bool, headers: Any = None) -> None:
    messages = [{"role": "user", "content": "Hello?"}]
    asked = {"model": "scripted", "messages": messages, "temperature": 0, "max_tokens": 3000, "stream": stream}
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


@pytest.mark.parametrize("kind", [signal.SIGTERM, signal.SIGINT])
def test_running_answers_end_and_everything_is_closed(tmp_path: Path, kind: signal.Signals) -> None:
    enable_socket()
    with started(tmp_path / "cache.db") as (process, connection):
        answer = begin(connection)
        process.send_signal(kind)
        rest = answer.read().decode()
        assert text_of(rest).endswith(LONG[-100:])
        assert rest.endswith("data: [DONE]\n\n")
        assert process.stdout.read().split() == ["stopped", "closed"]
        assert process.wait() == 0
    with SpeculationCache.open(tmp_path / "cache.db", embedder=HashEmbedder()) as cache:
        assert [one.text for one in cache.list()] == [LONG]


def test_a_stream_that_outlasts_the_grace_ends_in_an_error(tmp_path: Path) -> None:
    enable_socket()
    with started(tmp_path / "cache.db", grace=0.01) as (process, connection):
        answer = begin(connection)
        process.send_signal(signal.SIGTERM)
        *events, last, nothing = answer.read().decode().split("\n\n")
        assert not text_of("\n\n".join(events)).endswith(LONG[-100:])
        assert json.loads(last.removeprefix("data: "))["error"]["message"] == "the server is stopping: try again"
        assert not nothing
        assert process.stdout.read().split() == ["stopped", "closed"]
        assert process.wait() == 0


def test_an_answer_that_outlasts_the_grace_is_refused(tmp_path: Path) -> None:
    enable_socket()
    with started(tmp_path / "cache.db", grace=0.01) as (process, connection):
        begin(connection).read(1)
        with closing(http.client.HTTPConnection(connection.host, connection.port, timeout=60)) as other:
            ask(other, stream=False)
            time.sleep(0.1)  # so that the server has read it
            process.send_signal(signal.SIGTERM)
            answer = other.getresponse()
            assert (answer.status, answer.headers["Retry-After"]) == (503, "5")
            assert json.loads(answer.read())["error"]["message"] == "the server is stopping: try again"
        assert process.stdout.read().split() == ["stopped", "closed"]
        assert process.wait() == 0


def test_a_hangup_reads_the_keys_and_ends_nothing(tmp_path: Path) -> None:
    enable_socket()
    keys = tmp_path / "keys.json"
    key = add_key(keys, "desk", "shop")
    with started(tmp_path / "cache.db", 60.0, keys) as (process, connection):
        headers = {"Authorization": f"Bearer {key}"}
        answer = begin(connection, headers)
        process.send_signal(signal.SIGHUP)
        assert text_of(answer.read().decode()).endswith(LONG[-100:])
        connection.request("GET", "/v1/models", headers=headers)
        assert connection.getresponse().read()
        process.send_signal(signal.SIGTERM)
        assert process.stdout.read().split() == ["stopped", "closed"]
        assert process.wait() == 0


def test_a_hangup_while_models_are_loaded_ends_nothing() -> None:
    before = signal.getsignal(signal.SIGHUP)
    with hangups_ignored():
        signal.raise_signal(signal.SIGHUP)
    assert signal.getsignal(signal.SIGHUP) == before
