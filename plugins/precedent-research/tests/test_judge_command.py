"""`precedent train-judge` from the command line, on a tiny target: what it writes, says and refuses."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from helpers.command_line import precedent
from helpers.tiny_judge import RUNS, tiny_draft

from precedent_research.judge import TrainedJudge
from precedent_testing.tiny_models import byte_tokenizer, tiny_causal_lm


@pytest.fixture(scope="module")
def given(tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    """Options that name a tiny target, its draft model, recorded runs and their outcome."""
    folder = tmp_path_factory.mktemp("models")
    for name, model in (("target", tiny_causal_lm(scale=2.0)), ("draft", tiny_draft())):
        model.to(torch.float32).save_pretrained(folder / name)
        byte_tokenizer().save_pretrained(folder / name)
    runs = folder / "runs.jsonl"
    answered = [
        {"task_id": run.task, "messages": [*run.messages, {"role": "assistant", "content": "Yes."}]} for run in RUNS
    ]
    runs.write_text("".join(json.dumps(each) + "\n" for each in answered))
    models = ["--target", str(folder / "target"), "--draft-model", str(folder / "draft")]
    return [*models, "--runs", str(runs), "--outcome", "helpers.tiny_judge:made"]


def test_a_judge_is_trained_reported_and_learned_anew(
    given: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Labels cost a run each once; from them a judge of other features is learned without one."""
    out, asked = tmp_path / "judge", ["--mismatches", "24", "--max-tokens", "6"]
    assert precedent("train-judge", *given, *asked, "--strength", "0.1", "--out", str(out)) == 0
    said = capsys.readouterr()
    assert "a run took" in said.err
    assert "6 runs, 0 of which failed and were left out" in said.out
    report = json.loads((out / "report.json").read_text())
    assert report["learned"]["labels"] + report["held_out"]["labels"] == 24
    assert TrainedJudge.load(out).threshold == report["threshold"]
    anew, results = tmp_path / "anew", tmp_path / "results.json"
    learned = ["--features", "divergence, margin", "--labels", str(out / "labels"), "--keep", "0.5"]
    assert precedent("train-judge", *given, *asked, *learned, "--out", str(anew), "--json", str(results)) == 0
    assert "a run took" not in capsys.readouterr().err
    assert TrainedJudge.load(anew).features == ("divergence", "margin")
    assert json.loads(results.read_text()) == json.loads((anew / "report.json").read_text())
    assert precedent("train-judge", *given, *asked, "--out", str(out)) == 2
    assert "is not empty; give a new folder" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (["--features", "rows,colour"], "must be distinct names of"),
        (["--keep", "1.5"], "keep=1.5 must be above 0 and at most 1"),
        (["--outcome", "nothing"], "no outcome is called 'nothing'"),
    ],
)
def test_what_cannot_be_is_refused_before_a_model_is_loaded(
    given: list[str], arguments: list[str], says: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert precedent("train-judge", *given, *arguments, "--out", str(tmp_path / "judge")) == 2
    said = capsys.readouterr()
    assert says in " ".join(said.err.split())
    assert "loading" not in said.err
    assert not (tmp_path / "judge").exists()


def test_a_draft_model_is_needed(given: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    target = given[:2] + given[4:]
    assert precedent("train-judge", *target, "--out", str(tmp_path / "judge")) == 2
    assert "give the draft model whose tokens are judged" in " ".join(capsys.readouterr().err.split())
