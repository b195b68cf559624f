"""`precedent models`: what it prints, what it writes, and the sweep of all architectures."""

from __future__ import annotations

import json
import re
import shutil
from pathlib import Path

import pytest
import torch
from helpers.command_line import precedent
from helpers.model_stores import OllamaStore, lm_studio
from helpers.saved_models import saved
from huggingface_hub import constants
from transformers import MusicgenConfig

from precedent_testing import models_command as models
from precedent_testing import sweep
from precedent_testing.sweep import Outcome, try_architecture
from precedent_testing.tiny_configs import causal_lm_types
from precedent_testing.tiny_gguf import write_gguf
from precedent_testing.tiny_models import byte_tokenizer, tiny_causal_lm


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
        (["llama", "--local"], "give some model types, or --sweep"),
        (["llama", "--context", "8"], "or --local [--context N]"),
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
@pytest.mark.sampled(4)
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


def test_the_models_of_this_machine_are_listed_with_what_they_take_or_why_they_do_not_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """From all three programs, each by the name that loads it; a bad one hides no other."""
    model, tokenizer = tiny_causal_lm(dtype=torch.float32, vocab_size=260), byte_tokenizer((("t", "h"),))
    file = write_gguf(tmp_path / "tiny.gguf", model, tokenizer)
    embedder = write_gguf(tmp_path / "embedder.gguf", model, tokenizer, llama__pooling_type=1)
    snapshot = tmp_path / "hub/models--some--thing/snapshots" / ("0" * 40)
    snapshot.mkdir(parents=True)
    (tmp_path / "hub/models--some--thing/refs").mkdir()
    (tmp_path / "hub/models--some--thing/refs/main").write_text("0" * 40)
    for name in ("a-Q8_0.gguf", "b-Q8_0.gguf", "mmproj-a.gguf"):
        (snapshot / name).symlink_to(file)
    saved(snapshot, model)
    (snapshot / "gone-Q4_0.gguf").symlink_to(tmp_path / "erased")
    shutil.copytree(snapshot.parents[1], gone := tmp_path / "hub/models--some--gone", symlinks=True)
    (gone / snapshot.relative_to(snapshot.parents[1]) / "gone.safetensors").symlink_to(tmp_path / "erased")
    shutil.copytree(snapshot.parents[1] / "refs", tmp_path / "hub/models--some--music/refs")
    MusicgenConfig().save_pretrained(tmp_path / "hub/models--some--music/snapshots" / ("0" * 40))
    store = OllamaStore(tmp_path / "ollama")
    store.add("registry.ollama.ai/library/tiny/latest", file, params={"num_ctx": 100})
    store.add("registry.ollama.ai/library/embedder/latest", embedder)
    store.add("hf.co/me/broken/q4", file, adapter="x")
    (tmp_path / "cut.gguf").write_bytes(b"GGUF")
    lm_studio(tmp_path / "home", "pub/tiny/tiny.gguf", model=file)
    lm_studio(tmp_path / "home", "pub/cut/cut.gguf", model=tmp_path / "cut.gguf")
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    monkeypatch.setenv("OLLAMA_MODELS", str(store.folder))
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / "hub"))
    report = tmp_path / "report.json"
    assert precedent("models", "--local", "--json", report) == 0
    found = {one["name"]: one for one in json.loads(report.read_text())["models"]}
    assert set(found) == {
        "ollama:hf.co/me/broken:q4", "ollama:embedder:latest", "ollama:tiny:latest", "lmstudio:pub/tiny/tiny.gguf",
        "hf:some/thing:Q8_0", str(snapshot / "b-Q8_0.gguf"), "some/thing", "lmstudio:pub/cut/cut.gguf",
        "hf:some/thing:Q4_0", "some/gone", "hf:some/gone:Q8_0", "hf:some/gone:Q4_0",
        "some/music",
        str(gone / snapshot.relative_to(snapshot.parents[1]) / "b-Q8_0.gguf"),
    }  # fmt: skip
    assert all(found[name]["refusal"] for name in ("hf:some/thing:Q4_0", "lmstudio:pub/cut/cut.gguf", "some/gone"))
    assert "Multiple valid text configs" in found["some/music"]["refusal"]
    assert "an adapter" in found["ollama:hf.co/me/broken:q4"]["refusal"]
    assert "an embedding model" in found["ollama:embedder:latest"]["refusal"]
    tiny = found["ollama:tiny:latest"]
    weights = sum(each.numel() * 4 for each in model.parameters())
    per_token = 2 * 4 * sum(layer.self_attn.k_proj.out_features for layer in model.model.layers)
    assert (tiny["size"], tiny["quantization"], tiny["context"]) == (weights, "F32", 100)
    assert tiny["memory"] == weights + 100 * per_token
    assert tiny["refusal"] is None
    assert found["lmstudio:pub/tiny/tiny.gguf"]["context"] == model.config.max_position_embeddings
    assert found["some/thing"]["size"] > 0
    assert "| ollama:tiny:latest | 0.00 GB | F32 | precedent | 0.00 GB with 100 tokens |" in capsys.readouterr().out
    assert precedent("models", "--local", "--context", "7", "--json", report) == 0
    assert {one["context"] for one in json.loads(report.read_text())["models"]} == {7, None}
