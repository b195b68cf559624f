"""Sequences whose draft model draws while the target scores, without a clock in any decision."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from helpers.stepping import CHOSEN_TEXTS, run, start
from helpers.tabled_model import TabledModel
from precedent.drafters.base import DrawSource
from precedent.planning.costs import CostCurve
from precedent.planning.planner import Limits, Plan
from precedent.runtime.background import AtOnce
from precedent.target import TargetModel
from precedent_research.pearl import PearlLoop, PearlPlanner, PearlSource

__all__ = ["CHOSEN_TEXTS", "PlannerOfAllCandidates", "in_place", "run", "start"]


class PlannerOfAllCandidates(PearlPlanner):
    """Verifies every candidate and everything at hand, without a clock in its decisions."""

    def __init__(self, most_ahead: int = 3) -> None:
        super().__init__(CostCurve())
        self._most_ahead = most_ahead

    def plan(self, candidates: Sequence, draw_sources: Mapping[str, DrawSource], limits: Limits) -> Plan:
        """All candidates within the limits, and as many samples as are at hand."""
        plan = super().plan(candidates, {}, limits)
        for name, source in draw_sources.items():
            if isinstance(source, PearlSource):
                plan.draws[name] = min(source.at_hand, limits.max_depth)
        return plan

    def num_draws_ahead(self, name: str, behind: int, limits: Limits) -> int:
        """Always the same number."""
        return self._most_ahead


def in_place(target: TargetModel | TabledModel, planner: PearlPlanner | None = None) -> PearlLoop:
    """A loop that draws before the forward, on the same thread: nothing depends on time."""
    return PearlLoop(target, planner or PlannerOfAllCandidates(), executor=AtOnce())  # type: ignore[arg-type]
