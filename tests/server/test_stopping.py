"""SIGTERM and Ctrl-C: running answers end, no new ones are taken, and everything is closed before the process ends."""

from __future__ import annotations

import http.client
import json
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import closing, contextmanager
from pathlib import Path
from typing import Any

import pytest
from pytest_socket import enable_socket

from precedent.cache import SpeculationCache
from precedent.testing.embedders import HashEmbedder

PROGRAM = Path(__file__).with_name("stopping_server.py")
LONG = " ".join(f"word{number}" for number in range(400))


@contextmanager
def started(place: Path, grace: float = 60.0) -> Iterator[tuple[Any, http.client.HTTPConnection]]:
    command = [sys.executable, PROGRAM, place, str(grace), LONG]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        try:
            assert process.stdout is not None
            address = process.stdout.readline().strip()
            with closing(http.client.HTTPConnection(address.removeprefix("http://"), timeout=60)) as connection:
                yield process, connection
        finally:
            process.kill()


def begin(connection: http.client.HTTPConnection) -> http.client.HTTPResponse:
    """Ask for a long answer; returns once its first words are there."""
    messages = [{"role": "user", "content": "Hello?"}]
    asked = {"model": "scripted", "messages": messages, "temperature": 0, "max_tokens": 3000, "stream": True}
    connection.request("POST", "/v1/chat/completions", json.dumps(asked))
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


def test_an_answer_that_outlasts_the_grace_is_cut(tmp_path: Path) -> None:
    enable_socket()
    with started(tmp_path / "cache.db", grace=0.01) as (process, connection):
        answer = begin(connection)
        process.send_signal(signal.SIGTERM)
        try:
            rest = answer.read().decode()
        except http.client.IncompleteRead as error:
            rest = error.partial.decode()
        assert not text_of(rest).endswith(LONG[-100:])
        assert process.stdout.read().split() == ["stopped", "closed"]
        assert process.wait() == 0
