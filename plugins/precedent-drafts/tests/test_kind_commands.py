"""`precedent train-draft` for every kind of draft, and `measure-draft` on what each wrote."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from helpers.command_line import precedent

from precedent_drafts.train_kinds import TAKEN_BY
from precedent_drafts.training.lesson_plan import LessonPlan
from precedent_testing.tiny_models import byte_tokenizer, tiny_causal_lm

KINDS = {
    "exit": ["--kind", "exit", "--exit-layer", "2", "--exit-width", "8"],
    "conditioned": [
        "--condition", "target", "--layers", "1", "--passes", "2", "--mask-top-k", "3", "--fusion", "token-guided",
    ],
    "own-context": ["--kind", "block", "--condition", "none", "--layers", "1", "--block-size", "3"],
}  # fmt: skip


@pytest.fixture(scope="module")
def target_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny chat model on disk, and ten prompts beside it."""
    folder = tmp_path_factory.mktemp("target")
    tiny_causal_lm(hidden_size=32, dtype=torch.float32, scale=2.0).save_pretrained(folder)
    byte_tokenizer().save_pretrained(folder)
    (folder / "prompts.txt").write_text("".join(f"Say {number}.\n" for number in range(10)))
    return folder


def given(folder: Path) -> list[str]:
    return ["--target", str(folder), "--prompts", str(folder / "prompts.txt"), "--answer-tokens", "6"]


@pytest.fixture(scope="module")
def trained(target_folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a draft of every kind, each trained with the least of everything."""
    out = tmp_path_factory.mktemp("drafts")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(LessonPlan, "of", classmethod(lambda *_: LessonPlan(1, 0, 2)))
        for name, arguments in KINDS.items():
            assert precedent("train-draft", *given(target_folder), "--out", str(out / name), *arguments) == 0
    return out


def test_every_kind_is_trained_reported_and_measured(
    trained: Path, target_folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """`measure-draft` finds what the report beside each draft says; an exit is reported beside its bare layers."""
    reports = {name: json.loads((trained / name / "report.json").read_text()) for name in KINDS}
    assert [each["draft"] for each in reports["exit"]["drafts"]] == ["first-layers:2", str(trained / "exit")]
    assert reports["exit"]["recipe"]["layer"] == 2
    assert len(reports["conditioned"]["drafts"][0]["acceptance_by_draw"]) == 6
    assert reports["own-context"]["recipe"]["condition"] == "none"
    results = tmp_path / "results.json"
    drafts = [word for name in KINDS for word in ("--draft-model", str(trained / name))]
    assert precedent("measure-draft", *given(target_folder), *drafts, "--json", str(results)) == 0
    found = json.loads(results.read_text())
    exited, conditioned = found["drafts"]
    assert exited["acceptance"] == pytest.approx(reports["exit"]["drafts"][1]["acceptance"], abs=1e-5)
    assert conditioned["acceptance_by_draw"] == pytest.approx(
        reports["conditioned"]["drafts"][0]["acceptance_by_draw"], abs=1e-5
    )
    assert found["blocks"][0]["acceptance"] == pytest.approx(
        reports["own-context"]["blocks"][0]["acceptance"], abs=1e-5
    )
    assert "per step" in capsys.readouterr().out


def test_it_says_what_it_will_cost_before_it_starts(
    target_folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Answers, steps, and the room that they take."""
    monkeypatch.setattr(LessonPlan, "of", classmethod(lambda *_: LessonPlan(1, 0, 1)))
    train = ["train-draft", *given(target_folder), "--out", str(tmp_path / "exit"), *KINDS["exit"]]
    assert precedent(*train) == 0
    assert "16 answers of the target, 1 steps, 0 MB in" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (["--kind", "exit", "--iterations", "2"], "--iterations is for --kind block, and this is --kind exit"),
        (["--kind", "exit", "--rounds", "2"], "--rounds is for --kind chain, and this is --kind exit"),
        (["--kind", "exit", "--condition", "target"], "--condition is for"),
        (["--kind", "exit", "--layers", "1"], "--layers is for"),
        (["--kind", "block", "--passes", "2"], "--passes is for --kind chain --condition target"),
        (["--kind", "block", "--exit-layer", "2"], "--exit-layer is for --kind exit"),
        (["--mask-top-k", "3"], "--mask-top-k is for --kind chain --condition target, and this is --kind chain"),
        (["--condition", "none", "--context-tokens", "9"], "--context-tokens is for"),
        (["--condition", "target", "--rounds", "2"], "--rounds is for --kind chain, and this is"),
        (["--condition", "target", "--passes", "1", "--mask-top-k", "3"], "mask_top_k leaves tokens out of later"),
        (["--condition", "target", "--fusion", "loud"], "fusion='loud' must be linear or token-guided"),
        (["--condition", "target", "--start", "elsewhere"], "start='elsewhere' must be ends, first, last"),
    ],
)
def test_options_that_mean_nothing_together_are_refused_by_name(
    arguments: list[str], says: str, target_folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """In one line, before anything is loaded."""
    assert precedent("train-draft", *given(target_folder), "--out", str(tmp_path), *arguments) == 2
    errors = capsys.readouterr().err.strip().splitlines()
    assert len(errors) == 1
    assert says in errors[0]


def test_an_exit_has_a_layer_of_the_target(
    target_folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Known once the target is loaded."""
    train = ["train-draft", *given(target_folder), "--out", str(tmp_path / "exit"), "--kind", "exit"]
    assert precedent(*train) == 2
    assert "layer=4: an exit of this target stands behind layer 1 to 2" in capsys.readouterr().err


def test_only_a_chain_that_reads_tokens_alone_is_trained_on(
    trained: Path, target_folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """`--start` takes no other kind."""
    train = ["train-draft", *given(target_folder), "--out", str(tmp_path / "chain"), "--layers", "1"]
    assert precedent(*train, "--start", str(trained / "exit")) == 2
    assert "only a chain of tokens alone is trained on" in capsys.readouterr().err


def test_the_table_of_options_names_options() -> None:
    """A renamed option would never be refused."""
    import inspect

    from precedent_drafts.train_draft import train_draft

    assert TAKEN_BY.keys() <= inspect.signature(train_draft).parameters.keys()
