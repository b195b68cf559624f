"""What a service learns: acceptance from what was committed, and the cost of a step from the time between calls."""

from __future__ import annotations

import random
from typing import Any

import numpy as np
import pytest
from helpers.services import Scripted, Serve, added

from precedent.drafters.outcomes import UNTESTED, outcomes
from precedent.planning.costs import CostCurve
from precedent.planning.planner import Planner
from precedent.tree import ROOT
from precedent_engines import DraftingService
from precedent_engines.clock import StepClock

GOOD, BAD, OTHER = 5, 6, 99


def test_a_drafter_that_is_seldom_right_is_no_longer_drafted_where_width_costs(serve: Serve) -> None:
    service = added(serve(cost={1: 10.0, 2: 14.0}), Scripted("memory", (BAD, ROOT, 0.9, 1)))
    firsts = []
    for number in range(8):
        session, drafted = service.begin(str(number), [1], tenant="t"), []
        for _ in range(20):
            drafted.append(session.chain(1))
            session.committed([OTHER])
        assert drafted[-10:] == [[]] * 10
        firsts.append(drafted[0])
    assert (firsts[0], firsts[-1]) == ([BAD], []), "what one request teaches serves the next"


@pytest.mark.parametrize("seed", range(20))
def test_outcomes_are_those_of_following_the_committed_tokens(seed: int) -> None:
    """Against the paths, written out: tested if the text before it was committed and a token follows."""
    choose = random.Random(seed)
    paths: list[tuple[int, ...]] = []
    parents: list[int] = []
    for _ in range(choose.randint(0, 9)):
        parent = choose.choice([ROOT, *range(len(paths))])
        path = (*(() if parent == ROOT else paths[parent]), choose.randint(1, 3))
        if path not in paths:
            paths.append(path)
            parents.append(parent)
    committed = tuple(choose.randint(1, 3) for _ in range(choose.randint(0, 4)))
    found = outcomes(
        np.array([path[-1] for path in paths], dtype=np.int32),
        np.array(parents, dtype=np.int32),
        np.array(committed, dtype=np.int32),
    )
    expected = [
        UNTESTED
        if path[:-1] != committed[: len(path) - 1] or len(committed) < len(path)
        else float(path == committed[: len(path)])
        for path in paths
    ]
    assert found.tolist() == [*expected, 1.0]


class Noted(CostCurve):
    """A curve that learns nothing and notes what it is shown."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: list[tuple[int, float]] = []

    def observe(self, width: int, milliseconds: float, prefix: int = 0, threads: int = 1) -> None:
        """Note it."""
        self.seen.append((width, milliseconds))


class Clock:
    """Seconds that pass when told."""

    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now


def test_only_the_time_of_an_undisturbed_step_is_learned() -> None:
    clock, curve = Clock(), Noted()
    steps = StepClock(Planner(curve), clock)
    steps.called(stepped=False)
    steps.returned(width=7)
    clock.now += 0.020
    steps.called(stepped=True)
    assert curve.seen == [(7, pytest.approx(20.0))]
    steps.returned(width=3)
    clock.now += 500.0  # nothing was committed: the engine had nothing to do
    steps.called(stepped=False)
    steps.returned(width=3)
    steps.began()  # a prompt was computed in the same step
    clock.now += 0.5
    steps.called(stepped=True)
    assert len(curve.seen) == 1


def simulated(service: DraftingService, clock: Clock, per_row: float, *, steps: int) -> list[list[int]]:
    """Run an engine whose step takes 10 ms and `per_row` for every row beyond the first; the chains it was given."""
    session, chains = service.begin("a", [1], tenant="t"), []
    for _ in range(steps):
        chains.append(session.chain(8))
        clock.now += (10.0 + per_row * len(chains[-1])) / 1e3
        session.committed([*chains[-1], OTHER])
    return chains


@pytest.mark.parametrize(("per_row", "length"), [(0.01, 8), (30.0, 0), (1.0, 8), (13.0, 0)])
def test_the_cost_of_a_step_is_learned_from_the_time_between_calls(tokenizer: Any, per_row: float, length: int) -> None:
    """Nothing is known at first; where a row turns out dearer than a plain step nothing is drafted, else all is."""
    clock = Clock()
    service = DraftingService(None, tokenizer, clock=clock)
    chain = [(token, token - 1, 0.5, token) for token in range(8)]
    with added(service, Scripted("memory", *chain)):
        chains = simulated(service, clock, per_row, steps=300)
    assert len(chains[0]) == 8
    assert sorted(map(len, chains[-100:]))[50] == length
