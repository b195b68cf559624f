"""Many threads on one engine, with random cancels and a poisoned cache: no hang, no leak, every answer right."""

from __future__ import annotations

import faulthandler
import gc
import random
import sys
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from itertools import islice

import pytest
from helpers.small_engines import PLAIN

from precedent.cache import Completion, SpeculationCache
from precedent.config import EngineLimits, SamplingParams, SpeculationConfig
from precedent.engine.engine import Engine
from precedent.errors import RequestCancelled
from precedent.planning.costs import CostCurve
from precedent_testing.embedders import HashEmbedder
from precedent_testing.tiny_models import byte_tokenizer, tiny_causal_lm

DRAFTED = SpeculationConfig(drafters=("recall", "prompt"))


@dataclass(frozen=True, slots=True)
class Question:
    """A request and its single-run answer."""

    prompt: tuple[int, ...]
    sampling: SamplingParams
    tenant: str
    answer: tuple[int, ...] = ()


def questions(engine: Engine) -> list[Question]:
    """Prompts of one to 150 tokens, half of them with common beginnings; greedy and seeded; two tenants."""
    choose, asked = random.Random(7), list[Question]()
    for number in range(24):
        beginning = list(b"look up order 17, then order 18; ") if number % 2 else []
        prompt = (*beginning, *(choose.randrange(97, 123) for _ in range(choose.choice((1, 5, 30, 120)))))
        seed = {"temperature": 1.0, "seed": number} if number % 3 == 0 else {}
        sampling = SamplingParams(max_tokens=choose.randrange(1, 14), **seed)
        asked.append(Question(prompt, sampling, tenant="ab"[number % 4 == 0]))
    running = [engine.submit(q.prompt, q.sampling, speculation=PLAIN) for q in asked]
    return [replace(q, answer=one.result().token_ids) for q, one in zip(asked, running, strict=True)]


def poison(cache: SpeculationCache, engine: Engine, asked: list[Question]) -> None:
    """Completions that are almost right, for both tenants."""
    choose = random.Random(8)
    for question in asked:
        wrong = tuple(choose.choice((t, t, 65, 258, 10**6)) for t in question.answer)
        for tenant in "ab":
            cache.insert(Completion(wrong, engine.tokenizer_fingerprint, "another", tenant, query="order"))


@dataclass(slots=True)
class Crowd:
    """Threads that ask one question after the other and give some up; what went wrong is in `problems`."""

    engine: Engine
    asked: list[Question]
    num_requests: int
    problems: list[str] = field(default_factory=list)
    ends: list[str] = field(default_factory=list)

    def run(self, seed: int) -> None:
        """One thread's requests."""
        choose = random.Random(seed)
        for _ in range(self.num_requests):
            try:
                self._ask(choose, choose.choice(self.asked))
            except Exception as error:
                self.problems.append(f"{type(error).__name__}: {error}")

    def _ask(self, choose: random.Random, question: Question) -> None:
        asked = {"speculation": DRAFTED, "tenant": question.tenant, "query": "order"}
        generation, manner = self.engine.submit(question.prompt, question.sampling, **asked), choose.random()
        if manner < 0.3:
            time.sleep(0.0 if manner < 0.15 else choose.random() * 0.02)
            generation.cancel()
        elif manner < 0.5:
            stream: Iterator[object] = iter(generation)
            list(islice(stream, choose.randrange(1, 4)))
            stream.close()  # type: ignore[attr-defined]
        try:
            answer = generation.result().token_ids
        except RequestCancelled:
            self.ends.append("cancelled")
            return
        self.ends.append("answered")
        if answer != question.answer:
            self.problems.append(f"{question} got {answer}")


def within(seconds: float, work: list[Callable[[], None]]) -> None:
    """Run all of `work` at once; if it is not done in time, show where every thread stands and fail."""
    threads = [threading.Thread(target=each, daemon=True) for each in work]
    for thread in threads:
        thread.start()
    deadline = time.monotonic() + seconds
    for thread in threads:
        thread.join(max(0.0, deadline - time.monotonic()))
    hanging = sum(thread.is_alive() for thread in threads)
    if hanging:
        faulthandler.dump_traceback(file=sys.__stderr__, all_threads=True)
        pytest.fail(f"{hanging} of {len(threads)} threads still wait after {seconds:.0f} seconds: see their stacks")


@pytest.mark.parametrize(
    ("num_threads", "num_requests", "seconds"),
    [pytest.param(6, 6, 100, id="small"), pytest.param(32, 50, 1500, id="full", marks=pytest.mark.stress)],
)
def test_many_threads_with_random_cancels(num_threads: int, num_requests: int, seconds: float) -> None:
    """Little memory, so that requests wait; small pieces, so that prompts are cancelled in the middle."""
    others = set(threading.enumerate())
    limits = EngineLimits(max_running=12, max_kv_bytes=3 * 2**20, prefill_tokens_per_round=48, max_idle_kv_bytes=2**22)
    with SpeculationCache.open(None, embedder=HashEmbedder()) as cache:
        model = tiny_causal_lm("llama", seed=51, num_hidden_layers=2)
        engine = Engine(model, byte_tokenizer(), name="tiny", cache=cache, limits=limits, cost=CostCurve())
        asked = questions(engine)
        poison(cache, engine, asked)
        threads_before = threading.active_count()
        crowd = Crowd(engine, asked, num_requests)
        within(seconds, [lambda seed=seed: crowd.run(seed) for seed in range(num_threads)])
        assert crowd.problems == []
        assert len(crowd.ends) == num_threads * num_requests
        assert min(crowd.ends.count("answered"), crowd.ends.count("cancelled")) > num_threads * num_requests // 10
        now = engine.metrics()
        assert (now.num_requests_running, now.num_requests_waiting, now.num_requests_failed) == (0, 0, 0)
        assert (now.kv_cache_reserved_bytes, engine.admission.num_inside) == (0, 0)
        assert now.kv_cache_idle_bytes <= limits.max_idle_kv_bytes
        assert now.num_draft_tokens > now.num_accepted_tokens > 0
        assert threading.active_count() <= threads_before + 2  # the engine's pool for the cache may have grown to two
        within(60, [engine.close])
    gc.collect()
    left = {thread for thread in threading.enumerate() if thread.name.startswith("precedent")}
    assert left <= others
