"""The profile of a model is there before its weights are loaded, and stays the same when they are."""

from __future__ import annotations

import json
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from helpers.format_models import MODELS
from langchain.agents import create_agent
from langchain.agents.middleware import SummarizationMiddleware
from pydantic import BaseModel
from transformers import PreTrainedModel

from precedent.errors import ModelLoadError
from precedent.langchain import ChatPrecedent
from precedent.target.load.gguf_header import read_header
from precedent.target.load.source import DEMO_TARGET
from precedent.text.prompt import hermes_template
from precedent_testing.tiny_gguf import write_gguf
from precedent_testing.tiny_models import byte_tokenizer, tiny_causal_lm

TOKENIZER = byte_tokenizer((("t", "h"),))
CHAT = "{% for m in messages %}{{ '<|im_start|>' + m.role + '\n' + m.content + '<|im_end|>\n' }}{% endfor %}"


def tiny() -> PreTrainedModel:
    return tiny_causal_lm(vocab_size=260)


def saved(folder: Path, template: Any = CHAT) -> Path:
    tokenizer = byte_tokenizer((("t", "h"),))
    tokenizer.chat_template = template
    tiny().save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder


def a_folder(tmp_path: Path, patch: pytest.MonkeyPatch) -> dict[str, Any]:
    return {"model": str(saved(tmp_path / "model", {"default": CHAT, "tool_use": hermes_template()}))}


def a_gguf_file(tmp_path: Path, patch: pytest.MonkeyPatch) -> dict[str, Any]:
    patch.setenv("XDG_CACHE_HOME", str(tmp_path / "caches"))
    return {"model": str(write_gguf(tmp_path / "model.gguf", tiny(), TOKENIZER)), "dtype": "float32"}


def a_cached_id(tmp_path: Path, patch: pytest.MonkeyPatch) -> dict[str, Any]:
    return {"model": "owner/tiny", "cache_dir": str(downloaded(tmp_path)), "local_files_only": True}


def downloaded(cache: Path) -> Path:
    """A model in the layout of Hugging Face's cache."""
    place = cache / "models--owner--tiny"
    saved(place / "snapshots" / "abc")
    (place / "refs").mkdir()
    (place / "refs" / "main").write_text("abc")
    return cache


def an_adapter(tmp_path: Path, patch: pytest.MonkeyPatch) -> dict[str, Any]:
    peft = pytest.importorskip("peft")
    base = saved(tmp_path / "base")
    lora = peft.LoraConfig(r=2, target_modules=["q_proj"])
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", FutureWarning)  # of transformers, about how peft uses it
        wrapped = peft.get_peft_model(tiny(), lora)
    wrapped.peft_config["default"].base_model_name_or_path = str(base)
    wrapped.save_pretrained(tmp_path / "adapter")
    return {"model": str(tmp_path / "adapter")}


def objects(tmp_path: Path, patch: pytest.MonkeyPatch) -> dict[str, Any]:
    return {}


Made = Callable[[Path, pytest.MonkeyPatch], dict[str, Any]]
SOURCES: list[Made] = [
    *(a_folder, a_gguf_file, a_cached_id, an_adapter, objects),
]


def chat(arguments: dict[str, Any]) -> ChatPrecedent:
    return ChatPrecedent(**arguments) if arguments else ChatPrecedent.from_model(tiny(), TOKENIZER)


@pytest.mark.parametrize("made", SOURCES, ids=lambda made: made.__name__)
def test_the_profile_is_the_same_before_and_after_loading(
    made: Made, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    arguments = made(tmp_path, monkeypatch)
    before = chat(arguments)
    assert before.profile is not None
    assert before.profile["max_input_tokens"] == 1024
    assert before.profile["tool_calling"] is before.profile["structured_output"] is True
    engine = before.engine
    try:
        assert engine.context_length == 1024
        assert chat(arguments).profile == ChatPrecedent.from_engine(engine).profile == before.profile
    finally:
        engine.close()


@pytest.mark.parametrize("template", ["mistral", CHAT, "[INST]{{ tools }}{{ messages }}[TOOL_CALLS]</think>"])
@pytest.mark.parametrize("made", [a_folder, a_gguf_file], ids=lambda made: made.__name__)
def test_a_chat_template_that_is_given_has_its_profile_from_the_start(
    made: Made, template: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    arguments = {**made(tmp_path, monkeypatch), "chat_template": template}
    before = chat(arguments).profile
    assert before is not None
    assert before["reasoning_output"] is ("</think>" in template)
    engine = chat(arguments).engine
    try:
        assert ChatPrecedent.from_engine(engine).profile == before
    finally:
        engine.close()


class Answer(BaseModel):
    text: str


def test_agents_are_built_alike_from_the_first_run_on() -> None:
    model = ChatPrecedent(model=DEMO_TARGET)
    SummarizationMiddleware(model=model, trigger=("fraction", 0.8), keep=("fraction", 0.3))
    create_agent(model, [], response_format=Answer)
    profile = model.profile
    assert profile is not None
    assert (profile["max_input_tokens"], profile["image_inputs"]) == (8192, False)
    assert profile["tool_calling"] is profile["tool_choice"] is profile["structured_output"] is True
    assert ChatPrecedent(model=DEMO_TARGET, profile={"max_input_tokens": 7}).profile == {"max_input_tokens": 7}


@pytest.mark.parametrize("name", MODELS)
def test_a_call_can_be_forced_where_a_grammar_can_hold_it(name: str, tmp_path: Path) -> None:
    folder = saved(tmp_path / "model", MODELS[name].template)
    profile = ChatPrecedent(model=str(folder)).profile
    assert profile is not None
    assert profile["tool_calling"] is True
    assert profile["tool_choice"] is (name in ("hermes", "llama-json", "mistral", "mistral-args"))
    assert profile["structured_output"] is (name != "harmony")


def test_a_folder_that_cannot_be_loaded_has_no_profile(tmp_path: Path) -> None:
    for text in ("{", "[]", "{}", json.dumps({"model_type": "nothing"})):
        (tmp_path / "config.json").write_text(text)
        assert ChatPrecedent(model=str(tmp_path)).profile is None
    (tmp_path / "model.gguf").write_bytes(b"no model")
    assert ChatPrecedent(model=DEMO_TARGET, chat_template="no such family").profile is None
    for name in (tmp_path / "model.gguf", tmp_path / "missing.gguf", "", "a b//c", "owner/absent"):
        assert ChatPrecedent(model=str(name)).profile is None


def test_a_header_that_ends_too_soon_or_lies_is_refused_at_once(tmp_path: Path) -> None:
    whole = write_gguf(tmp_path / "model.gguf", tiny(), TOKENIZER).read_bytes()
    header = read_header(tmp_path / "model.gguf")
    assert header["llama.context_length"] == 1024
    assert header["tokenizer.chat_template"] == TOKENIZER.chat_template
    bad = tmp_path / "bad.gguf"
    for length in (0, 3, 4, 8, 20, 30, 100, 2000):
        bad.write_bytes(whole[:length])
        with pytest.raises(ModelLoadError, match=r"bad\.gguf is no GGUF file that can be read"):
            read_header(bad)
    for place in (4, 16, 24):  # the version, the number of keys, the length of the first key
        bad.write_bytes(whole[:place] + b"\xff" * 8 + whole[place + 8 :])
        with pytest.raises(ModelLoadError):
            read_header(bad)
