"""A service between threads and processes, under arbitrary calls, and what it loads."""

from __future__ import annotations

import os
import random
import subprocess
import sys
import threading
from pathlib import Path
from typing import Any

import pytest
from helpers.forked import run
from helpers.services import END, Serve
from hypothesis import given, settings
from hypothesis import strategies as st

from precedent.cache import SpeculationCache
from precedent.errors import PrecedentError
from precedent.runtime.background import AtOnce, Background
from precedent_engines import DraftingService
from precedent_testing.embedders import HashEmbedder
from precedent_testing.scripted_model import scripted_tokenizer
from precedent_testing.trees import check_tree

THREADS, REQUESTS, STEPS = 6, 12, 10


def test_threads_draft_beside_each_other(serve: Serve) -> None:
    """Each with its own tenant and requests, storing meanwhile: no draft crosses over, and every token is counted."""
    service, errors, accepted = serve(executor=Background(2, "test")), list[BaseException](), [0] * THREADS

    def run(number: int) -> None:
        choose, own = random.Random(number), [1000 * (number + 1) % 400 + place for place in range(20)]
        try:
            for each in range(REQUESTS):
                service.write_back([number], own, tenant=f"t{number}", query="an order").result()
                session = service.begin(f"{number}-{each}", [number + 1], tenant=f"t{number}", query="an order")
                at = 0
                for _ in range(STEPS):
                    chain = session.chain(choose.randint(0, 6))
                    assert set(chain) <= set(own)
                    right = next(
                        (n for n, token in enumerate(chain) if own[at + n : at + n + 1] != [token]), len(chain)
                    )
                    accepted[number] += right
                    session.committed(own[at : at + right + 1])
                    at += right + 1
                    if at >= len(own):
                        break
                session.end()
        except BaseException as error:
            errors.append(error)

    threads = [threading.Thread(target=run, args=(number,)) for number in range(THREADS)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert errors == []
    found = service.metrics()
    assert (found.running, found.num_requests) == (0, THREADS * REQUESTS)
    assert found.num_accepted_tokens == sum(accepted) > 0


def test_a_session_may_end_while_another_thread_drafts_for_its_batch(serve: Serve) -> None:
    """A request that is cancelled: the batch goes on, and the ended session drafts nothing more."""
    service = serve(executor=Background(2, "test"))
    service.write_back([1], list(range(40, 60)), tenant="north", query="an order").result()
    for turn in range(30):
        sessions = [service.begin(f"{turn}-{number}", [1, 2], tenant="north", query="an order") for number in range(6)]
        ready = threading.Barrier(2)

        def end(those: list[Any] = sessions[::2], ready: threading.Barrier = ready) -> None:
            ready.wait()
            for session in those:
                session.end()

        other = threading.Thread(target=end)
        other.start()
        ready.wait()
        for _ in range(4):
            assert len(service.chains(sessions, 4)) == 6
            for session in sessions:
                session.committed([40])
        other.join()
        assert service.chains(sessions, 4)[::2] == [[], [], []]
        for session in sessions:
            session.end()
    assert service.metrics().failures_by_drafter == {}


CALLS = st.lists(
    st.tuples(
        st.sampled_from(["begin", "committed", "chain", "chains", "tree", "end", "write_back"]),
        st.integers(0, 3),
        st.lists(st.integers(0, 12), max_size=6),
    ),
    max_size=40,
)


@settings(max_examples=60)
@given(CALLS)
def test_any_calls_in_any_order_give_drafts_or_a_named_refusal(
    fuzzed: DraftingService, calls: list[tuple[str, int, list[int]]]
) -> None:
    sessions: dict[int, Any] = {}
    for name, number, tokens in calls:
        session, most = sessions.get(number), len(tokens)
        try:
            if name == "begin":
                tenant = ("north", "south", None, "")[number]
                sessions[number] = fuzzed.begin(
                    str(number), tokens, tenant=tenant, prediction=tokens, end_token_ids=[2]
                )
            elif name == "write_back":
                fuzzed.write_back([1], tokens, tenant=("north", "south")[number % 2])
            elif name == "chains":
                drafts = fuzzed.chains(list(sessions.values()), most)
                assert [len(draft) <= most for draft in drafts] == [True] * len(sessions)
            elif session is None:
                continue
            elif name == "committed":
                session.committed(tokens)
            elif name == "tree":
                tree = session.tree(most)
                check_tree(tree)
                assert len(tree) <= most
            elif name == "chain":
                draft = session.chain(most)
                assert len(draft) <= most
                assert END not in draft[:-1]
            else:
                session.end()
        except PrecedentError:
            assert name == "begin", "nothing else can be refused here"
    for session in sessions.values():
        session.end()
    found = fuzzed.metrics()
    assert found.failures_by_drafter == {}
    assert found.running == 0


@pytest.fixture(scope="module")
def fuzzed() -> Any:
    settings: dict[str, Any] = {"executor": AtOnce(), "cost": {1: 10.0, 9: 11.0}}
    with (
        SpeculationCache.open(None, embedder=HashEmbedder()) as cache,
        DraftingService(cache, scripted_tokenizer(), **settings) as service,
    ):
        yield service


@pytest.mark.skipif(not hasattr(os, "fork"), reason="needs processes that fork")
def test_a_forked_process_is_refused_by_name() -> None:
    """In a program of its own: a process that runs tests has threads that a fork does not survive."""
    done = run(["-c", FORKING])
    assert done.returncode == 0, done.stderr
    lines = done.stdout.splitlines()
    assert lines == ["DraftingService"] * 4 + ["DraftingSession"] * 3 + ["ended", "closed", "[51]"], done.stdout


FORKING = """
import os, sys
from precedent.errors import UnsupportedError
from precedent_engines import DraftingService
from precedent_testing.tiny_models import byte_tokenizer

service = DraftingService(None, byte_tokenizer(), cost={1: 10.0, 9: 10.0})
session = service.begin("a", [50, 51, 52, 50])

def refused(call, name):
    try:
        call()
    except UnsupportedError as error:
        assert f"this {name} was made before the process was forked" in str(error), error
        print(name, flush=True)

pid = os.fork()
if pid == 0:
    calls = (lambda: service.begin("b", [1]), lambda: service.chains([session], 3), service.metrics,
             lambda: service.write_back([1], [2], tenant="t"))
    for call in calls:
        refused(call, "DraftingService")
    for call in (lambda: session.committed([1]), lambda: session.chain(3), lambda: session.tree(3)):
        refused(call, "DraftingSession")
    session.end()
    print("ended", flush=True)
    service.close()
    print("closed", flush=True)
    os._exit(0)
assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0
print(session.chain(1), flush=True)
service.close()
"""

WHOLE_LIFE = """
import sys
from precedent.cache import SpeculationCache
from precedent_engines import DraftingService
from precedent_testing.embedders import HashEmbedder

with SpeculationCache.open(None, embedder=HashEmbedder()) as cache, DraftingService(cache, sys.argv[1]) as service:
    service.write_back([1, 2], [40, 41, 42, 43], tenant="north", query="an order").result()
    session = service.begin("a", [5, 6, 5], tenant="north", query="an order", templates=["The {thing} is open."])
    session.chain(8)
    session.committed([40])
    session.tree(8)
    session.end()
    service.metrics()
print(*(name for name in ("torch", "transformers", "sentence_transformers", "langchain_core") if name in sys.modules))
"""


def test_a_whole_life_of_a_service_loads_neither_torch_nor_transformers(tokenizer: Any, tmp_path: Path) -> None:
    tokenizer.save_pretrained(tmp_path)
    command = [sys.executable, "-c", WHOLE_LIFE, str(tmp_path)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout.strip()) == (0, ""), done.stderr
