"""The order desk's outcome, for `precedent train-judge`, and the judges that it ships."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from itertools import islice
from pathlib import Path
from typing import Any

import pytest
from helpers.expert_chat import expert_model, saying

import precedent_demo
from precedent.errors import PromptError
from precedent.text.traces import Trajectory
from precedent_demo import make_database
from precedent_demo.judging import DeskOutcome
from precedent_demo.logs import logged
from precedent_demo.workflows import generate_requests
from precedent_research.judge import HIDDEN, OF_ROWS, load_judge
from precedent_research.reruns import load_outcome

NUMBER = 8
MODELS = Path(precedent_demo.__file__).parent / "models"


@pytest.fixture(scope="module", params=[0, 7])
def served(request: pytest.FixtureRequest) -> Iterator[Any]:
    """The desk's outcome, recorded runs of one database, and its requests."""
    seed = request.param
    records = list(islice(logged("A", seed), NUMBER))
    runs = [
        Trajectory(number, record["task_id"], record["group"], tuple(record["messages"][1:]), ())
        for number, record in enumerate(records)
    ]
    desk = make_database(seed)
    yield DeskOutcome(), runs, list(islice(generate_requests("A", seed, desk), NUMBER)), desk
    desk.close()


def test_a_run_comes_to_its_database_and_the_facts_told(served: Any) -> None:
    """The expert solves every request, each time alike; who says nothing solves none."""
    outcome, runs, requests, desk = served
    changed = 0
    for run, request in zip(runs, requests, strict=True):
        state = outcome(run, expert_model(request, desk))
        assert state == outcome(run, expert_model(request, desk))
        changed += state != desk.state()
        assert state is not None
        assert (outcome(run, saying("I do not know.")) is None) == bool(request.facts or request.calls)
    assert 0 < changed < NUMBER


def test_a_run_of_something_else_is_refused(served: Any) -> None:
    outcome, runs, _, _ = served
    with pytest.raises(PromptError, match="'flight-3' is none of the order desk: its task id is A01, or A01/7"):
        outcome(replace(runs[0], task="flight-3"), saying(""))
    with pytest.raises(PromptError, match="does not begin as the order desk's request of that name"):
        outcome(replace(runs[1], task=runs[0].task), saying(""))


def test_the_desk_is_installed_as_an_outcome_and_its_judges_by_name() -> None:
    """They are for the desk's own target, and their cards say where the threshold lies."""
    assert isinstance(load_outcome("order-desk"), DeskOutcome)
    shipped = (
        ("order-desk", "judge", (*OF_ROWS, HIDDEN)),
        ("order-desk-divergence", "divergence-judge", ("divergence",)),
    )
    for name, folder, features in shipped:
        judge: Any = load_judge(name)
        assert (judge.outcome, judge.features) == ("order-desk", features)
        assert judge.hidden_size in (None, 576)
        assert judge.target.startswith("smollm2-135m-order-desk")
        card = (MODELS / folder / "README.md").read_text(encoding="utf-8")
        assert f"{judge.threshold:.3f}" in card
        assert "does not keep the distribution" in card
