"""Whose weights a chat model uses: loaded once and when needed, shared by copies, handed over, and let go."""

from __future__ import annotations

import copy
import gc
import time
import weakref
from typing import Any

import pytest
import torch
from helpers.order_chat import TOKENIZER
from helpers.scripted_kinds import scripted, text_of
from helpers.small_engines import load_by
from langchain_core.runnables import ConfigurableField

from precedent.engine.engine import Engine
from precedent.engine.options import EngineOptions
from precedent.errors import ConfigError, UnsupportedError
from precedent.langchain import ChatPrecedent, PrecedentLLM
from precedent_testing.scripted_engine import ScriptedEngine
from precedent_testing.scripted_model import scripted_model_engine
from precedent_testing.tiny_models import tiny_causal_lm


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


def test_weights_are_loaded_once_and_only_when_needed(loads: list[dict[str, Any]]) -> None:
    fields = {"draft_model": "d", "device": "cpu", "dtype": "float32", "model_kwargs": {"revision": "v2"}}
    model = ChatPrecedent(model="m", **fields)
    assert loads == []
    model.batch(["hi"] * 8)
    assert loads == [{"target": "m", "tokenizer": None, "options": EngineOptions(**fields)}]
    ChatPrecedent(model="m", cuda_graphs=True, **fields).invoke("hi")
    assert [load["options"].cuda_graphs for load in loads] == [False, True], "other options, another engine"


async def test_copies_that_langchain_makes_share_the_engine(loads: list[dict[str, Any]]) -> None:
    model = ChatPrecedent(model="m")
    configurable = model.configurable_fields(temperature=ConfigurableField(id="temperature"))
    for temperature in (0.0, 0.5):
        await configurable.with_config(configurable={"temperature": temperature}).ainvoke("hi")
    copy.deepcopy(model).invoke("hi")
    model.model_copy(update={"seed": 3}).invoke("hi")
    assert len(loads) == 1
    engine: Any = model.engine
    assert [request.sampling.temperature for request in engine.requests] == [0.0, 0.5, 0.0, 0.0]


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


@pytest.mark.parametrize("given", [True, 3])
def test_a_cache_that_is_none_is_refused_before_weights_are_loaded(loads: list[dict[str, Any]], given: Any) -> None:
    with pytest.raises(ConfigError, match=f"a {type(given).__name__} names no cache: give a folder"):
        ChatPrecedent(model="m", speculation_cache=given).invoke("hi")
    assert loads == []


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


def test_of_a_model_that_was_handed_over_the_engine_goes_and_the_weights_stay() -> None:
    weights = tiny_causal_lm("llama", vocab_size=len(TOKENIZER))
    for kind in (ChatPrecedent, PrecedentLLM):
        model: Any = kind.from_model(weights, TOKENIZER, max_tokens=4)
        model.unload()  # nothing is there yet, which harms nobody
        said, engine = text_of(model.invoke("hi")), weakref.ref(model.engine)
        model.unload()
        gc.collect()
        assert engine() is None
        assert text_of(model.invoke("hi")) == said
    assert weights(torch.tensor([[1]])).logits.shape == (1, 1, len(TOKENIZER)), "still its owner's"


def test_an_engine_that_was_handed_over_is_its_owners_to_close_and_is_not_shared_then(
    loaded: list[weakref.ref[Any]],
) -> None:
    with pytest.raises(UnsupportedError, match=r"close that one with engine.close\(\)"):
        scripted().unload()
    with pytest.raises(ConfigError, match="speculation_cache belongs to the engine"):
        scripted(speculation_cache="x.db")
    ChatPrecedent(model="a").engine.close()
    assert ChatPrecedent(model="a").invoke("hi").text == "from a"
    assert len(loaded) == 2
