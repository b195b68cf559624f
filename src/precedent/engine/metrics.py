"""Metrics of an engine: what it has done so far, and how long its callers waited. Names follow vLLM's."""

from __future__ import annotations

import threading
from bisect import bisect_left
from collections import Counter, deque
from collections.abc import Mapping
from dataclasses import dataclass, field

from precedent.decoding.stats import GenerationStats, Percentiles
from precedent.runtime.fence import Fences

QUICK = (
    *(
        0.001,
        0.005,
        0.01,
        0.02,
        0.04,
        0.06,
        0.08,
        0.1,
        0.25,
        0.5,
        0.75,
        1.0,
        2.5,
        5.0,
        7.5,
        10.0,
        20.0,
        40.0,
        80.0,
        160.0,
    ),
    *(640.0, 2560.0),
)
PER_TOKEN = (
    *(0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5, 0.75, 1.0, 2.5, 5.0, 7.5, 10.0, 20.0, 40.0, 80.0),
)
LONG = (
    *(0.3, 0.5, 0.8, 1.0, 1.5, 2.0, 2.5, 5.0, 10.0, 15.0, 20.0, 30.0, 40.0, 50.0, 60.0, 120.0, 240.0, 480.0, 960.0),
    *(1920.0, 7680.0),
)
"""vLLM's buckets: of first tokens, of tokens, and of whole requests."""

BUCKETS: Mapping[str, tuple[float, ...]] = {
    "request_queue_time_seconds": LONG,
    "time_to_first_token_seconds": QUICK,
    "inter_token_latency_seconds": PER_TOKEN,
    "request_time_per_output_token_seconds": PER_TOKEN,
    "e2e_request_latency_seconds": LONG,
}
"""The latencies of finished requests since the start, each with the upper bounds of its buckets."""

RECENT_REQUESTS = 1000
RECENT_EMISSIONS = 10_000
"""Number of recent requests, and of recent emissions, that percentiles cover."""


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

    def copy(self) -> Histogram:
        """The same numbers, which no longer grow."""
        return Histogram(self.bounds, list(self.counts), self.sum)


@dataclass(frozen=True, slots=True)
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
    num_requests_finished: int
    num_requests_cancelled: int
    num_requests_failed: int
    prompt_tokens: int
    cached_prompt_tokens: int
    generation_tokens: int
    num_steps: int
    num_request_steps: int
    num_drafts: int
    num_draft_tokens: int
    num_accepted_tokens: int
    accepted_by_source: Mapping[str, int]
    decode_seconds_saved: float
    request_queue_time_seconds: Percentiles
    time_to_first_token_seconds: Percentiles
    inter_token_latency_seconds: Percentiles
    e2e_request_latency_seconds: Percentiles
    histograms: Mapping[str, Histogram]
    degraded: tuple[str, ...] = ()
    faults: Mapping[str, int] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Pulse:
    """What tells whether an engine gets on, in seconds.

    `seconds_in_round` is 0 between rounds; a round is one piece of a prompt and one step, so that a long one means a
    stuck device. `longest_wait_seconds` is how long the first waiting request has waited for memory.
    """

    seconds_in_round: float
    longest_wait_seconds: float


COUNTED = (
    "num_requests_finished",
    "num_requests_cancelled",
    "num_requests_failed",
    "prompt_tokens",
    "cached_prompt_tokens",
    "generation_tokens",
    "num_steps",
    "num_request_steps",
    "num_drafts",
    "num_draft_tokens",
    "num_accepted_tokens",
)


def _recent(length: int) -> deque[float]:
    return deque(maxlen=length)


@dataclass(slots=True)
class MetricsRecorder:
    """Records metrics: written by the engine's worker, read on any thread."""

    counts: dict[str, int] = field(default_factory=lambda: dict.fromkeys(COUNTED, 0))
    accepted_by_source: Counter[str] = field(default_factory=Counter)
    decode_seconds_saved: float = 0.0
    queue: deque[float] = field(default_factory=lambda: _recent(RECENT_REQUESTS))
    first_token: deque[float] = field(default_factory=lambda: _recent(RECENT_REQUESTS))
    request: deque[float] = field(default_factory=lambda: _recent(RECENT_REQUESTS))
    per_token: deque[float] = field(default_factory=lambda: _recent(RECENT_EMISSIONS))
    histograms: dict[str, Histogram] = field(
        default_factory=lambda: {name: Histogram(bounds) for name, bounds in BUCKETS.items()}
    )
    _lock: threading.Lock = field(default_factory=threading.Lock)

    def stepped(self, num_requests: int, num_tokens: int) -> None:
        """Count one target forward, the requests that shared it, and the tokens that it brought them."""
        with self._lock:
            self.counts["num_steps"] += 1
            self.counts["num_request_steps"] += num_requests
            self.counts["generation_tokens"] += num_tokens

    def ended(self, how: str, stats: GenerationStats, prompt_tokens: int, cached_prompt_tokens: int) -> None:
        """Count a request that ended; `how` is finished, cancelled or failed. Only finished ones record latencies."""
        with self._lock:
            self.counts[f"num_requests_{how}"] += 1
            self.counts["prompt_tokens"] += prompt_tokens
            self.counts["cached_prompt_tokens"] += cached_prompt_tokens
            self.counts["num_drafts"] += stats.num_drafts
            self.counts["num_draft_tokens"] += stats.num_draft_tokens
            self.counts["num_accepted_tokens"] += stats.num_accepted_tokens
            self.accepted_by_source.update(stats.accepted_by_source)
            if how == "finished":
                self.queue.append(stats.queue_seconds)
                self.first_token.append(stats.first_token_seconds)
                self.request.append(stats.total_seconds)
                self.per_token.extend(stats.inter_token.per_token())
                self.decode_seconds_saved += stats.plain_seconds - stats.decode_seconds
                self._observe(stats)

    def _observe(self, stats: GenerationStats) -> None:
        found = self.histograms
        found["request_queue_time_seconds"].observe(stats.queue_seconds)
        found["time_to_first_token_seconds"].observe(stats.first_token_seconds)
        found["e2e_request_latency_seconds"].observe(stats.total_seconds)
        for gap, number in zip(stats.inter_token.gaps, stats.inter_token.num_tokens, strict=True):
            if number:
                found["inter_token_latency_seconds"].observe(gap / number, number)
        if later := sum(stats.inter_token.num_tokens):
            found["request_time_per_output_token_seconds"].observe(sum(stats.inter_token.gaps) / later)

    def snapshot(
        self, *, running: int, waiting: int, reserved: int, idle: int, most: int, fences: Fences | None = None
    ) -> EngineMetrics:
        """The counts, plus the engine's current load (requests; bytes of keys and values) and what its fences say."""
        with self._lock:
            counts = dict(self.counts)
            accepted, saved = dict(self.accepted_by_source), self.decode_seconds_saved
            histograms = {name: one.copy() for name, one in self.histograms.items()}
            windows = [list(window) for window in (self.queue, self.first_token, self.per_token, self.request)]
        queue, first_token, per_token, request = map(Percentiles.of, windows)
        return EngineMetrics(
            num_requests_running=running,
            num_requests_waiting=waiting,
            kv_cache_reserved_bytes=reserved,
            kv_cache_idle_bytes=idle,
            kv_cache_max_bytes=most,
            accepted_by_source=accepted,
            decode_seconds_saved=saved,
            request_queue_time_seconds=queue,
            time_to_first_token_seconds=first_token,
            inter_token_latency_seconds=per_token,
            e2e_request_latency_seconds=request,
            histograms=histograms,
            degraded=() if fences is None else fences.degraded(),
            faults={} if fences is None else fences.faults(),
            **counts,
        )
