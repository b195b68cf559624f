"""What an engine tells about itself: metrics, their form for Prometheus, and whether it is healthy."""

from __future__ import annotations

import re
import threading
from collections import Counter
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
from precedent_server.prometheus import prometheus_text
from precedent_testing.pytest_plugin import EngineMaker
from precedent_testing.tiny_models import byte_tokenizer, tiny_causal_lm

LINE = re.compile(r"# (HELP|TYPE) [a-z_:0-9]+ .+|[a-z_:0-9]+\{.*\} [0-9.e+-]+")
BUCKET = re.compile(r'(vllm:\w+)_bucket\{.*le="(.+)"\} (\d+)')


def values(text: str) -> dict[str, float]:
    lines = [line for line in text.splitlines() if not line.startswith("#")]
    return {name: float(value) for name, _, value in (line.rpartition(" ") for line in lines)}


def test_counts_of_every_engine_stand_under_vllms_names(precedent_engine: EngineMaker) -> None:
    first, second = precedent_engine(lambda p: "one two", name='the "first"'), precedent_engine(["x"])
    prompt = first.tokenizer.encode("hello")
    results = [first.submit(prompt, SamplingParams(), prediction=text).result() for text in ("one two", "")]
    counted = first.metrics()
    assert counted.accepted_by_source["prediction"] > 0
    assert counted.accepted_by_source == sum((one.stats.accepted_by_source for one in results), Counter())
    assert sum(counted.accepted_by_source.values()) == counted.num_accepted_tokens
    saved = sum(one.stats.plain_seconds - one.stats.decode_seconds for one in results)
    assert counted.decode_seconds_saved == pytest.approx(saved)
    found = values(text := prometheus_text([first, second]))
    labels = 'model_name="the \\"first\\"",engine="0"'
    assert found[f"vllm:generation_tokens_total{{{labels}}}"] == sum(len(one.token_ids) for one in results)
    assert found[f"vllm:request_success_total{{{labels}}}"] == 2
    for name in ("num_drafts", "num_draft_tokens", "num_accepted_tokens"):
        expected = sum(getattr(one.stats, name) for one in results)
        assert found[f"vllm:spec_decode_{name}_total{{{labels}}}"] == expected > 0
    assert found['vllm:request_success_total{model_name="scripted-model",engine="1"}'] == 0
    assert text.endswith("\n")
    assert [line for line in text.splitlines() if not LINE.fullmatch(line)] == []
    named = re.findall(r"^# TYPE (\S+)", text, re.MULTILINE)
    assert len(named) == len(set(named))
    assert values(prometheus_text([])) == {}


def test_latencies_are_histograms_under_vllms_names(precedent_engine: EngineMaker) -> None:
    engine = precedent_engine(lambda p: "one two three")
    results = [engine.submit(engine.tokenizer.encode("hello"), SamplingParams()).result() for _ in range(3)]
    found, buckets = values(text := prometheus_text([engine])), BUCKET.findall(prometheus_text([engine]))
    later = sum(sum(result.stats.inter_token.num_tokens) for result in results)
    labels = 'model_name="scripted-model",engine="0"'
    for name, number in {
        "request_queue_time_seconds": 3,
        "time_to_first_token_seconds": 3,
        "e2e_request_latency_seconds": 3,
        "request_time_per_output_token_seconds": 3,
        "inter_token_latency_seconds": later,
        "time_per_output_token_seconds": later,
    }.items():
        assert f"# TYPE vllm:{name} histogram" in text
        counts = [(float(bound), int(count)) for of, bound, count in buckets if of == f"vllm:{name}"]
        assert counts == sorted(counts)
        assert [count for _, count in counts] == sorted(count for _, count in counts)
        assert counts[-1] == (float("inf"), number)
        assert found[f"vllm:{name}_count{{{labels}}}"] == number
    seconds = sum(result.stats.total_seconds for result in results)
    assert found[f"vllm:e2e_request_latency_seconds_sum{{{labels}}}"] == pytest.approx(seconds)


# Health


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
    threading.Event().wait(0.02)
    assert "has not advanced for" in tried.engine.health(stalled_seconds=0.01).failing
    tried.go_on.release()
    assert tried.in_a_step.acquire(timeout=60)  # the next step; the second request waits for its place
    assert tried.engine.longest_wait() > 0
    tried.go_on.release(20)
    running.result()
    waiting.result()
    threading.Event().wait(0.02)
    assert tried.engine.health(stalled_seconds=0.01).status == "ok", "an idle engine is not stalled"
    tried.engine.close()
    assert tried.engine.health().failing == "the engine is closed"
    assert tried.engine.longest_wait() == 0.0
