"""A real vLLM on the CPU whose store goes away, or whose settings are wrong: make test-vllm."""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from pytest_socket import enable_socket

pytest.importorskip("vllm", reason="make test-vllm installs vLLM in an environment of its own")

from helpers.vllm_server import QUESTIONS, VllmServer, chat

pytestmark = pytest.mark.vllm

STORED = "precedent:stored_answers_total"


@pytest.fixture(autouse=True)
def _sockets() -> None:
    """Only the loopback address is used."""
    enable_socket()


@pytest.fixture(scope="module")
def texts(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """What vLLM answers without speculation."""
    enable_socket()
    with VllmServer(tmp_path_factory.mktemp("plain") / "log", speculation=None) as server:
        return {question: chat(server.client(), question) for question in QUESTIONS[:4]}


def test_a_store_that_stops_and_starts_fails_and_changes_no_request(texts: dict[str, str], tmp_path: Path) -> None:
    """PostgreSQL, twenty times, under four clients."""
    testing = pytest.importorskip("precedent_postgres.testing")
    if (reason := testing.why_not()) is not None:
        pytest.skip(reason)
    settings = {"PRECEDENT_VLLM_TENANT": "shop"}
    with testing.TemporaryServer() as database:
        drafting = VllmServer(tmp_path / "log", **settings, PRECEDENT_VLLM_STORE=database.url)
        with drafting:
            client, ended, wrong = drafting.client(), threading.Event(), list[Any]()
            answered = Counter[str]()

            def talk(question: str) -> None:
                while not ended.is_set():
                    try:
                        found = chat(client, question)
                    except Exception as error:
                        wrong.append(error)
                        return
                    answered[question] += 1
                    if found != texts[question]:
                        wrong.append(found)

            talking = [threading.Thread(target=talk, args=(question,)) for question in texts]
            for one in talking:
                one.start()
            drafting.counted(STORED, 4)
            for _ in range(20):
                seen = answered.total()
                database.stop()
                waited(lambda seen=seen: answered.total() >= seen + 2 or wrong)
                database.start()
            ended.set()
            for one in talking:
                one.join()
            assert wrong == []
            assert drafting.log().count("the store failed") >= 1
            before = drafting.counts()[STORED]
            while drafting.counts()[STORED] == before:  # the store is tried again half a minute after it failed
                assert chat(client, QUESTIONS[0]) == texts[QUESTIONS[0]]


def waited(fact: Callable[[], Any]) -> None:
    """Wait for what other threads bring about."""
    while not fact():
        threading.Event().wait(0.05)


def test_the_server_says_why_it_does_not_start(tmp_path: Path) -> None:
    broken = VllmServer(tmp_path / "log", PRECEDENT_VLLM_STOER=str(tmp_path / "cache.db"))
    with pytest.raises(RuntimeError, match="PRECEDENT_VLLM_STOER is no setting"):
        broken.start()
