"""Whether a drafter whose candidates cost a forward is asked in a step: measured gain and measured time decide.

What a forward brings is known only afterwards: the expected tokens of the plan with its candidates, less those without.
It is remembered per unit of open mass, since a forward adds little where the candidates at hand are surely right.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import NamedTuple

from precedent.planning.draw_gate import DrawGate

LEAST_OPEN = 0.1
"""Smallest open mass from which a gain is learned; below, the quotient is mostly noise."""

LEARNED = 0.05
"""Weight of the newest outcome, once there are many."""


class Without(NamedTuple):
    """A plan without the forward's candidates: its expected tokens, its rows, and the mass open at the root."""

    expected: float
    rows: int
    open_mass: float


@dataclass(slots=True)
class ForwardGate:
    """What one drafter's forwards bring (`tokens` and `rows` more per unit of open mass), and what they cost."""

    tokens: float = 1.0
    rows: float = 4.0
    seen: int = 0
    cost: DrawGate = field(default_factory=DrawGate)

    def observe(self, without: Without, expected: float, rows: int) -> None:
        """Learn from the plan that was made with a forward's candidates."""
        if without.open_mass < LEAST_OPEN:
            return
        self.seen += 1
        weight = max(LEARNED, 1.0 / self.seen)
        self.tokens += weight * (max(0.0, expected - without.expected) / without.open_mass - self.tokens)
        self.rows += weight * (max(0, rows - without.rows) / without.open_mass - self.rows)
