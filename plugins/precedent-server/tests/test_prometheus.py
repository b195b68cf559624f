"""Metrics in the form for Prometheus: every engine's counts and latencies under vLLM's names."""

from __future__ import annotations

import re

import pytest

from precedent.config import SamplingParams
from precedent_server.prometheus import prometheus_text
from precedent_testing.pytest_plugin import EngineMaker

LINE = re.compile(r"# (HELP|TYPE) [a-z_:0-9]+ .+|[a-z_:0-9]+\{.*\} [0-9.e+-]+")
BUCKET = re.compile(r'(vllm:\w+)_bucket\{.*engine="0",le="(.+)"\} (\d+)')


def values(text: str) -> dict[str, float]:
    lines = [line for line in text.splitlines() if not line.startswith("#")]
    return {name: float(value) for name, _, value in (line.rpartition(" ") for line in lines)}


def test_counts_and_latencies_of_every_engine_stand_under_vllms_names(precedent_engine: EngineMaker) -> None:
    first, second = precedent_engine(lambda p: "one two", name='the "first"'), precedent_engine(["x"])
    prompt = first.tokenizer.encode("hello")
    results = [first.submit(prompt, SamplingParams(), prediction=text).result() for text in ("one two", "")]
    found = values(text := prometheus_text([first, second]))
    labels = 'model_name="the \\"first\\"",engine="0"'
    assert found[f"vllm:generation_tokens_total{{{labels}}}"] == sum(len(one.token_ids) for one in results)
    assert found[f"vllm:request_success_total{{{labels}}}"] == 2
    for name in ("num_drafts", "num_draft_tokens", "num_accepted_tokens"):
        expected = sum(getattr(one.stats, name) for one in results)
        assert found[f"vllm:spec_decode_{name}_total{{{labels}}}"] == expected > 0
    assert found['vllm:request_success_total{model_name="scripted-model",engine="1"}'] == 0
    later = sum(sum(result.stats.inter_token.num_tokens) for result in results)
    per_token = dict.fromkeys(("inter_token_latency", "time_per_output_token"), later)
    per_request = dict.fromkeys(("request_queue_time", "time_to_first_token", "e2e_request_latency"), 2)
    for name, number in (per_request | per_token).items():
        series = f"vllm:{name}_seconds"
        counts = [(float(bound), int(count)) for of, bound, count in BUCKET.findall(text) if of == series]
        assert counts == sorted(counts)
        assert counts[-1] == (float("inf"), number)
        assert found[f"{series}_count{{{labels}}}"] == number
    seconds = sum(result.stats.total_seconds for result in results)
    assert found[f"vllm:e2e_request_latency_seconds_sum{{{labels}}}"] == pytest.approx(seconds)
    assert [line for line in text.splitlines() if not LINE.fullmatch(line)] == []
    named = re.findall(r"^# TYPE (\S+)", text, re.MULTILINE)
    assert len(named) == len(set(named))
