"""`precedent train-draft` for every kind of draft, `measure-draft` on what it wrote, and what both report."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
import torch
from helpers.command_line import precedent
from helpers.golden import Golden, shape
from helpers.tiny_draft import PROMPTS, tiny_target

from precedent.drafters import Candidates
from precedent.target.load.first_layers import first_layers
from precedent_drafts.training.lessons import Author, Text
from precedent_drafts.training.measure import Measurement, expected_tokens, matched_tokens
from precedent_drafts.training.training import Plan
from precedent_testing.tiny_models import byte_tokenizer, tiny_causal_lm

KINDS = {
    "chain": ["--layers", "1", "--head-tokens", "64", "--rounds", "2"],
    "exit": ["--kind", "exit", "--exit-layer", "2", "--exit-width", "8"],
    "conditioned": [
        "--condition", "target", "--layers", "1", "--passes", "2", "--mask-top-k", "3", "--fusion", "token-guided",
    ],
    "block": ["--kind", "block", "--layers", "1", "--block-size", "3"],
    "own-context": ["--kind", "block", "--condition", "none", "--layers", "1", "--block-size", "3"],
}  # fmt: skip


@pytest.fixture(scope="module")
def given(tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    """A tiny chat model on disk, and ten prompts beside it, as the commands take them."""
    folder = tmp_path_factory.mktemp("target")
    tiny_causal_lm(hidden_size=32, dtype=torch.float32, scale=2.0).save_pretrained(folder)
    byte_tokenizer().save_pretrained(folder)
    (folder / "prompts.txt").write_text("".join(f"Say {number}.\n" for number in range(10)))
    return ["--target", str(folder), "--prompts", str(folder / "prompts.txt"), "--answer-tokens", "6"]


def test_every_kind_is_trained_reported_and_measured(
    given: list[str],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    golden: Golden,
) -> None:
    """`measure-draft` finds what the report beside each draft says; an exit is reported beside its bare layers."""
    monkeypatch.setattr(Plan, "of", classmethod(lambda cls, minutes, rounds, *_: Plan(1, 0, 2, rounds, rounds - 1)))
    for name, arguments in KINDS.items():
        assert precedent("train-draft", *given, "--out", str(tmp_path / name), *arguments) == 0
        assert "16 answers of the target" in capsys.readouterr().err
    reports = {name: json.loads((tmp_path / name / "report.json").read_text()) for name in KINDS}
    assert reports["chain"]["plan"] == {"chunks": 1, "completions": 0, "steps": 2, "rounds": 2, "rollouts": 1}
    assert reports["chain"]["recipe"]["head_tokens"] == 64
    assert [each["draft"] for each in reports["exit"]["drafts"]] == ["first-layers:2", str(tmp_path / "exit")]
    assert reports["exit"]["recipe"]["exit_layer"] == 2
    assert len(reports["conditioned"]["drafts"][0]["acceptance_by_draw"]) == 6
    assert len(reports["block"]["blocks"][0]["acceptance"]) == 3
    assert reports["own-context"]["recipe"]["condition"] == "none"
    results = tmp_path / "results.json"
    drafts = [word for name in KINDS for word in ("--draft-model", str(tmp_path / name))]
    assert precedent("measure-draft", *given, *drafts, "--draft-model", "first-layers:1", "--json", str(results)) == 0
    assert "per step" in capsys.readouterr().out
    found = json.loads(results.read_text())
    kinds = {f"train-draft, {name}": shape(report) for name, report in reports.items()}
    golden("transcripts/commands-drafts", {**kinds, "measure-draft": shape(found)})
    measured = {Path(each["draft"]).name: each for each in (*found["drafts"], *found["blocks"])}
    assert measured.keys() == KINDS.keys() | {"first-layers:1"}
    for name, report in reports.items():
        expected = report["blocks" if "blocks" in report else "drafts"][-1]
        assert measured[name]["acceptance"] == pytest.approx(expected["acceptance"], abs=1e-5)
    assert precedent("train-draft", *given, "--out", str(tmp_path / "exit"), *KINDS["exit"]) == 2
    assert "is not empty; give a new folder" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("file", "arguments", "says"),
    [
        (None, ["--resume"], "there is nothing to resume"),
        ("training/plan.json", [], "continue it with --resume"),
        ("letter.txt", [], "is not empty"),
        (None, ["--temperature", "0"], "temperature=0.0 must be greater than 0"),
        (None, ["--kind", "exit", "--iterations", "2"], "--iterations is for --kind block, and this is --kind exit"),
        (None, ["--kind", "exit", "--rounds", "2"], "--rounds is for --kind chain, and this is --kind exit"),
        (None, ["--kind", "exit", "--condition", "target"], "--condition is for"),
        (None, ["--kind", "block", "--iterations", "9"], "iterations=9 must lie between 1 and block_size"),
        (None, ["--mask-top-k", "3"], "--mask-top-k is for --kind chain --condition target, and this is --kind chain"),
        (None, ["--condition", "target", "--passes", "1", "--mask-top-k", "3"], "mask_top_k leaves tokens out of"),
    ],
)
def test_a_command_that_cannot_be_meant_is_one_line(
    file: str | None, arguments: list[str], says: str, given: list[str], tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:  # fmt: skip
    """Before anything is loaded."""
    if file is not None:
        (tmp_path / file).parent.mkdir(exist_ok=True)
        (tmp_path / file).write_text("")
    assert precedent("train-draft", *given, "--out", str(tmp_path), *arguments) == 2
    errors = capsys.readouterr().err.strip().splitlines()
    assert len(errors) == 1
    assert says in errors[0]


# The report


@pytest.fixture(scope="module")
def texts() -> list[Text]:
    author = Author(tiny_target(), byte_tokenizer(), 1.0)
    texts = author.texts(PROMPTS[:2], [1, 2], 9)
    author.close()
    return texts


def test_acceptance_is_one_minus_total_variation(texts: list[Text]) -> None:
    target = tiny_target()
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
    assert found["acceptance"] == pytest.approx(float(np.mean(overlaps)), abs=1e-9)
    assert found["agreement"] == pytest.approx(float(np.mean(agreed)))


def test_expected_tokens_of_chains_and_the_matched_path_of_a_tree() -> None:
    """Draw after draw is accepted with the product of the acceptances on the way."""
    assert expected_tokens([np.full(50, 0.5)], 3) == pytest.approx([1, 1.5, 1.75, 1.875])
    assert expected_tokens([np.array([1.0, 0.0, 1.0])], 2) == pytest.approx([1, 1.5, 1.5])
    assert expected_tokens([np.array([0.5])], 2) == pytest.approx([1, 1.5, 1.5])
    tree = Candidates.of("t", [(5, -1, 0.5, 0), (6, -1, 0.5, 0), (7, 1, 0.5, 0), (8, 2, 0.5, 0)])
    assert [matched_tokens(tree, answer) for answer in ((6, 7, 8, 9), (6, 8), (7,), ())] == [3, 1, 0, 0]
