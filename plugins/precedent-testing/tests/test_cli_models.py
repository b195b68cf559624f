"""`precedent models`: what it prints, what it writes, and the sweep of all architectures."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest
from helpers.command_line import precedent

from precedent_testing import models_command as models
from precedent_testing import sweep
from precedent_testing.models_command import BEGIN, END
from precedent_testing.sweep import Outcome, try_architecture
from precedent_testing.tiny_configs import causal_lm_types


def test_it_says_what_works_and_why_others_do_not(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """One of each verdict, as a table, in a page, and as JSON."""
    page, report = tmp_path / "page.md", tmp_path / "models.json"
    page.write_text(f"above\n{BEGIN}\nold\n{END}\nbelow\n")
    assert precedent("models", "lfm2", "zaya", "rwkv", "--write", str(page), "--json", str(report)) == 0
    written = page.read_text()
    assert re.search(r"\| lfm2 \| works \| \de[-+]\d\d \|  \|", written)
    assert re.search(r"\| zaya \| works on chains \|.*ZayaCCAProjection has a state that follows one path", written)
    assert re.search(r"\| rwkv \| refused \|  \| rwkv has recurrent layers", written)
    assert written.startswith(f"above\n{BEGIN}\n")
    assert written.endswith(f"{END}\nbelow\n")
    assert "old" not in written
    assert [one["verdict"] for one in json.loads(report.read_text())["outcomes"]] == [
        "works",
        "works on chains",
        "refused",
    ]
    capsys.readouterr()


def test_types_that_are_named_replace_their_own_rows(tmp_path: Path) -> None:
    """The others stay as they were, and the counts are those of the whole table."""
    page = tmp_path / "page.md"
    rows = ["| aaa | works | 3e-16 |  |", "| rwkv | works | 1e-01 | of old |", "| zzz | refused |  | for a reason |"]
    page.write_text("\n".join([f"above\n{BEGIN}\n", "2 works, 1 refused.", "", *models.HEAD, *rows, "", f"{END}\n"]))
    assert precedent("models", "rwkv", "--write", str(page)) == 0
    lines = page.read_text().splitlines()
    assert [line for line in lines if line.startswith("| ")][1:] == [
        rows[0],
        next(line for line in lines if line.startswith("| rwkv | refused |  | rwkv has recurrent layers")),
        rows[2],
    ]
    assert "2 refused, 1 works." in lines


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        ([], "give some model types, or --sweep"),
        (["llama", "--sweep"], "give some model types, or --sweep"),
        (["qwen99"], "transformers has no causal LM 'qwen99'"),
    ],
)
def test_bad_usage_gets_one_line(arguments: list[str], says: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert precedent("models", *arguments) == 2
    assert says in " ".join(capsys.readouterr().err.split())


def test_a_page_without_a_place_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    page = tmp_path / "page.md"
    page.write_text("nothing here\n")
    assert precedent("models", "rwkv", "--write", str(page)) == 2
    assert "no place for the table" in capsys.readouterr().err
    assert page.read_text() == "nothing here\n"


def test_a_wrong_result_is_a_failure(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    """A model whose trees differ from plain forwards does not work, and the command says so."""
    monkeypatch.setattr(sweep, "compare", lambda target, plain: 0.01)
    assert precedent("models", "llama") == models.FAILED
    assert "llama: its trees are 0.01 off plain forwards" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("model_type", "verdict"),
    [("llama", "works"), ("qwen3_5_text", "works"), ("recurrent_gemma", "works"), ("bloom", "works on chains"),
     ("deepseek_v32", "works"), ("deepseek_v4", "refused")],
)  # fmt: skip
def test_the_families_on_the_page_get_these_verdicts(model_type: str, verdict: str) -> None:
    assert try_architecture(model_type).verdict == verdict


@pytest.mark.slow
@pytest.mark.parametrize("model_type", causal_lm_types())
def test_no_architecture_crashes_or_computes_something_else(model_type: str) -> None:
    """Works, works on chains, or is refused for a reason."""
    outcome: Outcome = try_architecture(model_type)
    assert outcome.verdict in (sweep.WORKS, sweep.CHAINS, sweep.REFUSED), outcome.reason
    assert outcome.reason or outcome.verdict == sweep.WORKS
