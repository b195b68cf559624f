"""Sampling settings that a checkpoint recommends: listed, and used when asked for."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from helpers.command_line import precedent
from helpers.scripted_kinds import MODELS, asked, scripted
from transformers import GenerationConfig

from precedent import Engine
from precedent.config import SamplingParams
from precedent.errors import ConfigError
from precedent_testing.tiny_gguf import write_gguf
from precedent_testing.tiny_models import byte_tokenizer, tiny_causal_lm

RECOMMENDED = {"temperature": 0.6, "top_k": 20, "top_p": 0.95, "repetition_penalty": 1.05}


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return saved(tmp_path / "model", do_sample=True, **RECOMMENDED)


def saved(folder: Path, **settings: Any) -> Path:
    model = tiny_causal_lm(dtype=torch.float32)
    model.generation_config = GenerationConfig(**settings)
    model.save_pretrained(folder)
    byte_tokenizer().save_pretrained(folder)
    return folder


@MODELS
def test_answers_are_greedy_unless_the_recommended_settings_are_asked_for_and_the_caller_goes_first(kind: Any) -> None:
    for fields, call, expected in (
        ({}, {}, {}),
        ({"sampling": "model"}, {}, RECOMMENDED),
        (
            {"sampling": "model", "temperature": 0.0, "top_k": 5},
            {"top_p": 0.5},
            {"top_k": 5, "top_p": 0.5, "repetition_penalty": 1.05},
        ),
    ):
        model = scripted(kind, **fields)
        model.engine.sampling_defaults = RECOMMENDED
        model.invoke("hello", **call)
        assert asked(model).sampling == SamplingParams(**expected)
    with pytest.raises(ConfigError, match="sampling='modle' must be 'model'"):
        kind(model="m", sampling="modle")


@pytest.mark.parametrize(
    ("settings", "expected"),
    [
        ({}, {}),
        ({"do_sample": True}, {"temperature": 1.0}),
        ({"top_p": 0.9}, {"temperature": 1.0, "top_p": 0.9}),
        ({"do_sample": False, "temperature": 0.6}, {"temperature": 0.0}),
        ({"repetition_penalty": 1.1}, {"repetition_penalty": 1.1}),
    ],
)
def test_a_config_is_read_as_transformers_would(settings: Any, expected: Any, tmp_path: Path) -> None:
    tiny = tiny_causal_lm(dtype=torch.float32)
    tiny.generation_config = GenerationConfig(**settings)
    engine = Engine(tiny, byte_tokenizer(), name="tiny")
    try:
        assert engine.sampling_defaults == expected
    finally:
        engine.close()


def test_the_commands_list_and_use_them(folder: Path, tmp_path: Path) -> None:
    report = tmp_path / "report.json"
    assert precedent("doctor", folder, "--json", report) == 0
    said = {one["check"]: one["finding"] for one in json.loads(report.read_text())["findings"]}["sampling"]
    assert "temperature 0.6, top_k 20, top_p 0.95, repetition_penalty 1.05" in said
    assert "greedy unless you ask otherwise" in said
    own = ("--temperature", 0, "--top-k", 0, "--top-p", 1, "--repetition-penalty", 1)
    written = ("--temperature", 0.6, "--top-k", 20, "--top-p", 0.95, "--repetition-penalty", 1.05)
    texts = []
    for options in ((), ("--sampling", "model", *own), ("--sampling", "model"), written):
        seeded = ("--seed", 3, "--max-tokens", 12, "--json", report)
        assert precedent("run", "hi", "--target", folder, *options, *seeded) == 0
        texts.append(json.loads(report.read_text())["text"])
    assert texts[0] == texts[1] != texts[2] == texts[3], "what is given goes first"


def test_a_gguf_file_recommends_in_its_header(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("gguf")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "caches"))
    model, tokenizer = tiny_causal_lm(dtype=torch.float32, vocab_size=260), byte_tokenizer((("t", "h"),))
    file = write_gguf(tmp_path / "model.gguf", model, tokenizer, general__sampling__top_k=40)
    engine = Engine.load(file, device="cpu")
    try:
        assert engine.sampling_defaults == {"top_k": 40, "temperature": 1.0}
    finally:
        engine.close()
