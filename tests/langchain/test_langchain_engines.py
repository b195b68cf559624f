"""Whose weights a chat model uses: loaded once and when needed, shared by copies, handed over, and let go."""

from __future__ import annotations

import copy
import gc
import threading
import time
import weakref
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from helpers.scripted_models import TOKENIZER, look_up, scripted, text_of
from helpers.small_engines import load_by
from langchain_core.messages import HumanMessage, SystemMessage
from langchain_core.runnables import ConfigurableField

from precedent.engine.engine import Engine
from precedent.engine.options import EngineOptions
from precedent.errors import ConfigError, UnsupportedError
from precedent.langchain import ChatPrecedent, PrecedentLLM
from precedent_testing.embedders import HashEmbedder
from precedent_testing.scripted_engine import ScriptedEngine
from precedent_testing.scripted_model import scripted_model_engine
from precedent_testing.tiny_models import byte_tokenizer, tiny_causal_lm


@pytest.fixture
def loads(monkeypatch: pytest.MonkeyPatch) -> list[dict[str, Any]]:
    """Replaces the loading of weights; records what was asked for."""
    calls: list[dict[str, Any]] = []

    def load(target: Any, options: EngineOptions, *, tokenizer: Any) -> ScriptedEngine:
        calls.append({"target": target, "tokenizer": tokenizer, "options": options})
        time.sleep(0.02)
        return ScriptedEngine(TOKENIZER, lambda prompt: "a")

    load_by(monkeypatch, load)
    return calls


async def test_weights_are_loaded_once_when_needed_and_copies_share_them(loads: list[dict[str, Any]]) -> None:
    fields = {"draft_model": "d", "device": "cpu", "dtype": "float32", "model_kwargs": {"revision": "v2"}}
    model = ChatPrecedent(model="m", **fields)
    assert loads == []
    model.batch(["hi"] * 8)
    configurable = model.configurable_fields(temperature=ConfigurableField(id="temperature"))
    await configurable.with_config(configurable={"temperature": 0.5}).ainvoke("hi")
    copy.deepcopy(model).invoke("hi")
    model.model_copy(update={"seed": 3}).invoke("hi")
    assert loads == [{"target": "m", "tokenizer": None, "options": EngineOptions(**fields)}]
    engine: Any = model.engine
    assert [request.sampling.temperature for request in engine.requests[8:]] == [0.5, 0.0, 0.0]
    ChatPrecedent(model="m", cuda_graphs=True, **fields).invoke("hi")
    assert [load["options"].cuda_graphs for load in loads] == [False, True], "other options, another engine"


async def test_an_awaited_call_loads_beside_the_event_loop(monkeypatch: pytest.MonkeyPatch) -> None:
    threads: list[threading.Thread] = []

    def load(target: Any, options: EngineOptions, *, tokenizer: Any) -> ScriptedEngine:
        threads.append(threading.current_thread())
        return ScriptedEngine(TOKENIZER, ["loaded"])

    load_by(monkeypatch, load)
    assert (await ChatPrecedent(model="m").ainvoke("hi")).content == "loaded"
    assert [thread is threading.current_thread() for thread in threads] == [False]


def test_a_call_may_choose_another_engine_by_a_name_that_only_one_has() -> None:
    named = {"one": ["from the other"], "two": []}
    others = [ScriptedEngine(TOKENIZER, named[name], model_name=name) for name in ("one", "two", "two")]
    held = [ChatPrecedent.from_engine(other) for other in others]
    model = ChatPrecedent.from_engine(ScriptedEngine(TOKENIZER, []))
    message = model.invoke("hi", model="one")
    assert (message.content, message.response_metadata["model_name"]) == ("from the other", "one")
    for name, says in (("two", "names 2 loaded engines"), ("three", "is not loaded, and a call loads nothing")):
        with pytest.raises(UnsupportedError, match=f"model='{name}' {says}"):
            model.invoke("hi", model=name)
    assert len(held) == 3


def test_from_model_hands_over_the_weights(loads: list[dict[str, Any]]) -> None:
    class Weights:
        config = type("Config", (), {"_name_or_path": "folder/name"})

    weights = Weights()
    model = ChatPrecedent.from_model(weights, TOKENIZER, temperature=0.5)
    assert model.model_name == "folder/name"
    model.invoke("hi")
    assert (loads[0]["target"], loads[0]["tokenizer"]) == (weights, TOKENIZER)
    for settings in ({"device": "cpu"}, {"model_kwargs": {"revision": "main"}}):
        with pytest.raises(ConfigError, match=f"{min(settings)} cannot be set for a model object"):
            ChatPrecedent.from_model(weights, TOKENIZER, **settings)
    for given in ((TOKENIZER, object()), ("folder/name", "folder/name")):
        with pytest.raises(ConfigError, match=r"takes a transformers model and its tokenizer.*ChatPrecedent\(model=…"):
            ChatPrecedent.from_model(*given)


# Let go


@pytest.fixture
def loaded(monkeypatch: pytest.MonkeyPatch) -> list[weakref.ref[Any]]:
    """Every model that was loaded: a tiny one, for whatever name."""
    models: list[weakref.ref[Any]] = []

    def load(target: Any, *_: Any, **__: Any) -> Engine:
        engine = scripted_model_engine(lambda prompt: f"from {target}")
        models.append(weakref.ref(engine.target.model))
        return engine

    load_by(monkeypatch, load)
    return models


def test_unload_frees_the_weights_for_everyone_and_the_next_call_loads_them_again(
    loaded: list[weakref.ref[Any]],
) -> None:
    model, twin, other = ChatPrecedent(model="a"), ChatPrecedent(model="a", seed=1), PrecedentLLM(model="b")
    assert model.invoke("hi").text == twin.invoke("hi").text == "from a"
    other.invoke("hi")
    assert len(loaded) == 2, "the twins share theirs"
    twin.unload()
    gc.collect()
    assert [one() is None for one in loaded] == [True, False]
    assert model.invoke("hi").text == twin.invoke("hi").text == "from a"
    assert len(loaded) == 3, "loaded once again"
    for one in (model, other):
        one.unload()
        one.unload()  # nothing is there any more, which harms nobody
    assert [one() is None for one in loaded] == [True] * 3
    ChatPrecedent(model="a").engine.close()
    assert ChatPrecedent(model="a").invoke("hi").text == "from a", "an engine that was closed is not shared"
    assert len(loaded) == 5


def test_what_was_handed_over_stays_its_owners() -> None:
    weights = tiny_causal_lm("llama", vocab_size=len(TOKENIZER))
    for kind in (ChatPrecedent, PrecedentLLM):
        model: Any = kind.from_model(weights, TOKENIZER, max_tokens=4)
        model.unload()  # nothing is there yet, which harms nobody
        said, engine = text_of(model.invoke("hi")), weakref.ref(model.engine)
        model.unload()
        gc.collect()
        assert engine() is None
        assert text_of(model.invoke("hi")) == said
    assert weights(torch.tensor([[1]])).logits.shape == (1, 1, len(TOKENIZER))
    with pytest.raises(UnsupportedError, match=r"close that one with engine.close\(\)"):
        scripted().unload()


# Prefixes that outlive the process

SYSTEM = SystemMessage("You look after orders. " * 5)


@contextmanager
def started(folder: Path, **settings: Any) -> Iterator[ChatPrecedent]:
    """A chat model as a new process has it."""
    settings = {"speculation_cache": folder, "keep_prefixes": True, "embedder": HashEmbedder(), **settings}
    chat = ChatPrecedent.from_model(tiny_causal_lm(seed=21), byte_tokenizer(), max_tokens=3, **settings)
    yield chat
    chat.engine.close()


def reused(chat: Any, question: str, **told: Any) -> int:
    """How many tokens of the prompt were not computed."""
    answer = chat.invoke([SYSTEM, HumanMessage(question)], **told)
    return answer.usage_metadata["input_token_details"]["cache_read"]


def test_after_a_restart_another_question_of_the_tenant_finds_system_turn_and_tools(tmp_path: Path) -> None:
    with started(tmp_path, tenant_from="metadata") as chat:
        reused(chat.bind_tools([look_up]), "where is order 17")
        assert list(tmp_path.rglob("*.safetensors")) == [], "a run that is nobody's keeps nothing"
        assert reused(chat.bind_tools([look_up]), "where is order 17", tenant="shop") == 0
    with started(tmp_path, tenant="shop") as chat:
        assert reused(chat, "where is order 17") == 0, "without the tools it is another beginning"
        with_tools = reused(chat.bind_tools([look_up]), "is 18 late?")
        assert with_tools > len(SYSTEM.content) + len(look_up.description)
        assert reused(chat.bind_tools([look_up]), "is 18 late?", tenant="other") == 0
