"""Whether an engine is healthy, as it tells."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from helpers.small_engines import PLAIN, PROMPT

from precedent.config import EngineLimits, SamplingParams
from precedent.engine.engine import Engine
from precedent.engine.health import EngineHealth, Outcomes
from precedent.errors import GenerationError, GrammarError, RequestCancelled
from precedent.planning.costs import CostCurve
from precedent.runtime.fence import Fences
from precedent_testing.tiny_models import byte_tokenizer, tiny_causal_lm


class Tried:
    """An engine for one request at a time, with a clock that is moved by hand, whose steps may be held up."""

    def __init__(self) -> None:
        self.now, self.model = 1000.0, tiny_causal_lm("llama", seed=21, num_hidden_layers=2)
        self.in_a_step, self.go_on = threading.Semaphore(0), threading.Semaphore(0)
        self.engine = Engine(
            self.model, byte_tokenizer(), name="tiny", cost=CostCurve(), fences=Fences(lambda: self.now),
            limits=EngineLimits(max_running=1),
        )  # fmt: skip

    def answer(self, number: int = 1, max_tokens: int = 2) -> None:
        for _ in range(number):
            self.engine.submit(PROMPT, SamplingParams(max_tokens=max_tokens), speculation=PLAIN).result()

    def fail(self, number: int) -> None:
        head = self.model.get_output_embeddings().weight
        healthy = head.detach().clone()
        with torch.no_grad():
            head.fill_(torch.nan)
        for _ in range(number):
            with pytest.raises(GenerationError):
                self.answer()
        with torch.no_grad():
            head.copy_(healthy)

    def hold_steps_up(self) -> None:
        score = self.engine.target.score

        def held_up(*args: Any, **settings: Any) -> Any:
            self.in_a_step.release()
            assert self.go_on.acquire(timeout=60)
            return score(*args, **settings)

        self.engine.target.score = held_up  # type: ignore[method-assign]


@pytest.fixture
def tried() -> Iterator[Tried]:
    made = Tried()
    yield made
    made.engine.close()


def test_internal_errors_of_the_last_minute_are_a_reason_unless_they_are_few(tried: Tried) -> None:
    assert tried.engine.health() == EngineHealth()
    tried.fail(2)
    assert tried.engine.health().status == "ok", "two may be chance"
    tried.fail(1)
    found = tried.engine.health()
    assert found.status == "failing"
    assert found.failing == "3 of the 3 requests of the last minute ended in internal errors"
    tried.answer(13)
    assert tried.engine.health().status == "ok", "a few among many"
    tried.fail(3)
    tried.now += 61.0
    assert tried.engine.health().status == "ok"


def test_what_a_caller_causes_is_no_internal_error() -> None:
    """Cancelled requests, and grammars and constraints that cannot be kept, say nothing about the engine."""
    for error in (RequestCancelled("cancelled"), GrammarError("every token is masked"), None):
        outcomes = Outcomes()
        for _ in range(4):
            outcomes.note(error)
        assert not outcomes.failing()


def test_a_thread_that_does_not_advance_and_a_request_that_waits_are_told_until_they_go_on(tried: Tried) -> None:
    tried.hold_steps_up()
    running = tried.engine.submit(PROMPT, SamplingParams(max_tokens=2), speculation=PLAIN)
    assert tried.in_a_step.acquire(timeout=60)
    waiting = tried.engine.submit(PROMPT, SamplingParams(max_tokens=1), speculation=PLAIN)
    assert (tried.engine.health().status, tried.engine.longest_wait()) == ("ok", 0.0)
    time.sleep(0.02)
    assert "has not advanced for" in tried.engine.health(stalled_seconds=0.01).failing
    tried.go_on.release()
    assert tried.in_a_step.acquire(timeout=60)  # the next step; the second request waits for its place
    assert tried.engine.longest_wait() > 0
    tried.go_on.release(20)
    running.result()
    waiting.result()
    rests = (tried.engine.health(stalled_seconds=0.0).status == "ok" or time.sleep(0.01) for _ in range(6000))
    assert any(rests), "its callers know before its thread rests"
    time.sleep(0.02)
    assert tried.engine.health(stalled_seconds=0.0).status == "ok", "an idle engine is not stalled"
    tried.engine.close()
    assert tried.engine.health().failing == "the engine is closed"
    assert tried.engine.longest_wait() == 0.0
