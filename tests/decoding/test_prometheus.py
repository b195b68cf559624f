"""Metrics in Prometheus's text format, under vLLM's names."""

from __future__ import annotations

import re

import pytest

from precedent import SamplingParams
from precedent.engine.prometheus import prometheus_text
from precedent_testing.pytest_plugin import EngineMaker

LINE = re.compile(r"# (HELP|TYPE) [a-z_:0-9]+ .+|[a-z_:0-9]+\{.*\} [0-9.e+-]+")


def values(text: str) -> dict[str, float]:
    lines = [line for line in text.splitlines() if not line.startswith("#")]
    return {name: float(value) for name, _, value in (line.rpartition(" ") for line in lines)}


def test_counts_of_every_engine_stand_under_vllms_names(precedent_engine: EngineMaker) -> None:
    first, second = precedent_engine(lambda p: "one two", name='the "first"'), precedent_engine(["x"])
    prompt = first.tokenizer.encode("hello")
    plain = first.submit(prompt, SamplingParams()).result()
    drafted = first.submit(prompt, SamplingParams(), prediction="one two").result()
    found = values(prometheus_text([first, second]))
    labels = 'model_name="the \\"first\\"",engine="0"'
    assert found[f"vllm:generation_tokens_total{{{labels}}}"] == len(plain.token_ids) + len(drafted.token_ids)
    assert found[f"vllm:request_success_total{{{labels}}}"] == 2
    for name in ("num_drafts", "num_draft_tokens", "num_accepted_tokens"):
        expected = getattr(plain.stats, name) + getattr(drafted.stats, name)
        assert found[f"vllm:spec_decode_{name}_total{{{labels}}}"] == expected
    assert drafted.stats.num_accepted_tokens > 0
    assert found['vllm:request_success_total{model_name="scripted-model",engine="1"}'] == 0


BUCKET = re.compile(r'(vllm:\w+)_bucket\{.*le="(.+)"\} (\d+)')


def test_latencies_are_histograms_under_vllms_names(precedent_engine: EngineMaker) -> None:
    engine = precedent_engine(lambda p: "one two three")
    results = [engine.submit(engine.tokenizer.encode("hello"), SamplingParams()).result() for _ in range(3)]
    text = prometheus_text([engine])
    found = values(text)
    later = sum(len(result.token_ids) for result in results) - sum(
        len(result.token_ids) - sum(result.stats.inter_token.num_tokens) for result in results
    )
    numbers = {
        "request_queue_time_seconds": 3,
        "time_to_first_token_seconds": 3,
        "e2e_request_latency_seconds": 3,
        "request_time_per_output_token_seconds": 3,
        "inter_token_latency_seconds": later,
        "time_per_output_token_seconds": later,
    }
    labels = 'model_name="scripted-model",engine="0"'
    for name, number in numbers.items():
        assert f"# TYPE vllm:{name} histogram" in text
        buckets = [(bound, int(count)) for of, bound, count in BUCKET.findall(text) if of == f"vllm:{name}"]
        counts = [count for _, count in buckets]
        assert counts == sorted(counts)
        assert buckets[-1] == ("+Inf", number)
        assert [float(bound) for bound, _ in buckets] == sorted(float(bound) for bound, _ in buckets)
        assert found[f"vllm:{name}_count{{{labels}}}"] == number
    assert found[f"vllm:e2e_request_latency_seconds_sum{{{labels}}}"] == pytest.approx(
        sum(result.stats.total_seconds for result in results)
    )


def test_the_text_is_what_prometheus_reads(precedent_engine: EngineMaker) -> None:
    text = prometheus_text([precedent_engine(["x"])])
    assert text.endswith("\n")
    assert [line for line in text.splitlines() if not LINE.fullmatch(line)] == []
    named = re.findall(r"^# TYPE (\S+)", text, re.MULTILINE)
    assert len(named) == len(set(named))


def test_no_engine_has_no_series() -> None:
    assert values(prometheus_text([])) == {}
