"""A real vLLM on the CPU with our drafter and middleware, under openai-python and a LangChain agent: make test-vllm.

What is compared comes from the same vLLM without speculation, in float32. The tests of a file run in their order: each
finds the store as the ones before it left it.
"""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from pytest_socket import enable_socket

pytest.importorskip("vllm", reason="make test-vllm installs vLLM in an environment of its own")

from helpers.vllm_server import (
    QUESTIONS,
    VllmServer,
    at_once,
    chat,
    desk_runs,
    plain_answers,
    samples,
    streamed,
)
from scipy.stats import chi2_contingency

from precedent.cache import verify_cache
from precedent_server.keys import add_key

pytestmark = pytest.mark.vllm

RECALLED = "precedent:spec_decode_num_accepted_tokens_total:recall"
STORED = "precedent:stored_answers_total"
DRAFTED = "precedent:drafted_requests_total"
NUM_RUNS, NUM_SAMPLES = 2, 320


@pytest.fixture(autouse=True)
def _sockets() -> None:
    """Only the loopback address is used."""
    enable_socket()


@dataclass(frozen=True)
class Plain:
    """What vLLM answers without speculation."""

    answers: dict[str, Any]
    runs: list[list[Any]]
    samples: Counter[str]


@pytest.fixture(scope="module")
def plain(tmp_path_factory: pytest.TempPathFactory) -> Plain:
    enable_socket()
    with VllmServer(tmp_path_factory.mktemp("plain") / "log", speculation=None) as server:
        return Plain(plain_answers(server), desk_runs(server, "none", NUM_RUNS), samples(server.client(), NUM_SAMPLES))


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("drafting")


@pytest.fixture(scope="module")
def keys(place: Path) -> dict[str, str]:
    """Keys of two tenants."""
    return {name: add_key(place / "keys.json", name, tenant) for name, tenant in (("desk", "shop"), ("lab", "other"))}


@pytest.fixture(scope="module")
def server(plain: Plain, place: Path, keys: dict[str, str]) -> Iterator[VllmServer]:
    """A drafting server over a store in a file, started after the plain one has ended.

    Costs are given: learned from the steps of a busy machine, they would say how much is drafted.
    """
    enable_socket()
    settings = {"PRECEDENT_VLLM_STORE": str(place / "cache.db"), "PRECEDENT_VLLM_API_KEYS": str(place / "keys.json")}
    settings["PRECEDENT_VLLM_STEP_COST"] = '{"1": 20.0, "17": 24.0}'
    running = VllmServer(place / "log", **settings)
    try:
        yield running.start()
    finally:
        running.kill()


def settled(server: VllmServer, key: str, before: Counter[str], requests: int = 1) -> Counter[str]:
    """What was counted since `before`, once all `requests` are counted whole: one of a single token follows them."""
    chat(server.client(key), "One token.", max_tokens=1)
    server.counted(DRAFTED, before[DRAFTED] + requests + 1)
    return server.counts() - before


def test_greedy_texts_are_those_without_speculation(server: VllmServer, plain: Plain, keys: dict[str, str]) -> None:
    """With nothing stored, and again with these answers stored: then they come from recall."""
    assert plain_answers(server, keys["desk"]) == plain.answers
    server.counted(STORED, len(plain.answers))
    before = server.resting()
    assert plain_answers(server, keys["desk"]) == plain.answers
    assert settled(server, keys["desk"], before, len(plain.answers))[RECALLED] > 15 * len(QUESTIONS)


@pytest.mark.parametrize("streaming", [False, True])
def test_an_agent_says_and_calls_the_same(
    server: VllmServer, plain: Plain, keys: dict[str, str], streaming: bool
) -> None:
    """ChatOpenAI in a LangChain agent over the order desk, with tools that the model chooses."""
    before = server.resting()
    assert desk_runs(server, keys["desk"], NUM_RUNS, streaming=streaming) == plain.runs
    assert sum(len(calls) for run in plain.runs for _, calls in run) >= NUM_RUNS
    server.counted(STORED, before[STORED] + sum(len(run) for run in plain.runs))


def test_eight_at_once_do_not_disturb_each_other(server: VllmServer, plain: Plain, keys: dict[str, str]) -> None:
    """Greedy ones beside sampled ones, both speculating: this failed before vLLM's `_expand` was mended."""
    client = server.client(keys["desk"])
    for _ in range(3):
        greedy = [partial(chat, client, question) for question in QUESTIONS[:4]]
        sampled = [partial(chat, client, question, temperature=1.0) for question in QUESTIONS[:4]]
        found = at_once([call for pair in zip(greedy, sampled, strict=True) for call in pair])
        assert found[::2] == [plain.answers[question] for question in QUESTIONS[:4]]
        assert found[1::2] != found[::2]


def test_sampled_texts_have_the_same_distribution(server: VllmServer, plain: Plain, keys: dict[str, str]) -> None:
    """Five tokens, each of the best four: a chi-square test that errs once in 10,000 times, rare texts together."""
    samples(server.client(keys["desk"]), 32)
    before = server.resting()
    found = samples(server.client(keys["desk"]), NUM_SAMPLES)
    assert (
        settled(server, keys["desk"], before, NUM_SAMPLES)["vllm:spec_decode_num_accepted_tokens_total"] > NUM_SAMPLES
    )
    common = [text for text, count in (plain.samples + found).items() if count >= 20]
    assert len(common) >= 3
    table = [
        [*(one[text] for text in common), NUM_SAMPLES - sum(one[text] for text in common)]
        for one in (plain.samples, found)
    ]
    table = [column for column in zip(*table, strict=True) if sum(column)]
    assert chi2_contingency(table).pvalue > 1e-4


def test_tenants_draft_from_their_own_answers_alone(server: VllmServer, plain: Plain, keys: dict[str, str]) -> None:
    question = QUESTIONS[1]
    lab = server.client(keys["lab"])
    before = server.resting()
    assert chat(lab, question) == plain.answers[question]
    assert settled(server, keys["lab"], before)[RECALLED] == 0
    server.counted(STORED, before[STORED] + 2)
    before = server.resting()
    assert chat(lab, question) == plain.answers[question]
    assert settled(server, keys["lab"], before)[RECALLED] > 15


def test_a_killed_server_starts_again_over_a_whole_store(
    server: VllmServer, plain: Plain, keys: dict[str, str], place: Path
) -> None:
    """Killed while eight answers are streamed and written back."""
    client, begun, broken = server.client(keys["desk"]), threading.Barrier(9), Counter[str]()

    def talk(question: str) -> None:
        try:
            chat(client, question)
            begun.wait()
            while True:
                streamed(client, question)
        except Exception as error:  # openai's, or httpx's in the middle of a stream
            broken[type(error).__name__] += 1

    talking = [threading.Thread(target=talk, args=(QUESTIONS[i % 6],)) for i in range(8)]
    for one in talking:
        one.start()
    begun.wait()
    server.kill()
    for one in talking:
        one.join()
    assert broken.total() == 8
    assert verify_cache(place / "cache.db").sound
    server.start()
    assert chat(server.client(keys["desk"]), QUESTIONS[0]) == plain.answers[QUESTIONS[0]]
