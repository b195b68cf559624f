"""Step costs are remembered between processes; a file that is not sound is discarded, and the costs measured anew."""

from __future__ import annotations

import json
import math
import os
from pathlib import Path

import pytest

from precedent.engine import Engine, remembered_costs
from precedent.engine.remembered_costs import FEWEST_STEPS, VERSION, RememberedCosts
from precedent.planning.costs import CostCurve
from precedent.planning.step_costs import START_UP_WIDTHS, StepCosts
from precedent.runtime.recomputable import sealed
from precedent.target import TargetModel
from precedent_testing.tiny_models import byte_tokenizer, tiny_causal_lm


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


def written(folder: Path) -> Path:
    """The file of sound costs."""
    remembered().write(learned())
    (file,) = folder.iterdir()
    return file


def signed(costs: object, version: str = VERSION, *, file: Path) -> None:
    """Replace the costs in a file, and its checksum."""
    file.write_bytes(sealed(json.dumps(costs).encode(), version))


def test_a_file_that_is_signed_anew_is_read(folder: Path) -> None:
    """Or else the tests below would show nothing."""
    signed(learned().known, file=written(folder))
    assert remembered().read() is not None


def test_a_file_of_another_version_is_discarded(folder: Path) -> None:
    signed(learned().known, "another version", file=written(folder))
    assert remembered().read() is None


@pytest.mark.parametrize(
    "costs",
    [
        None,
        [],
        {},
        {"2": {}},
        {"2": {"per_key": 0.1}},
        {"2": [1.0]},
        {"2": "abc"},
        {"two": {"1": 10.0, "per_key": 0.1}},
        {"0": {"1": 10.0, "per_key": 0.1}},
        {"9" * 400: {"1": 10.0, "per_key": 0.1}},
        {"2": {"1": 10.0}},
        {"2": {"1": "10.0", "per_key": 0.1}},
        {"2": {"1": True, "per_key": 0.1}},
        {"2": {"1": math.nan, "per_key": 0.1}},
        {"2": {"1": 10.0, "8": math.inf, "per_key": 0.1}},
        {"2": {"1": 10.0, "8": 2.8e225, "per_key": 0.1}},
        {"2": {"1": 10.0, "8": 10**400, "per_key": 0.1}},
        {"2": {"1": 10.0, "8": -10.0, "per_key": 0.1}},
        {"2": {"1": 10.0, "8": 0.0, "per_key": 0.1}},
        {"2": {"-1": 10.0, "per_key": 0.1}},
        {"2": {"1": 10.0, "per_key": 2.8e225}},
        {"2": {"1": 10.0, "per_key": -1.0}},
    ],
    ids=str,
)
def test_costs_that_cannot_be_are_discarded_in_spite_of_their_checksum(costs: object, folder: Path) -> None:
    signed(costs, file=written(folder))
    assert remembered().read() is None


def test_costs_beyond_what_narrower_widths_allow_are_brought_within_bounds(folder: Path) -> None:
    signed({"2": {"1": 10.0, "2": 9e6, "per_key": 0.1}}, file=written(folder))
    found = remembered().read()
    assert found is not None
    assert found.milliseconds(2) == pytest.approx(25.0)


@pytest.mark.parametrize("content", [b"", b"{", b"null", b"\xff\xfe", b"[" * 100_000, b"2 \n{}", bytes(3 << 20)])
def test_a_file_with_other_content_is_discarded(content: bytes, folder: Path) -> None:
    written(folder).write_bytes(content)
    assert remembered().read() is None


def test_a_file_that_was_cut_or_changed_anywhere_is_discarded(folder: Path) -> None:
    file = written(folder)
    content, reader = file.read_bytes(), remembered()
    for at in range(len(content)):
        file.write_bytes(content[:at])
        assert reader.read() is None, f"cut after {at} bytes"
        file.write_bytes(content[:at] + bytes([content[at] ^ 1 << at % 8]) + content[at + 1 :])
        assert reader.read() is None, f"a bit of byte {at} changed"


def test_a_folder_in_its_place_is_left_alone(folder: Path) -> None:
    file = written(folder)
    file.unlink()
    file.mkdir()
    assert remembered().read() is None
    remembered().write(learned())
    assert list(folder.iterdir()) == [file]


def test_a_pipe_in_its_place_is_not_waited_for_and_is_replaced(folder: Path) -> None:
    file = written(folder)
    file.unlink()
    os.mkfifo(file)
    assert remembered().read() is None
    remembered().write(learned())
    assert remembered().read() is not None


def test_a_file_that_may_not_be_read_is_discarded(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Root may read every file, so the refusal is simulated."""
    written(folder)

    def refused(*_: object, **__: object) -> None:
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr(Path, "open", refused)
    assert remembered().read() is None


def test_a_folder_that_cannot_be_written_harms_nothing(folder: Path) -> None:
    folder.parent.mkdir(parents=True)
    folder.write_text("a file in its place")
    remembered().write(learned())
    assert remembered().read() is None


def test_why_a_file_was_discarded_is_logged(folder: Path, caplog: pytest.LogCaptureFixture) -> None:
    written(folder).write_bytes(b"2.8e+225")
    with caplog.at_level("INFO", "precedent"):
        remembered().read()
    assert "measuring step costs anew" in caplog.text


def test_an_engine_starts_beside_a_damaged_file_and_replaces_it(folder: Path) -> None:
    model, tokenizer = tiny_causal_lm("llama"), byte_tokenizer()
    Engine(model, tokenizer, name="tiny", cost=learned()).close()
    (file,) = folder.iterdir()
    file.write_bytes(b"damaged")
    later = Engine(model, tokenizer, name="tiny", cost=learned())
    later.close()
    assert file.read_bytes() != b"damaged"
    file.write_bytes(b"damaged")
    measured = Engine(model, tokenizer, name="tiny")
    assert all(0.0 < each < math.inf for each in measured.planner.cost.as_dict().values())
    measured.close()


def test_an_engine_remembers_when_it_ends_and_the_next_one_begins_with_it(folder: Path) -> None:
    model, tokenizer = tiny_causal_lm("llama"), byte_tokenizer()
    with_costs = Engine(model, tokenizer, name="tiny", cost=(costs := learned()))
    with_costs.close()
    assert len(list(folder.iterdir())) == 1
    later = Engine(model, tokenizer, name="tiny")
    assert later.planner.cost.as_dict().keys() == costs.as_dict().keys()
    assert later.planner.cost.num_steps == len(START_UP_WIDTHS), "one step each, instead of measuring for a second"
    later.close()
