"""What `Engine.metrics()` says that no single request does."""

from __future__ import annotations

from collections import Counter

import pytest

from precedent import SamplingParams
from precedent.decoding.stats import GenerationStats
from precedent.engine.metrics import MetricsRecorder
from precedent.testing.pytest_plugin import EngineMaker


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
