"""Metrics in Prometheus's text format, under vLLM's names."""

from __future__ import annotations

import re

from precedent import SamplingParams
from precedent.engine.prometheus import prometheus_text
from precedent.testing.pytest_plugin import EngineMaker

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
    assert found[f'vllm:time_to_first_token_seconds{{{labels},quantile="0.5"}}'] > 0


def test_the_text_is_what_prometheus_reads(precedent_engine: EngineMaker) -> None:
    text = prometheus_text([precedent_engine(["x"])])
    assert text.endswith("\n")
    assert [line for line in text.splitlines() if not LINE.fullmatch(line)] == []
    named = re.findall(r"^# TYPE (\S+)", text, re.MULTILINE)
    assert len(named) == len(set(named))


def test_no_engine_has_no_series() -> None:
    assert values(prometheus_text([])) == {}
