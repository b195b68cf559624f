"""Faults of what plans a service's drafts: no call fails, and the metrics name what is switched off."""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from helpers.services import END, Serve, store

from precedent.planning.costs import CostCurve
from precedent.planning.planner import Plan, Planner

ANSWER = [41, 42, 43, 44, 45, 46, END]
NAN = float("nan")


def raises(*_: Any, **__: Any) -> Any:
    raise RuntimeError("injected")


def answers(made: Any) -> Callable[..., Any]:
    return lambda *_, **__: made


def planned(**choice: Any) -> Callable[..., Plan]:
    return answers(Plan(choice=SimpleNamespace(**choice)))  # type: ignore[arg-type]


PLANNERS: dict[str, dict[str, Callable[..., Any]]] = {
    **{f"{call} raises": {call: raises} for call in ("plan_fixed", "learn")},
    "nothing": {"plan_fixed": answers(None)},
    "a text": {"plan_fixed": answers("plan")},
    "tokens that are NaN": {"plan_fixed": answers(Plan(expected_tokens=NAN))},
    "a huge choice": {"plan_fixed": planned(token_ids=np.zeros(10**6, np.int32), parents=np.zeros(10**6, np.int32))},
    "a choice without tokens": {"plan_fixed": planned(token_ids=None)},
}


class Curve(CostCurve):
    """A cost curve with some of its calls replaced."""

    def __init__(self, **replaced: Any) -> None:
        super().__init__()
        for name, value in replaced.items():
            setattr(self, name, value)


CURVES: dict[str, Callable[[], Curve]] = {
    "beside raises": lambda: Curve(beside=raises),
    "observe raises": lambda: Curve(observe=raises),
    "a table of NaN": lambda: Curve(beside=answers(np.full(257, NAN))),
    "an empty table": lambda: Curve(beside=answers(np.empty(0))),
    "a huge table": lambda: Curve(beside=answers(np.ones(10**6))),
    "a list": lambda: Curve(beside=answers([1.0] * 257)),
}


def draft_all(service: Any) -> int:
    """Answer requests two at a time, with chains and trees; return how many tokens were drafted."""
    drafted = 0
    for number in range(4):
        sessions = [service.begin(f"{number}{twin}", [1, 2], tenant="north", query="an order") for twin in "ab"]
        for at in range(0, len(ANSWER), 2):
            drafted += sum(map(len, service.chains(sessions, 4))) + len(sessions[0].tree(4).token_ids)
            for session in sessions:
                session.committed(ANSWER[at : at + 2])
        for session in sessions:
            session.end()
    return drafted


def test_without_faults_something_is_drafted(serve: Serve) -> None:
    """Or else the tests below would show nothing."""
    service = serve()
    store(service, ANSWER, tenant="north")
    assert draft_all(service) > 0
    assert service.metrics().degraded == ()


@pytest.mark.parametrize("name", PLANNERS)
def test_a_planner_that_fails_fails_no_draft(serve: Serve, name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    service = serve()
    store(service, ANSWER, tenant="north")
    for call, replaced in PLANNERS[name].items():
        monkeypatch.setattr(Planner, call, replaced)
    drafted = draft_all(service)
    found = service.metrics()
    assert found.failures_by_drafter == {"planner": 3}
    assert found.degraded == ("planner",)
    monkeypatch.undo()
    assert draft_all(service) == 0, "it is switched off"
    assert drafted >= 0


@pytest.mark.parametrize("name", CURVES)
def test_a_cost_curve_that_fails_fails_no_draft(serve: Serve, name: str) -> None:
    service = serve(cost=CURVES[name]())
    store(service, ANSWER, tenant="north")
    draft_all(service)
    found = service.metrics()
    assert found.failures_by_drafter == {"step costs": 3}
    assert found.degraded == ("step costs",)
