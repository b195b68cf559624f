"""Metrics in the form for Prometheus: every engine's counts and latencies under vLLM's names."""

from __future__ import annotations

import re
from collections import Counter

import pytest

from precedent.config import SamplingParams
from precedent_server.prometheus import prometheus_text
from precedent_testing.pytest_plugin import EngineMaker

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
