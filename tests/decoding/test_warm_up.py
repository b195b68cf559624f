"""Step costs are remembered between processes; a file that is not sound is discarded, and the costs measured anew."""

from __future__ import annotations

import json
import math
import os
from pathlib import Path
from typing import Any

import pytest

from precedent.engine import Engine, warm_up
from precedent.engine.warm_up import FEWEST_STEPS, VERSION, RememberedCosts
from precedent.planning.costs import START_UP_WIDTHS, CostCurve, StepCosts
from precedent.runtime.recomputable import sealed
from precedent.target import TargetModel
from precedent_testing.tiny_models import byte_tokenizer, tiny_causal_lm


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr(warm_up, "user_cache_path", lambda name: tmp_path / name)
    return tmp_path / "precedent" / "step-costs"


@pytest.fixture(scope="module")
def target() -> TargetModel:
    return TargetModel(tiny_causal_lm("llama"))


@pytest.fixture
def remembered(target: TargetModel, folder: Path) -> RememberedCosts:
    return RememberedCosts(target, "one model")


@pytest.fixture
def file(remembered: RememberedCosts, folder: Path) -> Path:
    """The file of costs that were remembered."""
    remembered.write(learned())
    (file,) = folder.iterdir()
    return file


def learned(steps: int = FEWEST_STEPS) -> StepCosts:
    costs = StepCosts()
    costs.begin({1: 10.0, 8: 14.0, 32: 40.0}, threads=2)
    for step in range(steps):
        width = (1, 5, 12)[step % 3]
        costs.observe(width, 10.0 + width, 100, 2)
    return costs


def sign(costs: object, file: Path, version: str = VERSION) -> None:
    """Replace the costs in a file, and its checksum."""
    file.write_bytes(sealed(json.dumps(costs).encode(), version))


def test_what_was_learned_is_read_again_for_the_same_model(remembered: RememberedCosts, target: TargetModel) -> None:
    remembered.write(costs := learned())
    found = remembered.read()
    assert found is not None
    assert found.known == costs.known
    assert RememberedCosts(target, "another model").read() is None


def test_few_steps_and_given_curves_are_not_remembered(remembered: RememberedCosts, folder: Path) -> None:
    remembered.write(learned(FEWEST_STEPS - 1))
    remembered.write(CostCurve())
    assert not folder.exists()


def test_a_file_that_is_signed_anew_is_read_in_its_version_and_bounds(remembered: RememberedCosts, file: Path) -> None:
    """Or else the tests below would show nothing."""
    sign({"2": {"1": 10.0, "2": 9e6, "per_key": 0.1}}, file)
    found = remembered.read()
    assert found is not None
    assert found.milliseconds(2) == pytest.approx(25.0), "within what the narrower width allows"
    sign(learned().known, file, "another version")
    assert remembered.read() is None


@pytest.mark.parametrize(
    "costs",
    [
        *(None, [], {}, {"2": {}}, {"2": {"per_key": 0.1}}, {"2": [1.0]}, {"2": "abc"}, {"2": {"1": 10.0}}),
        *({threads: {"1": 10.0, "per_key": 0.1}} for threads in ("two", "0", "9" * 400)),
        *({"2": {"1": first, "per_key": 0.1}} for first in ("10.0", True, math.nan)),
        *({"2": {"1": 10.0, "8": wide, "per_key": 0.1}} for wide in (math.inf, 2.8e225, 10**400, -10.0, 0.0)),
        {"2": {"-1": 10.0, "per_key": 0.1}},
        *({"2": {"1": 10.0, "per_key": per_key}} for per_key in (2.8e225, -1.0)),
    ],
    ids=str,
)
def test_costs_that_cannot_be_are_discarded_in_spite_of_their_checksum(
    costs: object, remembered: RememberedCosts, file: Path
) -> None:
    sign(costs, file)
    assert remembered.read() is None


@pytest.mark.parametrize("content", [b"", b"{", b"null", b"\xff\xfe", b"[" * 100_000, b"2.8e+225", bytes(3 << 20)])
def test_a_file_with_other_content_is_discarded_with_the_reason(
    content: bytes, remembered: RememberedCosts, file: Path, caplog: pytest.LogCaptureFixture
) -> None:
    file.write_bytes(content)
    with caplog.at_level("INFO", "precedent"):
        assert remembered.read() is None
    assert "measuring step costs anew" in caplog.text


@pytest.mark.parametrize("kind", ["folder", "pipe", "unreadable", "no folder"])
def test_what_stands_in_its_place_harms_nothing(
    kind: str, remembered: RememberedCosts, file: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A pipe is not waited for. Root may read every file, so a refusal is simulated."""
    really = os.open

    def refused(path: Any, *settings: Any, **others: Any) -> int:
        if Path(path) == file:
            raise PermissionError(13, "Permission denied")
        return really(path, *settings, **others)

    file.unlink()
    if kind == "folder":
        file.mkdir()
    elif kind == "pipe":
        os.mkfifo(file)
    elif kind == "unreadable":
        file.touch()
        monkeypatch.setattr(os, "open", refused)
    else:
        file.parent.rmdir()
        file.parent.write_text("a file in its place")
    assert remembered.read() is None
    remembered.write(learned())
    assert (remembered.read() is None) is (kind != "pipe"), "it is replaced"
    if kind == "folder":
        assert list(file.parent.iterdir()) == [file]


def test_an_engine_remembers_when_it_ends_and_the_next_one_begins_with_it_unless_it_is_damaged(folder: Path) -> None:
    model, tokenizer = tiny_causal_lm("llama"), byte_tokenizer()
    Engine(model, tokenizer, name="tiny", cost=(costs := learned())).close()
    (file,) = folder.iterdir()
    later = Engine(model, tokenizer, name="tiny")
    assert later.planner.cost.as_dict().keys() == costs.as_dict().keys()
    assert later.planner.cost.num_steps == len(START_UP_WIDTHS), "one step each, instead of measuring for a second"
    later.close()
    file.write_bytes(b"damaged")
    measured = Engine(model, tokenizer, name="tiny")
    assert all(0.0 < each < math.inf for each in measured.planner.cost.as_dict().values())
    measured.close()
    Engine(model, tokenizer, name="tiny", cost=learned()).close()
    assert file.read_bytes() != b"damaged"
