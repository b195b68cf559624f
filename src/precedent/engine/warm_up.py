"""Work done before the first request, so that no answer waits for it: compile inner loops, time forwards."""

from __future__ import annotations

from functools import cache, partial
from time import perf_counter

import numpy as np
import torch

from precedent.config import SamplingParams
from precedent.drafters.matching.alignment import Trail
from precedent.drafters.matching.known_texts import follow_known_text
from precedent.drafters.matching.occurrences import HIT, OCCURRENCE, Weights
from precedent.drafters.matching.token_index import SORT_ABOVE, TokenIndex, reversed_context, sorted_segment
from precedent.drafters.prompt import PromptDrafter
from precedent.drafters.recall.drafter import outcomes
from precedent.drafters.request import Request
from precedent.engine.remembered_costs import RememberedCosts
from precedent.planning.costs import CostCurve
from precedent.planning.plan import Limits
from precedent.planning.planner import Planner
from precedent.planning.step_costs import START_UP_WIDTHS, StepCosts
from precedent.sampling.coupling import coupled_choice
from precedent.target import Slot, TargetModel
from precedent.tree import ROOT, chain

UNTIMED = 3
"""Untimed forwards per width on an accelerator: the second is captured as a graph, the third replays it."""


@cache
def compile_inner_loops() -> None:
    """Run every compiled function, once per process: about half a minute on a new machine, a second later on."""
    session = PromptDrafter().begin(Request("warm-up", (5, 6, 7) * SORT_ABOVE, SamplingParams()))
    candidates, planner = session.match(4), Planner(CostCurve())
    plan = planner.plan([candidates], {}, Limits(4, 0, 4, frozenset({2})))
    planner.observe(plan, plan.builder.build(), (0,))
    session.committed([5, 6])
    outcomes(candidates.nodes, np.array([5], dtype=np.int32))
    _follow_a_trail()
    follow_known_text(np.array([5], dtype=np.int32))
    coupled_choice(torch.ones(2), 0, 0)


def costs_of(target: TargetModel, remembered: RememberedCosts) -> StepCosts:
    """The cost curve of a target: remembered, and confirmed by a step of each width, or else measured for a second."""
    run, costs = partial(milliseconds_of_width, target), remembered.read()
    if costs is None:
        costs = StepCosts()
        costs.measure(run, lambda: target.runner.threads)
    else:
        for width in START_UP_WIDTHS:
            costs.observe(width, run(width), 0, target.runner.threads)
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


def _follow_a_trail() -> None:
    index, trail = TokenIndex(), Trail()
    index.append(0, [5, 6, 7, 5, 6, 7])
    for number in (1, 2):
        index.load(sorted_segment({number: [5, 6]}))
    index.take_order(index.merged_order())
    weights = Weights(np.array([(ROOT, 0, 0.0)], dtype=HIT), np.zeros(3), 0.0)
    found = index.match(reversed_context([5]), weights, 1, index.order_of([0]))
    trail.advance(index.text, found, [8])
    trail.align(index.text, reversed_context([8]), np.empty(0, OCCURRENCE), weights)
