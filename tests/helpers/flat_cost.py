"""A cost curve without a clock."""

from __future__ import annotations

from precedent.planning.costs import CostCurve


class FlatCost(CostCurve):
    """Every width costs the same: what is drafted does not hang on how busy the machine is."""

    def observe(self, width: int, milliseconds: float) -> None:
        """Learn nothing."""
