"""The verdict of a replay: what it says in words, and what it leaves out because nobody measured it."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from typer.testing import CliRunner

from precedent.cli.app import app
from precedent.runtime.machine_load import BUSY_SHARE
from precedent.target import TargetModel
from precedent_replay.measured_steps import ROUNDS, measured_steps
from precedent_replay.run import Settings, replay
from precedent_replay.settings import MEASURED, MeasuredSteps
from precedent_replay.simulate import Report, Tally
from precedent_replay.verdict import FEWEST_TURNS, verdict
from precedent_testing.tiny_models import byte_tokenizer, tiny_causal_lm

STEPS = MeasuredSteps("my-model (bfloat16, cpu, 2 threads)", {1: 20.0, 8: 20.0, 32: 50.0}, 0.02)


@pytest.fixture(scope="module")
def log(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Many conversations in which only a number differs."""
    path = tmp_path_factory.mktemp("log") / "log.jsonl"
    records = []
    for number in range(30):
        said = f"your order {number} is on its way to you and will arrive on monday"
        messages = [{"role": "user", "content": f"where is {number}?"}, {"role": "assistant", "content": said}]
        records.append({"task_id": str(number), "order": number, "messages": messages})
    path.write_text("".join(json.dumps(record) + "\n" for record in records))
    return path


def replayed(log: Path, **settings: Any) -> dict[str, Any]:
    return replay([log], [], byte_tokenizer(), None, Settings(**settings)).as_dict()


def main_row(found: dict[str, Any]) -> dict[str, Any]:
    (row,) = [row for row in found["drafters"] if row["main"]]
    return row


def test_the_verdict_compares_with_prompt_lookup_and_the_best_baseline(log: Path) -> None:
    found = replayed(log)
    row, lookup = main_row(found), found["drafters"][0]
    row |= {"tokens_per_step": 4.1234, "ratio": 1.0567, "best_baseline": "suffix"}
    lookup["tokens_per_step"] = 2.17
    assert verdict(found) == (
        "Your log: 4.1 tokens per step, 1.9 times what prompt lookup reaches, 6 % above the best baseline that "
        "verifies no more (suffix). How much faster that is depends on what a step costs; --target MODEL measures it "
        "on this machine."
    )
    row["ratio"] = 0.9
    assert "10 % below the best baseline" in verdict(found)
    row["ratio"] = 1.001
    assert "as much as the best baseline" in verdict(found)
    row["ratio"] = None
    assert "baseline" not in verdict(found)


def test_speed_is_that_of_measured_steps_and_names_their_model(log: Path) -> None:
    found = replayed(log, measured=STEPS, curves=(MEASURED,))
    row = main_row(found)
    assert row["curve"] == MEASURED, "the trees were planned for this machine"
    assert f"about {row['speed_on_this_machine']:.1f} times as fast on this machine" in verdict(found)
    assert STEPS.model in verdict(found)
    assert found["settings"]["measured"]["step_milliseconds_by_width"] == {1: 20.0, 8: 20.0, 32: 50.0}


def test_a_busy_machine_says_no_speed(log: Path) -> None:
    for busy, said in ((BUSY_SHARE, True), (BUSY_SHARE + 0.01, False), (None, True)):
        steps = MeasuredSteps(STEPS.model, STEPS.milliseconds, busy)
        assert ("times as fast" in verdict(replayed(log, measured=steps, curves=(MEASURED,)))) == said


def test_few_answers_are_called_a_hint(log: Path) -> None:
    assert "take it as a hint" in verdict(replayed(log, limit=FEWEST_TURNS - 1))
    assert "take it as a hint" not in verdict(replayed(log, limit=FEWEST_TURNS))


def test_the_time_of_drafting_counts() -> None:
    """Ten tokens in two steps as long as a plain one are five times as fast, less where drafting takes time."""
    report, costs = Report(text=Tally(tokens=10, steps=2)), Settings(measured=STEPS).step_costs(MEASURED)
    report.text.widths[7] = 2
    assert report.speed(costs, STEPS.plain) == pytest.approx(5.0)
    report.microseconds.extend([10_000.0, 10_000.0])
    assert report.speed(costs, STEPS.plain) == pytest.approx(10 / 3)


def test_every_width_is_timed_several_times_and_the_best_counts(monkeypatch: pytest.MonkeyPatch) -> None:
    timed: list[int] = []

    def milliseconds(target: TargetModel, width: int) -> float:
        timed.append(width)
        return 100.0 / len(timed)

    monkeypatch.setattr(TargetModel, "measure_costs", milliseconds)
    rounds: list[int] = []
    steps = measured_steps(tiny_causal_lm(dtype=torch.float32), "tiny", 10, lambda done, total: rounds.append(done))
    assert list(steps.milliseconds) == [1, 2, 4, 8, 12]
    assert timed == [1, 2, 4, 8, 12] * ROUNDS
    assert steps.milliseconds[12] == 100.0 / len(timed)
    assert rounds == list(range(ROUNDS))
    assert steps.model.startswith("tiny (float32, cpu, ")


def test_the_command_ends_with_the_verdict_and_hides_what_research_needs(log: Path, tmp_path: Path) -> None:
    model = tmp_path / "model"
    tiny_causal_lm(dtype=torch.float32).save_pretrained(model)
    byte_tokenizer().save_pretrained(model)
    words = ["replay", str(log), "--tokenizer", str(model), "--embedder", "none"]
    short = CliRunner().invoke(app, words).stdout
    assert short.rstrip().splitlines()[-1].startswith("Your log: ")
    assert "nodes" not in short.split("\n* ")[0]
    details = CliRunner().invoke(app, [*words, "--details"]).stdout
    assert {"nodes/", "p99", "by kind of turn"} <= {
        word for word in ("nodes/", "p99", "by kind of turn") if word in details
    }
    timed = CliRunner().invoke(app, [*words[:2], "--embedder", "none", "--target", str(model)])
    assert timed.exit_code == 0, timed.output
    assert str(model) in timed.stdout.rstrip().splitlines()[-1] or "cannot be said" in timed.stdout
    refused = CliRunner().invoke(app, [*words, "--dtype", "float32"])
    assert "give --target as well" in str(refused.exception)
