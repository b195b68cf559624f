"""Work done before the first request, so that no answer waits for it: compile inner loops, time forwards."""

from __future__ import annotations

from functools import cache

import torch

from precedent.engine.remembered_costs import RememberedCosts
from precedent.planning.step_costs import START_UP_WIDTHS, StepCosts
from precedent.planning.warm_up import compile_drafting
from precedent.runtime.fence import Fences
from precedent.sampling.coupling import coupled_choice
from precedent.target import Target

REMEMBERED = "remembered costs"
"""The file of remembered costs among the aids of an engine."""


@cache
def compile_inner_loops() -> None:
    """Run every compiled function, once per process: about half a minute on a new machine, a second later on."""
    compile_drafting()
    coupled_choice(torch.ones(2), 0, 0)


def costs_of(target: Target, remembered: RememberedCosts, fences: Fences) -> StepCosts:
    """The cost curve of a target: remembered, and confirmed by a step of each width, or else measured for a second."""
    run = target.measure_costs

    def confirmed() -> StepCosts | None:
        costs = remembered.read()
        if costs is not None:
            if not isinstance(costs, StepCosts):
                raise TypeError(f"expected step costs, got {type(costs).__name__}")
            for width in START_UP_WIDTHS:
                costs.observe(width, run(width), 0, target.threads)
        return costs

    costs = fences.of(REMEMBERED).run(confirmed, None)
    if costs is None:
        costs = StepCosts()
        costs.measure(run, lambda: target.threads)
    return costs
