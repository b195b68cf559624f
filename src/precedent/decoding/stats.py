"""Statistics of one request. Names follow vLLM's; `num_accepted_tokens` excludes recovered and bonus tokens."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from precedent.config import is_lossy
from precedent.decoding.latency import InterTokenLatency
from precedent.tree import CandidateTree

TARGET = "target"
"""The source of a token that the target model chose itself (recovered or bonus)."""


@dataclass(slots=True)
class GenerationStats:
    """Counts (tokens, steps) and wall-clock seconds of one request; `num_drafts` counts steps with any proposal.

    `num_lookaheads` counts the steps after whose forward a draft model had samples ready that it drew during forwards
    (`decoding.pearl`). `num_lookaheads_used` counts those of them whose committed text agreed with these samples, so
    that some remained for the next tree.

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
    num_lookaheads: int = 0
    num_lookaheads_used: int = 0
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
        """Speed relative to plain steps, by their measured cost; None if none was measured."""
        return self.plain_seconds / self.decode_seconds if self.plain_seconds and self.decode_seconds else None

    def as_dict(self) -> dict[str, Any]:
        """The counts, latencies and the estimate for `response_metadata`; seconds are whole microseconds."""
        speedup = self.estimated_speedup
        return {
            "mode": self.mode,
            "lossless": not is_lossy(self.mode),
            "bitwise": self.bitwise,
            "num_steps": self.num_steps,
            "num_draft_tokens": self.num_draft_tokens,
            "num_accepted_tokens": self.num_accepted_tokens,
            "drafted_by_source": dict(self.drafted_by_source),
            "accepted_by_source": dict(self.accepted_by_source),
            "estimated_speedup": None if speedup is None else round(speedup, 2),
            **({"num_lookaheads": self.num_lookaheads} if self.num_lookaheads else {}),
            **({"num_lookaheads_used": self.num_lookaheads_used} if self.num_lookaheads else {}),
            "latency_microseconds": self.latency_microseconds(),
            **({"spent_total_variation": f"{self.spent_tv:.6f}"} if is_lossy(self.mode) else {}),
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
