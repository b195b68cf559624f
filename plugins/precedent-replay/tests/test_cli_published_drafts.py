"""The commands beside drafts that others published: what they say of them, what they measure, what they refuse."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from helpers.command_line import precedent
from helpers.published_heads import (
    COVERED,
    DFLASH,
    SPECULATORS,
    block_weights,
    random_weights,
    small_target,
    write_head,
)

from precedent.cli.progress import Progress
from precedent.drafters import load_draft
from precedent.engine.options import EngineOptions
from precedent.errors import ConfigError
from precedent.runtime.machine_load import OtherPrograms
from precedent_drafts.train_draft import report_on, show_report
from precedent_replay.bench import _chosen_modes
from precedent_replay.bench_lineup import Lineup
from precedent_testing.tiny_models import byte_tokenizer, tiny_causal_lm


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


def test_measure_draft_measures_blocks_and_refuses_heads(
    target: Path, head: Path, block: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    given = ["--target", target, "--prompts", target / "prompts.txt", "--answer-tokens", "6"]
    results = tmp_path / "results.json"
    assert precedent("measure-draft", *given, "--draft-model", block, "--json", results) == 0
    assert len(json.loads(results.read_text())["blocks"][0]["acceptance"]) == 4
    assert precedent("measure-draft", *given, "--draft-model", head) == 2
    assert "is an EAGLE head, which measure-draft cannot measure" in capsys.readouterr().err


@pytest.mark.parametrize(("share", "warned"), [(0.5, True), (0.01, False), (None, False)])
def test_a_busy_machine_is_named_beside_the_times(
    share: float | None, warned: bool, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(OtherPrograms, "share", lambda self: share)
    report = report_on(Progress(), tiny_causal_lm(), byte_tokenizer(), {}, [], 1.0, 6, 0)
    assert report["others_cpu_share"] == share
    show_report(report)
    assert ("other programs used 50% of the CPU meanwhile" in capsys.readouterr().out) is warned


def test_transformers_own_assisted_generation_is_left_out(head: Path, block: Path) -> None:
    """By default where a folder tells; and by an error where it was named."""
    for folder in (head, block):
        assert "assisted" not in _chosen_modes("", str(folder))
    assert "assisted" in _chosen_modes("", "first-layers:2")
    lineup: Any = object.__new__(Lineup)
    lineup._options, lineup._draft = EngineOptions(draft_model=head), load_draft(head, small_target(), byte_tokenizer())
    lineup.target = SimpleNamespace(model=small_target())
    with pytest.raises(ConfigError, match="mode 'assisted' is transformers', which cannot use"):
        lineup._transformers(["plain", "assisted"])
