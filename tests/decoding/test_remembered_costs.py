"""What steps cost is remembered between processes; a damaged or foreign file is none."""

from __future__ import annotations

from pathlib import Path

import pytest

from precedent.engine import Engine, remembered_costs
from precedent.engine.remembered_costs import FEWEST_STEPS, RememberedCosts
from precedent.planning.costs import CostCurve
from precedent.planning.step_costs import START_UP_WIDTHS, StepCosts
from precedent.target import TargetModel
from precedent.testing.tiny_models import byte_tokenizer, tiny_causal_lm


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr(remembered_costs, "user_cache_path", lambda name: tmp_path / name)
    return tmp_path / "precedent" / "step-costs"


def learned(steps: int = FEWEST_STEPS) -> StepCosts:
    costs = StepCosts()
    costs.begin({1: 10.0, 8: 14.0, 32: 40.0}, threads=2)
    for step in range(steps):
        width = (1, 5, 12)[step % 3]
        costs.observe(width, 10.0 + width, 100, 2)
    return costs


def remembered(model: str = "one model") -> RememberedCosts:
    return RememberedCosts(TargetModel(tiny_causal_lm("llama")), model)


def test_what_was_learned_is_read_again() -> None:
    remembered().write(costs := learned())
    found = remembered().read()
    assert found is not None
    assert found.known == costs.known


def test_of_another_model_nothing_is_read() -> None:
    remembered().write(learned())
    assert remembered("another model").read() is None


def test_few_steps_and_given_curves_are_not_remembered(folder: Path) -> None:
    remembered().write(learned(FEWEST_STEPS - 1))
    remembered().write(CostCurve())
    assert not folder.exists()


@pytest.mark.parametrize(
    "text",
    [
        "",
        "{",
        "[]",
        "null",
        "{}",
        '{"2": [1.0]}',
        '{"2": "abc"}',
        '{"two": [1, 1, 1, 1, 1]}',
        '{"2": [NaN, 1, 1, 1, 1]}',
    ],
)
def test_a_damaged_file_is_none(text: str, folder: Path) -> None:
    remembered().write(learned())
    (file,) = folder.iterdir()
    file.write_text(text)
    assert remembered().read() is None


def test_a_folder_that_cannot_be_written_harms_nothing(folder: Path) -> None:
    folder.parent.mkdir(parents=True)
    folder.write_text("a file in its place")
    remembered().write(learned())
    assert remembered().read() is None


def test_an_engine_remembers_when_it_ends_and_the_next_one_begins_with_it(folder: Path) -> None:
    model, tokenizer = tiny_causal_lm("llama"), byte_tokenizer()
    with_costs = Engine(model, tokenizer, name="tiny", cost=(costs := learned()))
    with_costs.close()
    assert len(list(folder.iterdir())) == 1
    later = Engine(model, tokenizer, name="tiny")
    assert later.planner.cost.as_dict().keys() == costs.as_dict().keys()
    assert later.planner.cost.num_steps == len(START_UP_WIDTHS), "one step each, instead of measuring for a second"
    later.close()
