"""How often does a candidate with these features come true? Beta-Bernoulli bins, learned online.

Labels are unbiased: once a node is accepted, the outcome of each of its children is known. Features are small tuples of
binned numbers, so evidence is shared between requests (retrieval research: calibrated estimates beat raw vote shares).
"""

from __future__ import annotations

from collections.abc import Hashable
from dataclasses import dataclass, field

PRIOR_STRENGTH = 4.0
"""Observations that the drafter's own estimate is worth before a bin speaks for itself."""

HALF_LIFE = 400.0
"""Observations after which an outcome counts half: traffic changes."""


@dataclass(slots=True)
class Bin:
    """Decayed counts of outcomes."""

    accepted: float = 0.0
    seen: float = 0.0

    def observe(self, accepted: bool) -> None:
        """Count one outcome."""
        decay = 0.5 ** (1.0 / HALF_LIFE)
        self.accepted = self.accepted * decay + accepted
        self.seen = self.seen * decay + 1.0


@dataclass(slots=True)
class Calibration:
    """Acceptance probability per bin; an unseen bin answers with the drafter's own estimate."""

    bins: dict[Hashable, Bin] = field(default_factory=dict)

    def probability(self, key: Hashable, estimate: float) -> float:
        """Probability in (0, 1) that a candidate of bin `key` is accepted once its parent is."""
        found = self.bins.get(key)
        if found is None:
            return estimate
        return (found.accepted + PRIOR_STRENGTH * estimate) / (found.seen + PRIOR_STRENGTH)

    def observe(self, key: Hashable, accepted: bool) -> None:
        """Learn one outcome."""
        self.bins.setdefault(key, Bin()).observe(accepted)
