"""Statistics of one request. Names follow vLLM's; `num_accepted_tokens` excludes recovered and bonus tokens."""

from __future__ import annotations

from array import array
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from precedent.tree import CandidateTree
from precedent.verify import verifier_of

TARGET = "target"
"""The source of a token that the target model chose itself (recovered or bonus)."""


@dataclass(frozen=True, slots=True)
class Percentiles:
    """Median and 95th percentile, in seconds; 0 when nothing was measured."""

    p50: float = 0.0
    p95: float = 0.0

    @classmethod
    def of(cls, seconds: Iterable[float]) -> Percentiles:
        """Percentiles of `seconds`, interpolated linearly; what is not finite does not count."""
        values = np.fromiter(seconds, dtype=np.float64)
        values = values[np.isfinite(values)]
        if not values.size:
            return cls()
        p50, p95 = np.percentile(values, (50, 95)).tolist()
        return cls(p50, p95)


@dataclass(slots=True)
class InterTokenLatency:
    """The gaps between one request's emissions.

    A step delivers several tokens at once, so each token counts as its emission's gap divided by the number of tokens;
    these add up to the answer's time. The first emission has no gap: it is the time to first token.
    """

    gaps: array[float] = field(default_factory=lambda: array("d"))
    num_tokens: array[int] = field(default_factory=lambda: array("L"))

    def observe(self, gap: float, num_tokens: int) -> None:
        """Record an emission of `num_tokens`, `gap` seconds after the previous one."""
        self.gaps.append(gap)
        self.num_tokens.append(num_tokens)

    def per_token(self) -> list[float]:
        """Seconds per token of each emission except the first."""
        return [gap / count for gap, count in zip(self.gaps, self.num_tokens, strict=True) if count]

    def percentiles(self) -> Percentiles:
        """Percentiles over all tokens except those of the first emission, in seconds per token."""
        counts = [count for count in self.num_tokens if count]
        return Percentiles.of(np.repeat(self.per_token(), counts).tolist())

    @property
    def longest_gap(self) -> float:
        """The longest time between two emissions, in seconds."""
        return max(self.gaps, default=0.0)


@dataclass(slots=True)
class GenerationStats:
    """Counts (tokens, steps) and wall-clock seconds of one request; `num_drafts` counts steps with any proposal.

    `extra` holds the counts of a plugin's loop, by name.

    A step that several requests share counts in full for each of them. `queue_seconds` runs from submission to
    admission; `first_token_seconds` and `total_seconds` run from submission too. `plain_seconds` is what plain steps of
    the same requests would have taken for the same number of tokens, by the cost curve.
    """

    mode: str = "greedy"
    bitwise: bool = False
    num_steps: int = 0
    num_output_tokens: int = 0
    num_drafts: int = 0
    num_draft_tokens: int = 0
    num_accepted_tokens: int = 0
    drafted_by_source: Counter[str] = field(default_factory=Counter)
    accepted_by_source: Counter[str] = field(default_factory=Counter)
    queue_seconds: float = 0.0
    prefill_seconds: float = 0.0
    decode_seconds: float = 0.0
    plain_seconds: float = 0.0
    draft_seconds: float = 0.0
    draft_model_seconds: float = 0.0
    forward_seconds: float = 0.0
    verify_seconds: float = 0.0
    first_token_seconds: float = 0.0
    total_seconds: float = 0.0
    inter_token: InterTokenLatency = field(default_factory=InterTokenLatency)
    extra: Counter[str] = field(default_factory=Counter)
    spent_tv: float = 0.0
    """Total variation spent by a lossy mode, summed over steps; bounds how far the answer's distribution moved."""

    def count(self, tree: CandidateTree, sources: Sequence[str], spent_tv: float) -> None:
        """Count a step: what was proposed, and the source of each committed token."""
        self.num_steps += 1
        self.num_drafts += bool(tree)
        self.num_output_tokens += len(sources)
        self.num_draft_tokens += len(tree)
        self.num_accepted_tokens += len(sources) - sources.count(TARGET)
        self.drafted_by_source.update([names[0] for names in tree.sources])
        self.accepted_by_source.update([source for source in sources if source != TARGET])
        self.spent_tv += spent_tv

    @property
    def tokens_per_step(self) -> float:
        """Committed tokens per target forward, recovered and bonus tokens included."""
        return self.num_output_tokens / self.num_steps if self.num_steps else 0.0

    @property
    def tokens_per_second(self) -> float:
        """Output tokens per second of decoding, without prefill."""
        return self.num_output_tokens / self.decode_seconds if self.decode_seconds else 0.0

    @property
    def estimated_speedup(self) -> float | None:
        """Speed relative to plain steps, by their measured cost: None if none was measured, 1 if all were plain."""
        if self.plain_seconds and not self.num_drafts:
            return 1.0
        return self.plain_seconds / self.decode_seconds if self.plain_seconds and self.decode_seconds else None

    def as_dict(self) -> dict[str, Any]:
        """The counts, latencies and the estimate for `response_metadata`; seconds are whole microseconds."""
        speedup, lossy = self.estimated_speedup, verifier_of(self.mode).lossy
        return {
            "mode": self.mode,
            "lossless": not lossy,
            "bitwise": self.bitwise,
            "num_steps": self.num_steps,
            "num_draft_tokens": self.num_draft_tokens,
            "num_accepted_tokens": self.num_accepted_tokens,
            "drafted_by_source": dict(self.drafted_by_source),
            "accepted_by_source": dict(self.accepted_by_source),
            "estimated_speedup": None if speedup is None else round(speedup, 2),
            **self.extra,
            "latency_microseconds": self.latency_microseconds(),
            **({"spent_total_variation": f"{self.spent_tv:.6f}"} if lossy else {}),
        }

    def latency_microseconds(self) -> dict[str, int]:
        """Latencies under vLLM's names; `inter_token_latency` is per token, `longest_gap` between two emissions."""
        between = self.inter_token.percentiles()
        seconds = {
            "request_queue_time": self.queue_seconds,
            "request_decode_time": self.decode_seconds,
            "time_to_first_token": self.first_token_seconds,
            "inter_token_latency_p50": between.p50,
            "inter_token_latency_p95": between.p95,
            "longest_gap": self.inter_token.longest_gap,
            "e2e_request_latency": self.total_seconds,
        }
        return {name: round(value * 1e6) for name, value in seconds.items()}
