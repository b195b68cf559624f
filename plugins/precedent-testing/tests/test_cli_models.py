"""`precedent models`: what it prints, what it writes, and the sweep of all architectures."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest
from helpers.command_line import precedent

from precedent_testing import models_command as models
from precedent_testing import sweep
from precedent_testing.sweep import Outcome, try_architecture
from precedent_testing.tiny_configs import causal_lm_types


def test_it_says_what_works_and_why_others_do_not(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """One of each verdict, as a table and as JSON."""
    pytest.importorskip("precedent_models")
    report = tmp_path / "models.json"
    assert precedent("models", "lfm2", "zaya", "rwkv", "--json", str(report)) == 0
    written = capsys.readouterr().out
    assert written.startswith("1 works, 1 works on chains, 1 refused.\n")
    assert re.search(r"\| lfm2 \| works \| \de[-+]\d\d \|  \|", written)
    assert re.search(r"\| zaya \| works on chains \|.*ZayaCCAProjection has a state that follows one path", written)
    assert re.search(r"\| rwkv \| refused \|  \| rwkv has recurrent layers", written)
    outcomes = json.loads(report.read_text())["outcomes"]
    assert [one["verdict"] for one in outcomes] == ["works", "works on chains", "refused"]


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


def test_a_wrong_result_is_a_failure(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    """A model whose trees differ from plain forwards does not work, and the command says so."""
    monkeypatch.setattr(sweep, "compare", lambda target, plain: 0.01)
    assert precedent("models", "llama") == models.FAILED
    assert "llama: its trees are 0.01 off plain forwards" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("model_type", "verdict"),
    [
        *(("llama", "works"), ("qwen3_5_text", "works"), ("bloom", "works on chains"), ("deepseek_v4", "refused")),
        *(pytest.param(name, "works", marks=pytest.mark.exhaustive) for name in ("recurrent_gemma", "deepseek_v32")),
    ],
)
def test_the_families_on_the_page_get_these_verdicts(model_type: str, verdict: str) -> None:
    pytest.importorskip("precedent_models")
    assert try_architecture(model_type).verdict == verdict


@pytest.mark.slow
@pytest.mark.parametrize("model_type", causal_lm_types())
def test_no_architecture_crashes_or_computes_something_else(model_type: str) -> None:
    """Works, works on chains, or is refused for a reason."""
    outcome: Outcome = try_architecture(model_type)
    assert outcome.verdict in (sweep.WORKS, sweep.CHAINS, sweep.REFUSED), outcome.reason
    assert outcome.reason or outcome.verdict == sweep.WORKS
