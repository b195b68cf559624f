"""A chat model travels as its settings: a pickle never reaches into weights, and what cannot travel says so by name."""

from __future__ import annotations

import copy
import importlib
import io
import pickle
import pkgutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import cloudpickle
import pytest
import torch
from transformers import PreTrainedTokenizerBase

from precedent import PrecedentRecorder, SpeculationCache
from precedent.engine import loading as engine_loading
from precedent.engine.engine import Engine
from precedent.errors import UnsupportedError
from precedent.langchain import (
    ChatPrecedent,
    PrecedentLLM,
)
from precedent.planning.costs import StepCosts
from precedent.runtime.process import OfOneProcess
from precedent_testing.embedders import HashEmbedder
from precedent_testing.scripted_model import scripted_tokenizer
from precedent_testing.tiny_models import tiny_causal_lm

Model = ChatPrecedent | PrecedentLLM
KINDS: tuple[type[Model], ...] = (ChatPrecedent, PrecedentLLM)
HEAVY = (torch.Tensor, torch.nn.Module, PreTrainedTokenizerBase, OfOneProcess)
SCHEMA = {"title": "N", "type": "object", "properties": {"n": {"type": "integer"}}, "required": ["n"]}


class OfSettings(cloudpickle.Pickler):  # type: ignore[misc]
    """Fails where a pickle reaches into what stays in its process."""

    def reducer_override(self, obj: Any) -> Any:
        assert not isinstance(obj, HEAVY), f"the pickle reached a {type(obj).__name__}"
        return super().reducer_override(obj)


def pickled(thing: Any, protocol: int = pickle.DEFAULT_PROTOCOL) -> bytes:
    file = io.BytesIO()
    OfSettings(file, protocol).dump(thing)
    return file.getvalue()


def again(thing: Any) -> Any:
    """What arrives in another process."""
    return pickle.loads(pickled(thing))


def tiny() -> tuple[Any, Any]:
    tokenizer = scripted_tokenizer()
    return tiny_causal_lm(vocab_size=len(tokenizer), max_position_embeddings=512), tokenizer


@pytest.fixture(autouse=True)
def loads_a_tiny_model(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(engine_loading, "load_target", lambda name, **_: tiny())
    monkeypatch.setattr(StepCosts, "measure", lambda *_: None)


@pytest.fixture
def used(tmp_path: Path) -> Iterator[Callable[..., Any]]:
    """Makes models that have answered, with an engine and a cache; both are closed after the test."""
    models: list[Any] = []

    def make(kind: type[Model], **fields: Any) -> Model:
        place = {"speculation_cache": tmp_path, "embedder": HashEmbedder()}
        models.append(kind(model="tiny", max_tokens=4, seed=3, **place, **fields))
        models[-1].invoke("hi")
        return models[-1]  # type: ignore[no-any-return]

    yield make
    for model in models:
        model.engine.cache.close()
        model.engine.close()


# What travels

WRAPPED: dict[str, Callable[[Any], Any]] = {
    "itself": lambda model: model,
    "copy": copy.copy,
    "deep copy": copy.deepcopy,
    "updated copy": lambda model: model.model_copy(update={"temperature": 1.0}),
    "bound": lambda model: model.bind(stop=["x"]),
    "configured": lambda model: model.with_config(tags=["a"], metadata={"tenant": "north"}),
    "retried": lambda model: model.with_retry(),
    "with a fallback": lambda model: model.with_fallbacks([model]),
    "chained": lambda model: str.upper | model,
    "in a list": lambda model: [model, model],
    "bound method": lambda model: model.invoke,
    "in a closure": lambda model: lambda: model.invoke("hi"),
    "recorded": lambda model: model.model_copy(update={"callbacks": [PrecedentRecorder("log.jsonl")]}),
}
OF_CHATS: dict[str, Callable[[Any], Any]] = {
    "with tools": lambda model: model.bind_tools([SCHEMA | {"description": "n"}]),
    "structured": lambda model: model.with_structured_output(SCHEMA),
    "structured with raw": lambda model: model.with_structured_output(SCHEMA, include_raw=True),
}


@pytest.mark.parametrize("kind", KINDS)
def test_no_wrapping_of_a_model_that_has_answered_reaches_weights(
    kind: type[Model], used: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    model = used(kind)
    for name, wrap in (WRAPPED | (OF_CHATS if kind is ChatPrecedent else {})).items():
        wrapped = wrap(model)
        for protocol in range(2, pickle.HIGHEST_PROTOCOL + 1):
            assert len(pickled(wrapped, protocol)) < 20_000, name
        assert type(again(wrapped)) is type(wrapped)
    recorder = again(WRAPPED["recorded"](model)).callbacks[0]
    assert recorder.path.name == "log.jsonl"
    recorder.close()


@pytest.mark.parametrize("kind", KINDS)
def test_the_settings_arrive_and_nothing_that_was_loaded(kind: type[Model], used: Any) -> None:
    fields: dict[str, Any] = {"temperature": 0.5, "stop": ["x"], "tenant": "north", "templates": ["a {b}"]}
    fresh, loaded = kind(model="tiny", **fields), used(kind, **fields)
    for model in (fresh, loaded):
        arrived = again(model)
        assert {name: getattr(arrived, name) for name in fields} == fields
        assert arrived.engines._engines == {}
        assert arrived.model == "tiny"
    assert pickled(loaded) == pickled(loaded.model_copy()), "as often as you like"
    assert loaded.invoke("hi", stop=[]) is not None, "and the one that stays goes on"


# What stays

MADE: dict[str, Callable[[type[Model], Any], Model]] = {
    "from_engine": lambda kind, engine: kind.from_engine(engine),
    "from_model": lambda kind, engine: kind.from_model(*tiny()),
}


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("how", MADE)
def test_a_model_made_of_weights_refuses_by_name(how: str, kind: type[Model], precedent_engine: Any) -> None:
    model = MADE[how](kind, precedent_engine(["hello"] * 9))
    for wrapped in (model, model.bind(stop=["x"]), model.model_copy(), copy.deepcopy(model)):
        for dump in (pickle.dumps, cloudpickle.dumps, pickled):
            with pytest.raises(UnsupportedError, match=r"from_model or from_engine cannot be pickled.*pass model=NAME"):
                dump(wrapped)
    assert copy.deepcopy(model).engines is model.engines, "a copy in the same process shares"


@pytest.mark.parametrize("kind", KINDS)
def test_a_part_that_stays_refuses_by_name(kind: type[Model]) -> None:
    with SpeculationCache.open(embedder=HashEmbedder()) as cache:
        for part, says in (
            ({"speculation_cache": cache}, r"this SpeculationCache belongs to its process.*give its path or URL"),
            ({"draft_model": tiny()[0]}, r"draft_model is a LlamaForCausalLM.*give its name or folder"),
        ):
            with pytest.raises(UnsupportedError, match=says):
                pickle.dumps(kind(model="tiny", **part))


def _all_of_one_process() -> list[type[OfOneProcess]]:
    rooms = ("precedent.cache", "precedent.langchain", "precedent.engine", "precedent_engines")
    for room in map(importlib.import_module, rooms):
        for module in pkgutil.iter_modules(room.__path__, f"{room.__name__}."):
            importlib.import_module(module.name)
    found, todo = [], [OfOneProcess]
    while todo:
        found += (subclasses := todo.pop().__subclasses__())
        todo += subclasses
    return found


def test_everything_that_belongs_to_one_process_refuses() -> None:
    kinds = _all_of_one_process()
    assert {"Engine", "SpeculationCache", "Database", "Generation", "Worker", "Background", "DraftingService"} <= {
        kind.__name__ for kind in kinds
    }
    for kind in kinds:
        made = kind.__new__(kind)
        for dump in (pickle.dumps, cloudpickle.dumps):
            with pytest.raises(
                UnsupportedError, match=f"this {kind.__name__} belongs to its process.*cannot be pickled"
            ):
                dump(made)
        assert copy.copy(made) is made is copy.deepcopy(made)
    assert Engine in kinds


def test_what_arrives_loads_its_own_and_answers_as_the_first(used: Any) -> None:
    model = used(ChatPrecedent)
    expected = model.invoke("hi").content
    arrived = again(model.model_copy(update={"speculation_cache": None}))
    assert arrived.invoke("hi").content == expected
    assert arrived.engine is not model.engine
    arrived.engine.close()
