"""Threads that have nothing to compute hold no OpenMP workers, which would put those that compute to sleep."""

from __future__ import annotations

import queue
import threading

import pytest
from helpers.forked import run

from precedent.cache import embedder
from precedent.config import SamplingParams
from precedent.engine import worker
from precedent.engine.engine import Engine
from precedent.runtime import openmp
from precedent_testing.tiny_models import byte_tokenizer, tiny_causal_lm

COUNTED = """
import os, time, torch
from precedent.runtime.openmp import release_workers
torch.set_num_threads(2)
def count(): return len(os.listdir("/proc/self/task"))
def compute(): torch.randn(4000, 400) @ torch.randn(400, 4000); torch.randn(10**6).exp()
compute(); before = count()
release_workers()
deadline = time.monotonic() + 20
while count() == before and time.monotonic() < deadline: time.sleep(0.01)
after = count()
compute()
print(before - after, count() - after)
"""


@pytest.mark.skipif(openmp._pause() is None, reason="torch runs on something else than GNU's OpenMP here")
def test_workers_go_and_the_next_computation_gets_others() -> None:
    """One of two threads goes, and comes back."""
    ended = run(["-c", COUNTED])

    assert ended.stdout.split() == ["1", "1"]


def test_without_gnus_openmp_nothing_is_asked_of_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """Other libraries keep their threads in other ways."""
    monkeypatch.setattr(openmp, "_pause", lambda: None)

    openmp.release_workers()


def test_neither_an_idle_engine_nor_who_waits_for_it_holds_workers(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nor does who asks it: they go when a request is made, on that thread, and when the last one is over."""
    threads: queue.SimpleQueue[str] = queue.SimpleQueue()
    running = Engine.load(tiny_causal_lm("llama", seed=1), tokenizer=byte_tokenizer())
    monkeypatch.setattr(worker, "release_workers", lambda: threads.put(threading.current_thread().name))
    running.submit([1, 2, 3], SamplingParams(max_tokens=3)).result()

    assert {threads.get(timeout=20) for _ in range(2)} == {threading.current_thread().name, "precedent-worker"}
    running.close()


def test_whoever_embeds_holds_no_workers_afterwards(monkeypatch: pytest.MonkeyPatch) -> None:
    """Loading embeds as well; and a model that fails has computed before."""

    class Failing:
        def encode(self, *texts: object, **settings: object) -> None:
            raise RuntimeError("no")

    released: list[bool] = []
    monkeypatch.setattr(embedder, "release_workers", lambda: released.append(True))
    with pytest.raises(RuntimeError, match="no"):
        embedder._encode(Failing(), ["text"])

    assert released == [True]
