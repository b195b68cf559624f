"""Whose weights a chat model uses: loaded once and when needed, shared by copies, or handed over."""

from __future__ import annotations

import copy
import time
from typing import Any

import pytest
from helpers.order_chat import TOKENIZER
from helpers.small_engines import load_by
from langchain_core.runnables import ConfigurableField

from precedent.engine.options import EngineOptions
from precedent.errors import ConfigError
from precedent.langchain import ChatPrecedent
from precedent_testing.scripted_engine import ScriptedEngine


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
    model = ChatPrecedent(model="m", draft_model="d", device="cpu", dtype="float32")
    assert loads == []
    model.batch(["hi"] * 8)
    options = EngineOptions(draft_model="d", device="cpu", dtype="float32")
    assert loads == [{"target": "m", "tokenizer": None, "options": options}]


def test_graphs_make_another_engine_and_other_answers(loads: list[dict[str, Any]]) -> None:
    """A graph's attention rounds in its own way, which an answer cache must not confuse with another."""
    models = [ChatPrecedent(model="m", cuda_graphs=chosen) for chosen in (None, True)]
    for model in models:
        model.invoke("hi")
    assert [load["options"].cuda_graphs for load in loads] == [False, True]
    assert models[0]._identifying_params != models[1]._identifying_params


async def test_copies_that_langchain_makes_share_the_engine(loads: list[dict[str, Any]]) -> None:
    model = ChatPrecedent(model="m")
    configurable = model.configurable_fields(temperature=ConfigurableField(id="temperature"))
    for temperature in (0.0, 0.5, 1.0):
        await configurable.with_config(configurable={"temperature": temperature}).ainvoke("hi")
    copy.deepcopy(model).invoke("hi")
    model.model_copy(update={"seed": 3}).invoke("hi")
    assert len(loads) == 1


def test_from_model_hands_over_the_weights(loads: list[dict[str, Any]]) -> None:
    class Weights:
        config = type("Config", (), {"_name_or_path": "folder/name"})

    weights = Weights()
    model = ChatPrecedent.from_model(weights, TOKENIZER, temperature=0.5)
    assert model.model_name == "folder/name"
    model.invoke("hi")
    assert loads[0]["target"] is weights
    assert loads[0]["tokenizer"] is TOKENIZER
    with pytest.raises(ConfigError, match="device cannot be set for a model object"):
        ChatPrecedent.from_model(weights, TOKENIZER, device="cpu")


@pytest.mark.parametrize("given", [(TOKENIZER, object()), ("folder/name", "folder/name")])
def test_from_model_says_what_it_takes(given: tuple[Any, Any]) -> None:
    with pytest.raises(ConfigError, match=r"takes a transformers model and its tokenizer.*ChatPrecedent\(model=…\)"):
        ChatPrecedent.from_model(*given)


@pytest.mark.parametrize("given", [True, 3])
def test_a_cache_that_is_none_is_refused_before_weights_are_loaded(loads: list[dict[str, Any]], given: Any) -> None:
    with pytest.raises(ConfigError, match=f"a {type(given).__name__} names no cache: give a folder"):
        ChatPrecedent(model="m", speculation_cache=given).invoke("hi")
    assert loads == []


def test_what_belongs_to_the_engine_is_not_given_to_from_engine() -> None:
    with pytest.raises(ConfigError, match="speculation_cache belongs to the engine"):
        ChatPrecedent.from_engine(ScriptedEngine(TOKENIZER, []), speculation_cache="x.db")
