"""Compiles the inner loops of drafting and planning before the first request, so that no answer waits for them."""

from __future__ import annotations

from functools import cache

import numpy as np

from precedent.config import SamplingParams
from precedent.drafters.matching.occurrences import OCCURRENCE
from precedent.drafters.outcomes import outcomes, outcomes_of_votes
from precedent.drafters.prediction import PredictionDrafter
from precedent.drafters.prompt import PromptDrafter
from precedent.drafters.request import Request
from precedent.drafters.sessions import checked
from precedent.planning.costs import WINDOW, CostCurve, StepCosts
from precedent.planning.planner import Limits, Planner


@cache
def compile_drafting() -> None:
    """Run every compiled function once per process: about half a minute on a new machine, a second later on."""
    session = PromptDrafter().begin(Request("warm-up", (5, 6, 7) * 8, SamplingParams()))
    candidates, planner = checked(session.match(4), 4, None), Planner(CostCurve())
    for one_path in (True, False):
        plan = planner.plan([candidates], {}, Limits(4, 0, 4, frozenset({2}), one_path=one_path))
        planner.observe(plan, plan.builder.build(), (0,))
    plan.calibration.observe("warm-up", 0, accepted=True)
    plan.calibration.probability("warm-up", 0, 0.5)
    assert plan.choice is not None
    costs = StepCosts()
    for step in range(WINDOW):
        costs.observe(1 + step, 1.0)
    committed = np.array([5], dtype=np.int32)
    outcomes(plan.choice.token_ids, plan.choice.parents, committed)
    outcomes_of_votes(candidates.nodes, np.zeros(len(candidates), np.int64), np.zeros(1, OCCURRENCE), committed)
    session.committed([5, 6])
    following = PredictionDrafter().begin(Request("warm-up", (5,), SamplingParams(), prediction=(5, 6, 7) * 8))
    for token in (5, 9, 7):
        following.match(4)
        following.committed([token])
