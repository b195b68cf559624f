"""What one request counted. Names follow vLLM's; `num_accepted_tokens` excludes recovered and bonus tokens."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field
from typing import Any

from precedent.config import is_lossy

TARGET = "target"
"""The source of a token that the target model chose itself (recovered or bonus)."""


@dataclass(slots=True)
class GenerationStats:
    """Counts (tokens, steps) and wall-clock seconds of one request."""

    mode: str = "greedy"
    num_steps: int = 0
    num_output_tokens: int = 0
    num_draft_tokens: int = 0
    num_accepted_tokens: int = 0
    drafted_by_source: Counter[str] = field(default_factory=Counter)
    accepted_by_source: Counter[str] = field(default_factory=Counter)
    prefill_seconds: float = 0.0
    decode_seconds: float = 0.0
    draft_seconds: float = 0.0
    draft_model_seconds: float = 0.0
    forward_seconds: float = 0.0
    verify_seconds: float = 0.0
    first_token_seconds: float = 0.0
    total_seconds: float = 0.0
    spent_tv: float = 0.0
    """Total variation spent by a lossy mode, summed over steps: a bound on how far the answer's law may have moved."""

    @property
    def tokens_per_step(self) -> float:
        """Committed tokens per target forward, recovered and bonus tokens included."""
        return self.num_output_tokens / self.num_steps if self.num_steps else 0.0

    @property
    def tokens_per_second(self) -> float:
        """Decode only, without prefill."""
        return self.num_output_tokens / self.decode_seconds if self.decode_seconds else 0.0

    def as_dict(self) -> dict[str, Any]:
        """The counts for `response_metadata["speculation"]`: no floats, which two merged chunks could not add."""
        return {
            "mode": self.mode,
            "lossless": not is_lossy(self.mode),
            "num_steps": self.num_steps,
            "num_draft_tokens": self.num_draft_tokens,
            "num_accepted_tokens": self.num_accepted_tokens,
            "drafted_by_source": dict(self.drafted_by_source),
            "accepted_by_source": dict(self.accepted_by_source),
            **({"spent_total_variation": f"{self.spent_tv:.6f}"} if is_lossy(self.mode) else {}),
        }
