"""The report on a draft model, and the commands that make it."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
import torch
from helpers.command_line import precedent
from helpers.tiny_draft import PROMPTS, tiny_target
from transformers import PreTrainedModel

from precedent.target.load.first_layers import first_layers
from precedent_drafts.training.measure import Measurement, expected_tokens
from precedent_drafts.training.schedule import Recipe, Schedule
from precedent_drafts.training.teacher import Author
from precedent_drafts.training.texts import Text
from precedent_testing.tiny_models import byte_tokenizer, tiny_causal_lm

TOKENIZER = byte_tokenizer()


# The report


def answered(target: PreTrainedModel) -> list[Text]:
    author = Author(target, TOKENIZER, 1.0)
    texts = author.texts(PROMPTS[:2], [1, 2], 9)
    author.close()
    return texts


def test_a_target_accepts_all_of_itself() -> None:
    target = tiny_target()
    report = Measurement(target, answered(target)).report("itself", target)
    assert report.acceptance == pytest.approx(1.0)
    assert (report.agreement, report.positions, report.prompts) == (1.0, 18, 2)


def test_acceptance_is_one_minus_total_variation() -> None:
    target, texts = tiny_target(), answered(tiny_target())
    draft = first_layers(target, 1)
    found = Measurement(target, texts, temperature=0.7).report("early exit", draft)
    overlaps, agreed = [], []
    for text in texts:
        tokens = torch.tensor([text.token_ids[:-1]])
        with torch.no_grad():
            rows = [model(tokens).logits[0, -text.num_answer_tokens :] for model in (target, draft)]
        distributions = [(each / 0.7).softmax(-1) for each in rows]
        overlaps += (1 - 0.5 * (distributions[0] - distributions[1]).abs().sum(-1)).tolist()
        agreed += (rows[0].argmax(-1) == rows[1].argmax(-1)).tolist()
    assert found.acceptance == pytest.approx(float(np.mean(overlaps)), abs=1e-9)
    assert found.agreement == pytest.approx(float(np.mean(agreed)))


def test_expected_tokens_of_chains() -> None:
    """Draw after draw is accepted with the product of the acceptances on the way."""
    assert expected_tokens([np.full(50, 0.5)], 3) == pytest.approx([1, 1.5, 1.75, 1.875])
    assert expected_tokens([np.array([1.0, 0.0, 1.0])], 2) == pytest.approx([1, 1.5, 1.5])
    assert expected_tokens([np.array([0.5])], 2) == pytest.approx([1, 1.5, 1.5])


# The commands


@pytest.fixture(scope="module")
def target_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny chat model on disk, and ten prompts beside it."""
    folder = tmp_path_factory.mktemp("target")
    tiny_causal_lm(hidden_size=32, dtype=torch.float32, scale=2.0).save_pretrained(folder)
    TOKENIZER.save_pretrained(folder)
    (folder / "prompts.txt").write_text("".join(f"Say {number}.\n" for number in range(10)))
    return folder


def test_a_draft_is_trained_reported_and_measured_beside_an_early_exit(
    target_folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """The whole recipe from the command line, with the least of everything."""
    monkeypatch.setattr(Recipe, "planned", lambda *_: Schedule(1, 1, 1, 2, 1))
    given = ["--target", str(target_folder), "--prompts", str(target_folder / "prompts.txt"), "--answer-tokens", "6"]
    out, results = str(tmp_path / "draft"), tmp_path / "results.json"
    train = ["train-draft", *given, "--out", out, "--layers", "1", "--head-tokens", "64", "--rounds", "2"]
    assert precedent(*train) == 0
    report = json.loads((tmp_path / "draft" / "report.json").read_text())
    assert report["drafts"][0]["positions"] == 6
    assert report["plan"] == {"chunks": 1, "completions": 1, "rollouts": 1, "rounds": 2, "steps_per_round": 1}
    assert report["recipe"]["head_tokens"] == 64
    compared = ["--draft-model", out, "--draft-model", "first-layers:1", "--json", str(results)]
    assert precedent("measure-draft", *given, *compared) == 0
    trained, early = json.loads(results.read_text())["drafts"]
    assert trained["acceptance"] == pytest.approx(report["drafts"][0]["acceptance"], abs=1e-6)
    assert early["draft"] == "first-layers:1"
    assert "per step" in capsys.readouterr().out
    assert precedent(*train) == 2
    assert "is not empty; give a new folder" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("files", "arguments", "says"),
    [
        ([], ["--resume"], "there is nothing to resume"),
        (["training/plan.json"], [], "continue it with --resume"),
        (["letter.txt"], [], "is not empty"),
        ([], ["--start", "middle"], "must be ends, first, last or a draft's folder"),
        ([], ["--temperature", "0"], "temperature=0.0 must be greater than 0"),
    ],
)
def test_a_command_that_cannot_be_meant_is_one_line(
    files: list[str], arguments: list[str], says: str, target_folder: Path, tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:  # fmt: skip
    for name in files:
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text("")
    given = ["--target", str(target_folder), "--prompts", str(target_folder / "prompts.txt"), "--out", str(tmp_path)]
    assert precedent("train-draft", *given, *arguments) == 2
    errors = capsys.readouterr().err.strip().splitlines()
    assert len(errors) == 1
    assert says in errors[0]
