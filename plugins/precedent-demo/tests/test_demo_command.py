"""`precedent demo` as a whole, on a tiny model that says nothing sensible: what it prints and writes."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from helpers.command_line import precedent

from precedent.cache import embedder
from precedent.planning import costs as cost_curve
from precedent_demo import conversation
from precedent_demo.demo_runs import WAYS
from precedent_testing.embedders import HashEmbedder
from precedent_testing.tiny_models import byte_tokenizer, tiny_causal_lm

NAMES = [way.name for way in WAYS]


@pytest.mark.slow
def test_a_demo_of_one_request(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    model, figures, page = tmp_path / "model", tmp_path / "demo.json", tmp_path / "demo.html"
    settings = {"dtype": torch.float32, "num_hidden_layers": 2, "max_position_embeddings": 16384}
    tiny_causal_lm(scale=2.0, **settings).save_pretrained(model)
    byte_tokenizer().save_pretrained(model)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setenv("COLUMNS", "80")
    monkeypatch.setattr(embedder, "SentenceTransformerEmbedder", lambda name: HashEmbedder())
    monkeypatch.setattr(conversation, "MAX_TURNS", 2)
    monkeypatch.setattr("precedent_demo.MAX_TOKENS_PER_TURN", 8)
    monkeypatch.setattr(cost_curve, "START_UP_SECONDS", 0.0)
    given = ["--target", model, "--draft-model", "first-layers:1", "--requests", 1, "--json", figures, "--html", page]
    assert precedent("demo", *given) == 0
    found, shown = json.loads(figures.read_text(encoding="utf-8")), capsys.readouterr()
    assert [run["name"] for run in found["runs"]] == NAMES
    for run in found["runs"]:
        assert run["requests"] == 1
        assert run["request_seconds"] >= run["decode_seconds"] > 0
        assert run["decode_speedup"] > 0
        assert run["request_speedup"] > 0
        assert run["decode_speedup_interval"] is run["request_speedup_interval"] is None
    assert found["runs"][0]["decode_speedup"] == found["runs"][0]["request_speedup"] == 1.0
    assert found["both_over_cache"]["decode_speedup"] > 0
    assert found["warming_requests"] == 2
    assert "1 request is too few (use --requests 4)" in " ".join(shown.out.split())
    assert "after 1 request" in shown.err
    assert "request speed" in page.read_text(encoding="utf-8")
