"""Metrics in Prometheus's text format, under vLLM's names."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Collection, Iterable, Iterator
from itertools import accumulate
from typing import TYPE_CHECKING

from precedent.engine.metrics import EngineMetrics

if TYPE_CHECKING:
    from precedent.engine.engine import Engine
    from precedent_server.usage import Owner

CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"
"""Content-Type header for `prometheus_text`."""

_OF_KEY = re.compile(r'\S+\{(?:replica="[^"]*",)?key="([^"]*)"')
"""The beginning of a series of one key, in which no label can need an escape."""

GAUGES = {
    "vllm:num_requests_running": ("num_requests_running", "Requests that are prefilled or answered now."),
    "vllm:num_requests_waiting": ("num_requests_waiting", "Requests that wait for memory."),
}

COUNTERS = {
    "vllm:prompt_tokens": ("prompt_tokens", "Prompt tokens."),
    "vllm:prefix_cache_queries": ("prompt_tokens", "Prompt tokens that were looked for among kept keys and values."),
    "vllm:prefix_cache_hits": ("cached_prompt_tokens", "Prompt tokens whose keys and values were still there."),
    "vllm:generation_tokens": ("generation_tokens", "Answer tokens."),
    "vllm:request_success": ("num_requests_finished", "Requests that were answered."),
    "vllm:spec_decode_num_drafts": ("num_drafts", "Steps of a request in which tokens were proposed."),
    "vllm:spec_decode_num_draft_tokens": ("num_draft_tokens", "Proposed tokens."),
    "vllm:spec_decode_num_accepted_tokens": ("num_accepted_tokens", "Proposed tokens that were accepted."),
    "precedent:num_steps": ("num_steps", "Target forwards, which requests share."),
    "precedent:requests_cancelled": ("num_requests_cancelled", "Requests that were cancelled."),
    "precedent:requests_failed": ("num_requests_failed", "Requests that failed."),
}

OF_AIDS = {
    "precedent:degraded": ("gauge", "1 while what the label `aid` names is switched off, or on trial, after faults."),
    "precedent:faults_total": ("counter", "Faults by `aid`, each of which made one request slower."),
}
"""Series with a further label, `aid`: what only makes answers faster, once it had a fault."""

REQUESTS_OF_KEY = "precedent:key_requests_total"
REQUESTS_OF_KEY_HELP = "Answered requests by the class of their status (`status`: 2xx, 4xx, 5xx)."
OF_KEYS = {
    "precedent:key_prompt_tokens_total": ("prompt_tokens", "Prompt tokens."),
    "precedent:key_cached_prompt_tokens_total": ("cached_prompt_tokens", "Those whose keys and values were there."),
    "precedent:key_generation_tokens_total": ("completion_tokens", "Answer tokens."),
    "precedent:key_draft_tokens_total": ("draft_tokens", "Proposed tokens of requests that were answered."),
    "precedent:key_accepted_tokens_total": ("accepted_tokens", "Those that were accepted."),
}
"""Counters of the keys that ask, with the labels `key` and `tenant`."""

PER_TOKEN = "inter_token_latency_seconds"
PER_REQUEST = "request_time_per_output_token_seconds"
HISTOGRAMS = {
    "vllm:request_queue_time_seconds": ("request_queue_time_seconds", "From submission to admission."),
    "vllm:time_to_first_token_seconds": ("time_to_first_token_seconds", "From submission to the first token."),
    "vllm:inter_token_latency_seconds": (PER_TOKEN, "Between two tokens."),
    "vllm:time_per_output_token_seconds": (PER_TOKEN, "The same, as older versions of vLLM call it."),
    "vllm:request_time_per_output_token_seconds": (PER_REQUEST, "Between two tokens, on average over a request."),
    "vllm:e2e_request_latency_seconds": ("e2e_request_latency_seconds", "From submission to the end."),
}
"""Latencies of finished requests, in vLLM's buckets."""


def prometheus_text(engines: Iterable[Engine | None]) -> str:
    """All metrics of `engines` in Prometheus's text format, one series per engine; serve it as `CONTENT_TYPE`.

    None keeps the number of an engine that is not loaded now.
    """
    loaded = [(number, one) for number, one in enumerate(engines) if one is not None]
    seen = [(f'model_name="{_escaped(one.model_name)}",engine="{number}"', one.metrics()) for number, one in loaded]
    return "\n".join([*_lines(seen), ""])


def usage_text(used: Collection[tuple[Owner, Counter[str]]]) -> str:
    """Counts by the names of keys and tenants in Prometheus's text format."""
    seen = [(f'key="{_escaped(key)}",tenant="{_escaped(tenant)}"', counts) for (key, tenant), counts in used]
    requests = [
        (f'{labels},status="{status}"', counts[status])
        for labels, counts in seen
        for status in sorted(counts)
        if status.endswith("xx")
    ]
    lines = list(_series(REQUESTS_OF_KEY, "counter", REQUESTS_OF_KEY_HELP, requests))
    for name, (field, help_text) in OF_KEYS.items():
        lines += _series(name, "counter", help_text, [(labels, counts[field]) for labels, counts in seen])
    return "\n".join([*lines, ""])


def for_key(text: str, key: str) -> str:
    """A text without the series of other keys."""
    lines = text.splitlines(keepends=True)
    return "".join(line for line in lines if (found := _OF_KEY.match(line)) is None or found[1] == key)


def metric_text(name: str, kind: str, help_text: str, value: float) -> str:
    """One series without labels."""
    return f"# HELP {name} {help_text}\n# TYPE {name} {kind}\n{name} {value}\n"


def _lines(seen: list[tuple[str, EngineMetrics]]) -> Iterator[str]:
    for name, (field, help_text) in GAUGES.items():
        yield from _series(name, "gauge", help_text, [(labels, getattr(found, field)) for labels, found in seen])
    usage = [(labels, _share(found)) for labels, found in seen]
    yield from _series("vllm:kv_cache_usage_perc", "gauge", "Share of the memory of keys and values, 0 to 1.", usage)
    faults = [(f'{labels},aid="{_escaped(aid)}"', n) for labels, one in seen for aid, n in one.faults.items()]
    off = [(f'{labels},aid="{_escaped(aid)}"', int(aid in one.degraded)) for labels, one in seen for aid in one.faults]
    for (name, (kind, help_text)), values in zip(OF_AIDS.items(), (off, faults), strict=True):
        yield from _series(name, kind, help_text, values)
    for name, (field, help_text) in COUNTERS.items():
        values = [(labels, getattr(found, field)) for labels, found in seen]
        yield from _series(f"{name}_total", "counter", help_text, values)
    for name, (field, help_text) in HISTOGRAMS.items():
        yield from (f"# HELP {name} {help_text}", f"# TYPE {name} histogram")
        for labels, metrics in seen:
            found = metrics.histograms[field]
            bounds = [*map(str, found.bounds), "+Inf"]
            for bound, count in zip(bounds, accumulate(found.counts), strict=True):
                yield f'{name}_bucket{{{labels},le="{bound}"}} {count}'
            yield f"{name}_sum{{{labels}}} {found.sum}"
            yield f"{name}_count{{{labels}}} {sum(found.counts)}"


def _series(name: str, kind: str, help_text: str, values: Iterable[tuple[str, float]]) -> Iterator[str]:
    yield from (f"# HELP {name} {help_text}", f"# TYPE {name} {kind}")
    yield from (f"{name}{{{labels}}} {value}" for labels, value in values)


def _share(found: EngineMetrics) -> float:
    return (found.kv_cache_reserved_bytes + found.kv_cache_idle_bytes) / found.kv_cache_max_bytes


def _escaped(text: str) -> str:
    return text.replace("\\", "\\\\").replace('"', '\\"').replace("\n", "\\n")
