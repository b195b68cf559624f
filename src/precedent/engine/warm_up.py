"""Work done before the first request, so that no answer waits for it: compile inner loops, time forwards."""

from __future__ import annotations

from functools import cache, partial
from time import perf_counter

import torch

from precedent.engine.remembered_costs import RememberedCosts
from precedent.planning.step_costs import START_UP_WIDTHS, StepCosts
from precedent.planning.warm_up import compile_drafting
from precedent.runtime.fence import Fences
from precedent.sampling.coupling import coupled_choice
from precedent.target import Slot, TargetModel
from precedent.tree import chain

REMEMBERED = "remembered costs"
"""The file of remembered costs among the aids of an engine."""

UNTIMED = 3
"""Untimed forwards per width on an accelerator: the second is captured as a graph, the third replays it."""


@cache
def compile_inner_loops() -> None:
    """Run every compiled function, once per process: about half a minute on a new machine, a second later on."""
    compile_drafting()
    coupled_choice(torch.ones(2), 0, 0)


def costs_of(target: TargetModel, remembered: RememberedCosts, fences: Fences) -> StepCosts:
    """The cost curve of a target: remembered, and confirmed by a step of each width, or else measured for a second."""
    run = partial(milliseconds_of_width, target)

    def confirmed() -> StepCosts | None:
        costs = remembered.read()
        if costs is not None:
            if not isinstance(costs, StepCosts):
                raise TypeError(f"expected step costs, got {type(costs).__name__}")
            for width in START_UP_WIDTHS:
                costs.observe(width, run(width), 0, target.runner.threads)
        return costs

    costs = fences.of(REMEMBERED).run(confirmed, None)
    if costs is None:
        costs = StepCosts()
        costs.measure(run, lambda: target.runner.threads)
    return costs


def milliseconds_of_width(target: TargetModel, width: int) -> float:
    """Time one forward of `width` tokens after a short prefix; on an accelerator, after some untimed ones.

    There, the first forwards of a width compile kernels and capture graphs, and prompts are still being computed when
    their call has returned.
    """
    slot = target.new_slot()
    target.prefill(slot, [0] * 33)
    for _ in range(0 if target.device.type == "cpu" else UNTIMED):
        _forward_of(target, slot, width)
    started = perf_counter()
    _forward_of(target, slot, width)
    return (perf_counter() - started) * 1e3


def _forward_of(target: TargetModel, slot: Slot, width: int) -> None:
    """Run one forward and wait for it."""
    target.score([(slot, chain([0] * (width - 1)))])[0][0, 0].item()
    target.discard(slot)
