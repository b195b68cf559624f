"""What a request knows of its sources: the formula, who is believed less and where, and that it passes."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from precedent.drafters.base import Candidates
from precedent.planning.calibration import STRENGTH, Trust
from precedent.planning.costs import CostCurve
from precedent.planning.gate import Allowance
from precedent.planning.planner import Limits, Planner
from precedent.tree import ROOT


def roomy() -> Trust:
    """The trust of a new request whose trees may lose whatever they like."""
    return Trust(Allowance(1e6, 1e6))


ROOMY = Limits(32, max_draws=0, max_depth=40, end_token_ids=frozenset(), trust=roomy())


def test_a_factor_is_what_came_over_what_was_expected_and_no_more_than_one() -> None:
    trust = Trust()
    assert trust.factors(["new"]).tolist() == [1.0]
    trust.learn(["poor", "good"], np.array([[3.0, 1.0, 0.5], [1.0, 5.0, 1.0]]))
    expected = (1.0 + STRENGTH) / (3.0 + STRENGTH)
    assert trust.factors(["poor", "new", "good"]).tolist() == pytest.approx([expected, 1.0, 1.0])
    trust.learn(["poor"], np.array([[1.0, 0.0, 0.5]]))
    assert trust.factors(["poor"])[0] == pytest.approx((0.5 + STRENGTH) / (2.5 + STRENGTH))
    for _ in range(500):  # steps in which nothing of it was verified
        trust.learn(["poor"], np.array([[0.0, 0.0, 1.0]]))
    assert trust.factors(["poor"])[0] == pytest.approx(1.0, abs=1e-3)


def curve() -> CostCurve:
    return CostCurve.through({1: 10.0, 8: 12.0, 32: 20.0})


def nodes_proposed(planner: Planner, trust: Trust, first_bin: int, accepted: bool, source: str = "memory") -> int:
    """A step with a chain of six candidates, of kinds that nobody has seen: how many were thought worth their rows."""
    chain = [(10 + at, at - 1 if at else ROOT, 0.8, first_bin + at) for at in range(6)]
    plan = planner.plan([Candidates.of(source, chain)], {}, replace(ROOMY, trust=trust))
    tree = plan.builder.build()
    planner.observe(plan, tree, range(len(tree)) if accepted else ())
    return len(tree)


def test_a_source_that_is_wrong_in_a_request_is_doubted_there_whatever_kind_it_proposes_next() -> None:
    """No bin is seen twice, so that the calibration learns nothing of it; another request believes as ever."""
    planner, misled = Planner(curve()), roomy()
    widths = [nodes_proposed(planner, misled, 10 * step, accepted=False) for step in range(30)]
    assert widths[0] == 6
    assert max(widths[10:]) <= 1
    believing = [nodes_proposed(planner, roomy(), 300 + 10 * step, accepted=False) for step in range(30)]
    assert set(believing) == {6}, "the control"
    assert nodes_proposed(planner, misled, 900, accepted=False, source="another") == 6
    assert nodes_proposed(planner, roomy(), 1000, accepted=True) == 6
