"""`precedent train-draft --kind block` and `measure-draft` on what it wrote."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from helpers.command_line import precedent
from helpers.tiny_block import tiny_block_draft
from helpers.tiny_draft import PROMPTS, tiny_target

from precedent_drafts.training.block_lessons import BlockTeacher
from precedent_drafts.training.block_measure import BlockMeasurement
from precedent_drafts.training.block_student import block_rows
from precedent_drafts.training.lesson_plan import LessonPlan
from precedent_drafts.training.teacher import Author
from precedent_testing.tiny_models import byte_tokenizer, tiny_causal_lm

TOKENIZER = byte_tokenizer()


def test_acceptance_is_one_minus_total_variation_by_position() -> None:
    """Against the rows of every block, with the Markov term of the true token before, at the report's temperature."""
    target, ids = tiny_target(), [*range(30, 120), 257]
    author = Author(target, TOKENIZER, 1.0)
    texts = author.texts(PROMPTS[:2], [1, 2], 7)
    author.close()
    draft = tiny_block_draft(target, ids, context_tokens=24)
    found = BlockMeasurement(target, draft, texts, temperature=0.7).report("block")
    overlaps: list[list[float]] = [[] for _ in range(4)]
    columns = {token: place for place, token in enumerate(ids)}
    for text, lesson in zip(texts, BlockTeacher(target, (1, 3), 24).shard(texts).lessons, strict=True):
        with torch.no_grad():
            true = (target(torch.tensor([text.token_ids])).logits[0] / 0.7).softmax(-1)[:, ids]
        for anchor in lesson.anchors:
            tokens = torch.tensor([[text.token_ids[anchor], *[draft.inputs.mask_id] * 4]])
            with torch.no_grad():
                rows = block_rows(draft, lesson.states, tokens, torch.tensor([anchor - lesson.first]))[0, 1:]
                for depth, row in enumerate(draft.head.rows(rows)):
                    if anchor + depth + 1 < len(text.token_ids):
                        before = columns.get(text.token_ids[anchor + depth], len(ids))
                        probs = ((row + draft.markov(torch.tensor(before))) / 0.7).softmax(-1)
                        overlaps[depth].append(float(torch.minimum(probs, true[anchor + depth]).sum()))
    assert found.acceptance == pytest.approx([sum(each) / len(each) for each in overlaps], abs=1e-6)
    assert (found.positions, found.prompts, found.nodes) == (14, 2, 16)
    assert found.tokens_per_step >= 1.0


@pytest.fixture(scope="module")
def target_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny chat model on disk, and ten prompts beside it."""
    folder = tmp_path_factory.mktemp("target")
    tiny_causal_lm(hidden_size=32, dtype=torch.float32, scale=2.0).save_pretrained(folder)
    TOKENIZER.save_pretrained(folder)
    (folder / "prompts.txt").write_text("".join(f"Say {number}.\n" for number in range(10)))
    return folder


def test_a_block_draft_is_trained_reported_and_measured(
    target_folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """The whole recipe from the command line, with the least of everything; measured beside an early exit."""
    monkeypatch.setattr(LessonPlan, "of", classmethod(lambda *_: LessonPlan(1, 0, 2)))
    given = ["--target", str(target_folder), "--prompts", str(target_folder / "prompts.txt"), "--answer-tokens", "6"]
    out, results = str(tmp_path / "draft"), tmp_path / "results.json"
    train = ["train-draft", "--kind", "block", *given, "--out", out, "--layers", "1", "--block-size", "3"]
    assert precedent(*train) == 0
    said = capsys.readouterr()
    assert "16 answers of the target, 2 steps" in said.err
    assert "per step" in said.out
    report = json.loads((tmp_path / "draft" / "report.json").read_text())
    assert len(report["blocks"][0]["acceptance"]) == 3
    assert report["plan"] == {"chunks": 1, "completions": 0, "steps": 2}
    assert json.loads((tmp_path / "draft" / "config.json").read_text())["kind"] == "precedent-block-draft"
    compared = ["--draft-model", out, "--draft-model", "first-layers:1", "--json", str(results)]
    assert precedent("measure-draft", *given, *compared) == 0
    measured = json.loads(results.read_text())
    assert measured["blocks"][0]["acceptance"] == pytest.approx(report["blocks"][0]["acceptance"], abs=1e-5)
    assert [each["draft"] for each in measured["drafts"]] == ["first-layers:1"]
    assert precedent(*train) == 2
    assert "is not empty; give a new folder" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (["--kind", "block", "--start", "first"], "must be ends or a block draft's folder"),
        (["--kind", "block", "--iterations", "9"], "iterations=9 must lie between 1 and block_size"),
    ],
)
def test_what_a_block_draft_does_not_take_is_refused_by_name(
    arguments: list[str], says: str, target_folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """In one line, before anything is loaded."""
    given = ["--target", str(target_folder), "--prompts", str(target_folder / "prompts.txt"), "--out", str(tmp_path)]
    assert precedent("train-draft", *given, *arguments) == 2
    errors = capsys.readouterr().err.strip().splitlines()
    assert len(errors) == 1
    assert says in errors[0]
