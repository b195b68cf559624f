"""What `precedent doctor` says of drafts that this package reads."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path

import pytest
import torch
from helpers.command_line import precedent
from helpers.published_blocks import SPECULATORS as DFLASH
from helpers.published_blocks import block_weights
from helpers.published_heads import COVERED, SPECFORGE, SPECULATORS, random_weights, small_target, write_head

from precedent_drafts.trained import DraftSettings
from precedent_testing.sweep import tiny_model
from precedent_testing.tiny_models import byte_tokenizer


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny chat model on disk, and ten prompts beside it."""
    folder = tmp_path_factory.mktemp("target")
    small_target(dtype=torch.float32).save_pretrained(folder)
    byte_tokenizer().save_pretrained(folder)
    (folder / "prompts.txt").write_text("".join(f"Say {number}.\n" for number in range(10)))
    return folder


@pytest.fixture(scope="module")
def head(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_head(tmp_path_factory.mktemp("head"), SPECULATORS, random_weights(SPECULATORS))


@pytest.fixture(scope="module")
def block(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_head(tmp_path_factory.mktemp("block"), DFLASH, block_weights(DFLASH, COVERED))


def finding(target: Path, draft: Path, tmp_path: Path) -> tuple[int, str, str]:
    """What `precedent doctor` says of a draft model: its status, and the state and text of the finding."""
    report = tmp_path / "report.json"
    status = precedent("doctor", target, "--draft-model", draft, "--json", report)
    found = {one["check"]: one for one in json.loads(report.read_text())["findings"]}["draft model"]
    return status, found["state"], found["finding"]


def test_doctor_says_what_was_recognised(target: Path, head: Path, block: Path, tmp_path: Path) -> None:
    """Format, layers and the model that a draft was trained for; without its weights, which may be large."""
    assert finding(target, head, tmp_path) == (
        0,
        "note",
        f"the EAGLE-3 head {head} (in the format of speculators); it reads layers 1, 2, 3 of the target; trained for "
        "somebody/a-llama",
    )
    status, state, says = finding(target, block, tmp_path)
    assert (status, state) == (0, "note")
    assert "(in the format of speculators); it fills 4 positions from layers 1, 3 of the target" in says
    nameless = write_head(tmp_path / "nameless", SPECFORGE, {})
    assert finding(target, nameless, tmp_path)[2].endswith("trained for a target that it does not name")


def test_doctor_refuses_what_does_not_fit(target: Path, tmp_path: Path) -> None:
    """Another target's head, and a head in the place of a model."""
    other = write_head(tmp_path / "other", SPECFORGE | {"hidden_size": 64}, {})
    status, state, says = finding(target, other, tmp_path)
    assert (status, state) == (1, "no")
    assert "was trained for a target of hidden_size=64, and this one has 48" in says
    assert precedent("doctor", other) == 1


def test_a_draft_trained_for_a_target_is_not_refused_unseen(target: Path, tmp_path: Path) -> None:
    """Only loading it shows whether it fits."""
    draft = tmp_path / "draft"
    draft.mkdir()
    settings = DraftSettings("my-model", "embeddings", "layers", (0, 2))
    (draft / "draft.json").write_text(json.dumps(dataclasses.asdict(settings)))
    status, state, says = finding(target, draft, tmp_path)
    assert (status, state) == (0, "note")
    assert says.startswith("a chain, trained for my-model")


def test_doctor_names_heads_that_a_checkpoint_may_carry(tmp_path: Path) -> None:
    """By the model's type: transformers drops their weights."""
    tiny_model("qwen3_next").save_pretrained(tmp_path / "model")
    byte_tokenizer().save_pretrained(tmp_path / "model")
    precedent("doctor", tmp_path / "model", "--json", tmp_path / "report.json")
    found = {one["check"]: one for one in json.loads((tmp_path / "report.json").read_text())["findings"]}
    assert "checkpoints of qwen3_next carry a trained MTP head" in found["mtp"]["finding"]
