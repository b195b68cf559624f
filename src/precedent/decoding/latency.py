"""Inter-token latency: the gaps between emissions to the caller, and percentiles over them."""

from __future__ import annotations

from array import array
from collections.abc import Iterable
from dataclasses import dataclass, field

import numpy as np


@dataclass(frozen=True, slots=True)
class Percentiles:
    """Median and 95th percentile, in seconds; 0 when nothing was measured."""

    p50: float = 0.0
    p95: float = 0.0

    @classmethod
    def of(cls, seconds: Iterable[float]) -> Percentiles:
        """Percentiles of `seconds`, interpolated linearly."""
        values = np.fromiter(seconds, dtype=np.float64)
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
