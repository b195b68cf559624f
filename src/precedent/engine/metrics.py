"""Metrics of an engine: what it has done so far, and how long its callers waited. Names follow vLLM's."""

from __future__ import annotations

import threading
from bisect import bisect_left
from collections import Counter, deque
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from precedent.decoding.stats import GenerationStats, Percentiles

SECONDS = (1.0, 2.5, 5.0, 7.5, 10.0, 20.0, 40.0, 80.0)
MINUTES = (60.0, 120.0, 240.0, 480.0, 960.0, 1920.0, 7680.0)
QUICK = (0.001, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.25, 0.5, 0.75, *SECONDS, 160.0, 640.0, 2560.0)
PER_TOKEN = (0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5, 0.75, *SECONDS)
LONG = (0.3, 0.5, 0.8, 1.0, 1.5, 2.0, 2.5, 5.0, 10.0, 15.0, 20.0, 30.0, 40.0, 50.0, *MINUTES)
"""vLLM's buckets: of first tokens, of tokens, and of whole requests."""

BUCKETS: Mapping[str, tuple[float, ...]] = {
    "request_queue_time_seconds": LONG,
    "time_to_first_token_seconds": QUICK,
    "inter_token_latency_seconds": PER_TOKEN,
    "request_time_per_output_token_seconds": PER_TOKEN,
    "e2e_request_latency_seconds": LONG,
}
"""The latencies of finished requests since the start, each with the upper bounds of its buckets."""

RECENT = {
    "request_queue_time_seconds": 1000,
    "time_to_first_token_seconds": 1000,
    "inter_token_latency_seconds": 10_000,
    "e2e_request_latency_seconds": 1000,
}
"""Number of recent values (of requests, or of emissions) that the percentiles of a latency cover."""


@dataclass(slots=True)
class Histogram:
    """How many values, in seconds, lay in each bucket; the last bucket has no upper bound."""

    bounds: tuple[float, ...]
    counts: list[int] = field(default_factory=list)
    sum: float = 0.0

    def __post_init__(self) -> None:
        self.counts = self.counts or [0] * (len(self.bounds) + 1)

    def observe(self, value: float, times: int = 1) -> None:
        """Count a value."""
        self.counts[bisect_left(self.bounds, value)] += times
        self.sum += value * times


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineMetrics:
    """A snapshot: the current load, counts since the engine started, and latencies in seconds over a recent window.

    `num_steps` counts target forwards, which requests share; `num_request_steps` counts each once per request in it.
    These and `generation_tokens` count at every step, the other tokens when their request ends. Tokens of cancelled and
    failed requests count too. `decode_seconds_saved` is what plain steps would have taken for the answers of finished
    requests, by the cost curve, less what their steps took; it is negative if speculation cost time.
    `inter_token_latency_seconds` has one value per emission: its gap divided by its number of tokens. `histograms` has
    the latencies of all finished requests by name; there each token of an emission counts. `degraded` names
    what is switched off because it failed; answers are the same without it, only slower. `faults` counts such failures.
    """

    num_requests_running: int
    num_requests_waiting: int
    kv_cache_reserved_bytes: int
    kv_cache_idle_bytes: int
    kv_cache_max_bytes: int
    num_requests_finished: int = 0
    num_requests_cancelled: int = 0
    num_requests_failed: int = 0
    prompt_tokens: int = 0
    cached_prompt_tokens: int = 0
    generation_tokens: int = 0
    num_steps: int = 0
    num_request_steps: int = 0
    num_drafts: int = 0
    num_draft_tokens: int = 0
    num_accepted_tokens: int = 0
    accepted_by_source: Mapping[str, int]
    decode_seconds_saved: float
    request_queue_time_seconds: Percentiles
    time_to_first_token_seconds: Percentiles
    inter_token_latency_seconds: Percentiles
    e2e_request_latency_seconds: Percentiles
    histograms: Mapping[str, Histogram]
    degraded: tuple[str, ...] = ()
    faults: Mapping[str, int] = field(default_factory=dict)


class MetricsRecorder:
    """Records metrics: written by the engine's worker, read on any thread."""

    def __init__(self) -> None:
        self._counts, self._accepted, self._saved = Counter[str](), Counter[str](), 0.0
        self._recent = {name: deque[float](maxlen=length) for name, length in RECENT.items()}
        self._histograms = {name: Histogram(bounds) for name, bounds in BUCKETS.items()}
        self._lock = threading.Lock()

    def stepped(self, num_requests: int, num_tokens: int) -> None:
        """Count one target forward, the requests that shared it, and the tokens that it brought them."""
        with self._lock:
            self._counts.update(num_steps=1, num_request_steps=num_requests, generation_tokens=num_tokens)

    def ended(self, how: str, stats: GenerationStats, prompt_tokens: int, cached_prompt_tokens: int) -> None:
        """Count a request that ended; `how` is finished, cancelled or failed. Only finished ones record latencies."""
        with self._lock:
            self._counts.update(
                {f"num_requests_{how}": 1},
                prompt_tokens=prompt_tokens,
                cached_prompt_tokens=cached_prompt_tokens,
                num_drafts=stats.num_drafts,
                num_draft_tokens=stats.num_draft_tokens,
                num_accepted_tokens=stats.num_accepted_tokens,
            )
            self._accepted.update(stats.accepted_by_source)
            if how == "finished":
                self._saved += stats.plain_seconds - stats.decode_seconds
                self._observe(stats)

    def _observe(self, stats: GenerationStats) -> None:
        for name, seconds in (
            ("request_queue_time_seconds", stats.queue_seconds),
            ("time_to_first_token_seconds", stats.first_token_seconds),
            ("e2e_request_latency_seconds", stats.total_seconds),
        ):
            self._histograms[name].observe(seconds)
            self._recent[name].append(seconds)
        between = stats.inter_token
        self._recent["inter_token_latency_seconds"].extend(between.per_token())
        for gap, number in zip(between.gaps, between.num_tokens, strict=True):
            if number:
                self._histograms["inter_token_latency_seconds"].observe(gap / number, number)
        if later := sum(between.num_tokens):
            self._histograms["request_time_per_output_token_seconds"].observe(sum(between.gaps) / later)

    def snapshot(self, **load: Any) -> EngineMetrics:
        """The counts and latencies, together with the engine's current load and faults, by their names."""
        with self._lock:
            counts, accepted, saved = dict(self._counts), dict(self._accepted), self._saved
            histograms = {name: Histogram(one.bounds, [*one.counts], one.sum) for name, one in self._histograms.items()}
            recent = {name: list(values) for name, values in self._recent.items()}
        latencies = {name: Percentiles.of(values) for name, values in recent.items()}
        found = {**counts, **latencies, **load}
        return EngineMetrics(accepted_by_source=accepted, decode_seconds_saved=saved, histograms=histograms, **found)
