"""What a service learns: acceptance from what was committed, and the cost of a step from the time between calls."""

from __future__ import annotations

from typing import Any

import pytest
from helpers.services import Scripted, Serve, added

from precedent.tree import ROOT
from precedent_engines import DraftingService

GOOD, BAD, OTHER = 5, 6, 99


def test_a_drafter_that_is_seldom_right_is_no_longer_drafted_where_width_costs(serve: Serve) -> None:
    service = added(serve(cost={1: 10.0, 2: 14.0}), Scripted("memory", (BAD, ROOT, 0.97, 1)))
    firsts = []
    for number in range(8):
        session, drafted = service.begin(str(number), [1], tenant="t"), []
        for _ in range(20):
            drafted.append(session.chain(1))
            session.committed([OTHER])
        assert drafted[-10:] == [[]] * 10
        firsts.append(drafted[0])
    assert (firsts[0], firsts[-1]) == ([BAD], []), "what one request teaches serves the next"


class Clock:
    """Seconds that pass when told."""

    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now


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
