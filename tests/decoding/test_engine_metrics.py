"""What `Engine.metrics()` says that no single request does."""

from __future__ import annotations

import threading
from collections import Counter
from typing import Any

import pytest
from helpers.small_engines import PLAIN, PROMPT, make_engine

from precedent import SamplingParams
from precedent.config import EngineLimits
from precedent.decoding.stats import GenerationStats
from precedent.engine.metrics import MetricsRecorder, Pulse
from precedent_testing.pytest_plugin import EngineMaker


def test_accepted_tokens_are_counted_by_source(precedent_engine: EngineMaker) -> None:
    engine = precedent_engine(lambda p: "one two, and one two again")
    prompt = engine.tokenizer.encode("hello")
    results = [
        engine.submit(prompt, SamplingParams(), prediction="one two, and").result(),
        engine.submit(prompt, SamplingParams()).result(),
    ]
    found = engine.metrics()
    assert found.accepted_by_source["prediction"] > 0
    assert found.accepted_by_source == sum((one.stats.accepted_by_source for one in results), Counter())
    assert sum(found.accepted_by_source.values()) == found.num_accepted_tokens


def test_time_is_saved_by_finished_requests_alone() -> None:
    recorder = MetricsRecorder()
    for how, plain, taken in (("finished", 5.0, 2.0), ("finished", 1.0, 1.5), ("cancelled", 9.0, 1.0)):
        recorder.ended(how, GenerationStats(plain_seconds=plain, decode_seconds=taken), 0, 0)
    found = recorder.snapshot(running=0, waiting=0, reserved=0, idle=0, most=0)
    assert found.decode_seconds_saved == pytest.approx(2.5)


def test_a_pulse_tells_a_round_that_does_not_end_and_a_request_that_waits() -> None:
    """What a health check asks: a device that hangs shows in the first, too little memory in the second."""
    engine = make_engine(limits=EngineLimits(max_running=1))
    score, in_a_step, go_on = engine.target.score, threading.Semaphore(0), threading.Semaphore(0)

    def held_up(*args: Any, **settings: Any) -> Any:
        in_a_step.release()
        assert go_on.acquire(timeout=60)
        return score(*args, **settings)

    assert engine.pulse() == Pulse(0.0, 0.0)
    engine.target.score = held_up  # type: ignore[method-assign]
    first = engine.submit(PROMPT, SamplingParams(max_tokens=8), speculation=PLAIN)
    assert in_a_step.acquire(timeout=60)
    second = engine.submit(PROMPT, SamplingParams(max_tokens=1), speculation=PLAIN)
    assert 0 < engine.pulse().seconds_in_round <= engine.pulse().seconds_in_round
    go_on.release()
    assert in_a_step.acquire(timeout=60)  # the next step of the first; the second waits for its place
    assert engine.pulse().longest_wait_seconds > 0
    go_on.release(20)
    first.result()
    second.result()
    engine.close()
    assert engine.pulse() == Pulse(0.0, 0.0)
