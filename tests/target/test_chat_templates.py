"""Chat templates: one that the caller supplies, and an early word about a model that has none."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from langchain_core.messages import HumanMessage

from precedent import ChatPrecedent
from precedent.errors import ConfigError
from precedent.langchain import PrecedentLLM
from precedent.target.load.loading import load_target, load_tokenizer
from precedent.text.prompt import render_prompt
from precedent_testing.tiny_gguf import write_gguf
from precedent_testing.tiny_models import byte_tokenizer, tiny_causal_lm

TURNS = "{% for message in messages %}[{{ message.role }}] {{ message.content }}\n{% endfor %}"
TALK = [
    {"role": "user", "content": "hello"},
    {"role": "assistant", "content": "hi"},
    {"role": "user", "content": "more"},
]


def folder_with(template: str | None, folder: Path) -> Path:
    tokenizer = byte_tokenizer()
    tokenizer.chat_template = template
    tiny_causal_lm(dtype=torch.float32).save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder


@pytest.mark.parametrize("kind", ["text", "file", "path", "json"])
def test_a_template_is_a_text_or_a_file(kind: str, tmp_path: Path) -> None:
    folder, file = folder_with(None, tmp_path / "model"), tmp_path / "own.jinja"
    file.write_text(TURNS, encoding="utf-8")
    config = tmp_path / "tokenizer_config.json"
    config.write_text(json.dumps({"chat_template": TURNS}), encoding="utf-8")
    given = {"text": TURNS, "file": str(file), "path": file, "json": str(config)}[kind]
    tokenizer = load_tokenizer(folder, given)
    assert tokenizer.decode(render_prompt(tokenizer, TALK)) == "[user] hello\n[assistant] hi\n[user] more\n"


@pytest.mark.parametrize(
    ("family", "begins", "ends"),
    [
        ("chatml", "<|im_start|>system\n", "<|im_end|>\n<|im_start|>assistant\n"),
        ("llama-3", "<|endoftext|><|start_header_id|>user<|end_header_id|>\n\nhello<|eot_id|>", "header_id|>\n\n"),
        ("gemma", "<|endoftext|><start_of_turn>user\nhello<end_of_turn>\n<start_of_turn>model\nhi", "turn>model\n"),
        ("mistral", "<|endoftext|>[INST] hello [/INST] hi<|im_end|>[INST] more", " [/INST]"),
        ("phi-3", "<|user|>\nhello<|end|>\n<|assistant|>\nhi<|end|>\n", "<|assistant|>\n"),
    ],
)  # fmt: skip
def test_a_family_is_known_by_its_name(family: str, begins: str, ends: str, tmp_path: Path) -> None:
    """It takes a system message, too."""
    tokenizer = load_tokenizer(folder_with(None, tmp_path), family)
    text = tokenizer.decode(render_prompt(tokenizer, TALK))
    assert text.startswith(begins)
    assert text.endswith(ends)
    messages = [{"role": "system", "content": "be brief"}, *TALK]
    assert "be brief" in tokenizer.decode(render_prompt(tokenizer, messages))


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ("chatlm", "families: chatml"),
        ("nowhere.jinja", "neither a file, nor the name of a family"),
        ("{% for x in %}", "not a valid Jinja template"),
        (7, "must be a text, a file"),
    ],
)
def test_what_is_no_template_is_refused_before_anything_is_loaded(given: Any, said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        load_target("no/model", chat_template=given)


@pytest.mark.parametrize(
    ("template", "level", "said"),
    [
        (None, "WARNING", "has no chat template, so it is a base model: conversations are asked in ChatML"),
        (TURNS, "INFO", "takes no tools: tools are shown in ChatML"),
        ("{{ tools }}{{ messages }}", None, None),
    ],
)
@pytest.mark.parametrize("kind", ["folder", "gguf"])
def test_what_a_template_lacks_is_said_before_weights_are_read(
    kind: str, template: str | None, level: str | None, said: str | None, tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture,
) -> None:  # fmt: skip
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "caches"))
    if kind == "folder":
        place = folder_with(template, tmp_path / "model")
    else:
        tokenizer = byte_tokenizer((("t", "h"),))
        tokenizer.chat_template = template
        place = write_gguf(tmp_path / "model.gguf", tiny_causal_lm(dtype=torch.float32, vocab_size=260), tokenizer)
    caplog.set_level("INFO", "precedent")
    load_target(place)
    found = [one for one in caplog.records if "chat template" in one.message]
    assert [one.levelname for one in found] == ([] if level is None else [level])
    if said is not None:
        assert said in found[0].message
        assert "--chat-template" in found[0].message
    caplog.clear()
    load_target(place, chat_template="chatml")
    assert not [text for text in caplog.messages if "chat template" in text]


def test_chat_models_take_one_and_differ_by_it(tmp_path: Path) -> None:
    folder = str(folder_with(None, tmp_path))
    llm, other = (ChatPrecedent(model=folder, chat_template=each, max_tokens=2) for each in (TURNS, "phi-3"))
    assert llm.engine is not other.engine
    assert llm.engine.tokenizer.chat_template == TURNS
    assert llm.get_num_tokens_from_messages([HumanMessage("hello")]) == len("[user] hello\n")
    assert PrecedentLLM(model=folder, chat_template=TURNS).engine is llm.engine
