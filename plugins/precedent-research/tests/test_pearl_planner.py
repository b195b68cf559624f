"""How many samples a draft model that draws beside the forwards makes and shows, and when a step waits for it."""

from __future__ import annotations

import random

import pytest
import torch

from precedent.planning.costs import CostCurve
from precedent.planning.gate import PROBE_STEPS
from precedent.planning.planner import Limits
from precedent_research.pearl import PearlPlanner, PearlSource

LIMITS = Limits(0, 6, 40, frozenset())


def num_draws(planner: PearlPlanner, behind: int, at_hand: int) -> int:
    """How many samples the draft model shows in the next tree."""
    return planner.plan([], {"draft-model": PearlSource(behind, at_hand=at_hand)}, LIMITS).draws["draft-model"]


@pytest.mark.parametrize(("acceptance", "milliseconds"), [(0.9, 0.0), (0.5, 0.2), (0.7, 4.0)])
def test_what_is_shown_is_the_best_number_as_far_as_it_is_there(acceptance: float, milliseconds: float) -> None:
    """Never another number because fewer are at hand; and what samples cost when they were made does not count."""
    planner = planner_that_knows(acceptance, milliseconds)
    shown = [num_draws(planner, 1, ready) for ready in range(1, 9)]
    assert shown == [min(shown[-1], ready) for ready in range(1, 9)]
    assert shown[-1] > 0


def planner_that_knows(acceptance: float, milliseconds: float) -> PearlPlanner:
    """Forwards take 10 milliseconds and a twentieth more per row; a sample is known to take so long."""
    planner = PearlPlanner(CostCurve())
    planner.cost.table[:] = 10.0 + 0.5 * torch.arange(len(planner.cost.table)).numpy()
    for depth in range(1, 7):
        for number in range(1000):
            planner.calibration.observe("draft-model", depth, number * 0.618034 % 1.0 < acceptance)
    planner.observe_draws("draft-model", 1, 1, milliseconds)
    return planner


def test_a_cheap_draft_is_waited_for_and_a_dear_one_is_not() -> None:
    """With nothing at hand; a draft model that has its prompt to read yet is never waited for."""
    for milliseconds, waits in ((0.1, True), (4.0, False)):
        planner = planner_that_knows(0.8, milliseconds)
        assert bool(num_draws(planner, 1, 0)) == waits
        assert num_draws(planner, 400, 0) == 0


def simulated_rate(acceptance: float, number: int, milliseconds: float, *, waits: bool) -> float:
    """Tokens per millisecond of one way to go on when nothing is at hand, by simulation."""
    choose, tokens, time, ready = random.Random(0), 0, 0.0, False
    for _ in range(60_000):
        shown = number if ready or waits else 0
        time += 10.0 + 0.5 * shown + (0.0 if ready else milliseconds * shown)
        accepted = next((i for i in range(shown + 1) if choose.random() >= acceptance), shown + 1)
        tokens, ready = tokens + min(accepted, shown) + 1, accepted == shown + 1
    return tokens / time


@pytest.mark.parametrize("acceptance", [0.5, 0.8])
@pytest.mark.parametrize("milliseconds", [0.2, 0.8, 1.6, 3.0])
def test_waiting_or_not_is_decided_as_a_simulation_decides(acceptance: float, milliseconds: float) -> None:
    """The closed form against the simulation, where the two ways differ by more than its noise."""
    planner = planner_that_knows(acceptance, milliseconds)
    waiting, beside = (simulated_rate(acceptance, 4, milliseconds, waits=waits) for waits in (True, False))
    if abs(waiting / beside - 1.0) > 0.02:
        assert planner._pays_to_wait("draft-model", 4, 1, 4 * milliseconds) == (waiting > beside)


def test_a_draft_model_that_is_waited_for_in_vain_is_left_alone() -> None:
    """After some steps; one whose samples are accepted is not, if the waits are short."""
    for acceptance, waited, goes_on in ((0.01, 5.0, False), (0.8, 0.5, True)):
        planner = planner_that_knows(acceptance, 1.0)
        for _ in range(PROBE_STEPS):
            assert planner.num_draws_ahead("draft-model", 1, LIMITS) == 7
            planner.observe_wait("draft-model", 1, waited)
        assert bool(planner.num_draws_ahead("draft-model", 1, LIMITS)) == goes_on
    assert planner.num_draws_ahead("draft-model", 1, Limits(8, 0, 40, frozenset())) == 0
