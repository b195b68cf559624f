"""What a request's trees may lose over plain decoding, however its candidates turn out."""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass, field, replace

import pytest

from precedent.drafters.base import Candidates
from precedent.planning.calibration import Trust
from precedent.planning.costs import CostCurve
from precedent.planning.gate import AT_FIRST, PER_STEP, RESERVE, Allowance
from precedent.planning.planner import Limits, Planner
from precedent.tree import ROOT

CURVES = {
    "own kernels": {1: 41.0, 4: 48.0, 8: 65.0, 16: 96.0},
    "llama.cpp": {1: 59.0, 4: 102.0, 8: 176.0, 16: 216.0},
    "a cliff": {1: 10.0, 8: 10.0, 9: 40.0},
    "a hump": {1: 67.0, 8: 80.0, 12: 160.0, 16: 97.0, 24: 118.0, 32: 153.0},
}
DOZEN = 12

curves = pytest.mark.parametrize("milliseconds", CURVES.values(), ids=CURVES)


@dataclass
class Run:
    """A request in which every step proposes a chain; `accept` returns how many tokens of the tree are right."""

    planner: Planner
    tenant: str = "tenant"
    trust: Trust = field(default_factory=Trust)
    milliseconds: float = 0.0
    tokens: int = 0
    widths: list[int] = field(default_factory=list)

    def steps(self, number: int, estimate: float, accept: Callable[[int], int], source: str = "memory") -> Run:
        for _ in range(number):
            learned = self.planner.calibrations.of(self.tenant)
            learned.seen[:] = learned.accepted[:] = 0.0  # the allowance alone has to bound what is lost
            chain = Candidates.of(source, [(node, node - 1 if node else ROOT, estimate, node) for node in range(31)])
            limits = Limits(31, 0, 40, frozenset(), trust=self.trust, tenant=self.tenant)
            plan = self.planner.plan([chain], {}, limits)
            tree = plan.builder.build()
            path = range(accept(len(tree)))
            self.planner.observe(plan, tree, path)
            self.milliseconds += self.planner.cost.milliseconds(len(tree) + 1)
            self.tokens += len(path) + 1
            self.widths.append(len(tree))
        return self

    @property
    def lost(self) -> float:
        """Time beyond that of plain decoding, in its tokens."""
        return self.milliseconds / self.planner.cost.milliseconds(1) - self.tokens


def planner(milliseconds: dict[int, float]) -> Planner:
    return Planner(CostCurve.through(milliseconds))


def nothing(width: int) -> int:
    return 0


def all_of_it(width: int) -> int:
    return width


@curves
@pytest.mark.parametrize("estimate", [0.3, 0.6, 0.9])
def test_a_dozen_steps_of_new_text_take_at_most_four_percent_longer(
    milliseconds: dict[int, float], estimate: float
) -> None:
    learned = planner(milliseconds)
    requests = [Run(learned).steps(DOZEN, estimate, nothing) for _ in range(20)]
    assert max(request.lost for request in requests) <= 0.04 * DOZEN
    assert estimate < 0.9 or max(requests[0].widths) > 0, "the control: candidates are tried"


@curves
def test_a_long_new_text_takes_at_most_three_percent_longer(milliseconds: dict[int, float]) -> None:
    request, sources = Run(planner(milliseconds)), random.Random(1)
    for _ in range(1000):
        request.steps(1, sources.choice((0.4, 0.8, 0.9)), nothing, sources.choice(("recall", "prompt", "template")))
    assert request.lost <= 0.03 * 1000


@curves
def test_an_answer_that_is_known_starts_with_a_wide_tree_and_gets_all_rows_from_the_second_on(
    milliseconds: dict[int, float],
) -> None:
    spare = Trust(Allowance(1e9, 1e9))
    unbounded = Run(planner(milliseconds), trust=spare).steps(3, 0.99, all_of_it)
    known = Run(planner(milliseconds)).steps(3, 0.99, all_of_it)
    assert 2 * known.widths[0] + 1 >= unbounded.widths[0]
    assert known.widths[1:] == unbounded.widths[1:]


@curves
def test_a_session_whose_trees_pay_starts_its_requests_with_wider_ones(milliseconds: dict[int, float]) -> None:
    learned = planner(milliseconds)
    first = Run(learned).steps(5, 0.8, all_of_it).widths[0]
    second = Run(learned).steps(1, 0.8, nothing).widths[0]
    assert second > first or first == 7, f"{second} nodes after {first}, where 7 may be all that pay"
    lost = [Run(learned).steps(DOZEN, 0.8, nothing).lost for _ in range(16)]
    assert max(lost) <= AT_FIRST + PER_STEP * DOZEN + RESERVE
    assert lost[-1] <= 0.04 * DOZEN


@curves
def test_a_tenant_whose_memory_misleads_loses_its_reserve_once(milliseconds: dict[int, float]) -> None:
    learned, lost, number = planner(milliseconds), 0.0, 50
    for _ in range(number):
        lost += Run(learned, "misled").steps(DOZEN, 0.99, nothing).lost
    assert lost <= RESERVE + number * (AT_FIRST + PER_STEP * DOZEN)
    first = Run(planner(milliseconds)).steps(1, 0.99, nothing).widths
    assert Run(learned, "another").steps(1, 0.99, all_of_it).widths == first
    wide = milliseconds != CURVES["a cliff"]  # its first rows are free, so nobody loses anything by them
    assert not wide or Run(learned, "misled").steps(1, 0.99, nothing).widths < first
    for _ in range(3):
        Run(learned, "misled").steps(6, 0.99, all_of_it)
    assert Run(learned, "misled").steps(1, 0.99, nothing).widths == first, "what trees gain fills it again"


@curves
def test_an_adversary_who_sees_the_tree_gains_no_more_than_the_allowance(milliseconds: dict[int, float]) -> None:
    """Wide trees fail and narrow ones succeed, in bursts and at random; the bound holds after every step."""
    request, choose = Run(planner(milliseconds)), random.Random(5)
    for step in range(1500):
        kind = step // 50 % 3
        accept = (
            nothing if kind == 0 else (lambda width: width if width < 4 else 0) if kind == 1
            else lambda width: choose.randrange(width + 1)
        )  # fmt: skip
        request.steps(1, choose.choice((0.5, 0.9, 0.99)), accept, choose.choice(("recall", "prompt")))
        assert request.lost <= AT_FIRST + RESERVE + PER_STEP * (step + 1)


def test_rows_that_are_affordable_are_taken_beyond_a_number_that_is_not() -> None:
    affords = Trust(Allowance(0.5))
    taken = Run(planner(CURVES["a hump"]), trust=affords).steps(1, 0.94, all_of_it).widths[0]
    assert taken >= 15, f"{taken} nodes, though 15 cost less than 12"


def test_all_requests_of_a_step_lose_the_time_of_a_row() -> None:
    chain = Candidates.of("memory", [(node, node - 1 if node else ROOT, 0.94, node) for node in range(31)])
    alone = Limits(31, 0, 40, frozenset(), trust=Trust(Allowance(1.0)))
    together = replace(alone, trust=Trust(Allowance(1.0)), requests=4, rows_beside=3)
    widths = [
        len(planner({1: 10.0, 4: 10.0, 36: 26.0}).plan([chain], {}, limits).builder) for limits in (alone, together)
    ]
    assert widths[0] > 0
    assert 4 * widths[1] <= widths[0] + 4
