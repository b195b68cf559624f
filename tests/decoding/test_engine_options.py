"""Engine options: each reaches the engine by every way in, unknown ones are refused, equal ones share an engine."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Callable, Hashable, Iterator
from contextlib import closing
from dataclasses import dataclass, field, fields, replace
from pathlib import Path
from typing import Any

import pytest
import torch
from helpers.saved_models import saved
from helpers.small_engines import load_by
from transformers import BitsAndBytesConfig

from precedent.cache import SpeculationCache
from precedent.config import EngineLimits, SpeculationConfig
from precedent.engine.engine import Engine
from precedent.engine.options import EngineOptions
from precedent.engine.shared import running_engines, shared_engine
from precedent.errors import ConfigError, PrecedentError
from precedent.langchain import ChatPrecedent, PrecedentLLM
from precedent.langchain.fields import OF_THE_ENGINE
from precedent.target.quantised import is_quantised
from precedent_testing.embedders import HashEmbedder
from precedent_testing.scripted_engine import ScriptedEngine
from precedent_testing.tiny_models import byte_tokenizer, tiny_causal_lm

NAMES = [option.name for option in fields(EngineOptions)]
NOT_OF_CHAT_MODELS = ("speculation", "limits")


class Noting(HashEmbedder):
    """An embedder that knows whether it was asked."""

    asked = False

    def embed(self, texts: Any) -> Any:
        self.asked = True
        return super().embed(texts)


@dataclass(frozen=True)
class Effect:
    """Options of which the last is the one in question, and how it shows: in the engine, or in a refusal."""

    given: dict[str, Any]
    shows: Callable[[Engine], bool] = lambda engine: False
    refused: str = field(default="", kw_only=True)


def effect_of(name: str, folder: Path) -> Effect:
    """How an option shows; an option without an entry fails here: say how it shows."""
    embedder, place = Noting(), folder / "completions.db"
    kept = {"cache": place, "embedder": embedder, "keep_prefixes": True}
    elsewhere = {"draft_model": "first-layers:1", "draft_device": "nowhere"}
    few, small = SpeculationConfig(max_nodes=3), EngineLimits(max_running=5)
    return {
        "draft_model": Effect({"draft_model": "first-layers:1"}, lambda engine: "draft-model" in engine.drafters),
        "cache": Effect(
            {"embedder": embedder, "cache": place},
            lambda engine: str(place) == getattr(engine.cache, "path", None),
        ),
        "embedder": Effect({"cache": place, "embedder": embedder}, lambda engine: warmed(engine) and embedder.asked),
        "speculation": Effect({"speculation": few}, lambda engine: engine.speculation.max_nodes == 3),
        "limits": Effect({"limits": small}, lambda engine: engine.admission.max_running == 5),
        "device": Effect({"device": "nowhere"}, refused="device='nowhere' cannot be used"),
        "draft_device": Effect(elsewhere, refused="draft_device='nowhere' cannot"),
        "dtype": Effect({"dtype": "float64"}, lambda engine: engine.target.model.dtype == torch.float64),
        "quantization": Effect(
            {"device": "cpu", "quantization": "int8"}, lambda engine: is_quantised(engine.target.model)
        ),
        "backend": Effect({"backend": "nobody's"}, refused="is not one of precedent"),
        "n_gpu_layers": Effect({"n_gpu_layers": 2}, refused="n_gpu_layers is for"),
        "accurate": Effect({"device": "cpu", "accurate": True}, refused="accurate=True is for quantised weights"),
        "model_kwargs": Effect({"model_kwargs": {"tp_size": 2}}, refused="model_kwargs cannot hold 'tp_size'"),
        "chat_template": Effect(
            {"chat_template": "gemma"}, lambda engine: "<start_of_turn>" in str(engine.tokenizer.chat_template)
        ),
        "bitwise": Effect({"dtype": "float64", "bitwise": True}, refused="bitwise=True is not available"),
        "cuda_graphs": Effect({"device": "cpu", "cuda_graphs": True}, refused="CUDA graphs need CUDA devices"),
        "loop": Effect({"loop": "pearl"}, refused="loop"),
        "keep_prefixes": Effect(kept, lambda engine: engine.kept_prefixes is not None),
    }[name]


def warmed(engine: Engine) -> bool:
    """Let the cache use its embedder; False without a cache."""
    if engine.cache is not None:
        engine.cache.warm_up()
    return engine.cache is not None


def loaded(folder: str, options: dict[str, Any]) -> Engine:
    return Engine.load(folder, EngineOptions(**options))


def from_chat_model(folder: str, options: dict[str, Any]) -> Engine:
    return ChatPrecedent(model=folder, **as_fields(options)).engine


def as_fields(options: dict[str, Any]) -> dict[str, Any]:
    """Options under the names of a chat model's fields."""
    return {"speculation_cache" if name == "cache" else name: value for name, value in options.items()}


WAYS = [
    *((loaded, name) for name in NAMES),
    *((from_chat_model, name) for name in [name for name in NAMES if name not in NOT_OF_CHAT_MODELS][::4]),
]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> str:
    """A folder with a tiny model."""
    return str(saved(tmp_path_factory.mktemp("model"), tiny_causal_lm(dtype=torch.float32)))


@pytest.fixture(scope="module")
def plain(folder: str) -> Iterator[Engine]:
    """An engine of the defaults."""
    with closing(Engine.load(folder)) as engine:
        yield engine


@pytest.mark.parametrize(("way", "name"), WAYS, ids=lambda part: part if isinstance(part, str) else part.__name__)
@pytest.mark.sampled(3)
def test_every_option_reaches_the_engine(
    way: Callable[[str, dict[str, Any]], Engine], name: str, folder: str, plain: Engine, tmp_path: Path
) -> None:
    effect = effect_of(name, tmp_path)
    if effect.refused:
        with pytest.raises(PrecedentError, match=effect.refused):
            way(folder, effect.given)
        return
    assert not effect.shows(plain), "an effect that always shows proves nothing"
    with closing(way(folder, effect.given)) as engine:
        assert effect.shows(engine)


def test_a_chat_model_has_a_field_for_every_option() -> None:
    assert sorted(OF_THE_ENGINE) == sorted(as_fields(dict.fromkeys(set(NAMES) - set(NOT_OF_CHAT_MODELS))))
    for kind in (ChatPrecedent, PrecedentLLM):
        assert set(OF_THE_ENGINE) <= kind.model_fields.keys()


# Options that would be ignored


def test_an_embedder_is_refused_with_an_open_cache_which_has_its_own() -> None:
    with SpeculationCache.open(embedder=HashEmbedder()) as cache:
        for load in (Engine.load, shared_engine):
            with pytest.raises(ConfigError, match="an open cache has its embedder already: leave embedder out"):
                load("/nowhere", EngineOptions(embedder=HashEmbedder(), cache=cache))


def test_a_tokenizer_is_for_a_model_object_which_needs_it() -> None:
    with pytest.raises(ConfigError, match="tokenizer is for a model object: /nowhere brings its own"):
        Engine.load("/nowhere", tokenizer=byte_tokenizer())
    with pytest.raises(ConfigError, match="a model object needs its tokenizer"):
        Engine.load(tiny_causal_lm())


# Sharing


def test_quantisation_is_compared_by_its_settings_and_other_objects_by_identity() -> None:
    def key(value: Any) -> Hashable:
        return EngineOptions(model_kwargs={"of the model": value}).key()

    eight, same, four = (BitsAndBytesConfig(load_in_8bit=bits == 8, load_in_4bit=bits == 4) for bits in (8, 8, 4))
    assert key(eight) == key(same) != key(four)
    one, equal = bytearray(b"x"), bytearray(b"x")
    assert key(one) == key(one) != key(equal)


@pytest.mark.parametrize("name", NAMES)
def test_every_option_is_part_of_the_key(name: str, tmp_path: Path) -> None:
    given = effect_of(name, tmp_path).given
    without = {other: value for other, value in given.items() if other != name}
    options = EngineOptions(**given)
    assert options.key() == EngineOptions(**given).key() == replace(options).key()
    assert options.key() != EngineOptions(**without).key()


@pytest.fixture
def built(monkeypatch: pytest.MonkeyPatch) -> list[ScriptedEngine]:
    """Replaces the loading of weights; every engine that was built."""
    engines: list[ScriptedEngine] = []

    def load(target: str, options: EngineOptions, *, tokenizer: Any) -> ScriptedEngine:
        engines.append(ScriptedEngine(byte_tokenizer(), []))
        engines[-1].cache = options.cache  # type: ignore[assignment]
        return engines[-1]

    load_by(monkeypatch, load)
    return engines


def test_equal_options_share_one_engine_whichever_way_they_came(built: list[ScriptedEngine], tmp_path: Path) -> None:
    place, embedder = tmp_path / "completions.db", HashEmbedder()
    options = EngineOptions(cache=place, embedder=embedder, dtype="float64", loop="pearl")
    engine = shared_engine("m", options)
    given = {"embedder": embedder, "dtype": "float64", "loop": "pearl"}
    same = [
        shared_engine("m", cache=place, **given),
        shared_engine("m", replace(options, embedder=None, cache=engine.cache)),
        ChatPrecedent(model="m", speculation_cache=place, **given).engine,
        ChatPrecedent(model="m", speculation_cache=place, bitwise=False, cuda_graphs=None, seed=3, **given).engine,
        PrecedentLLM(model="m", speculation_cache=str(place), **given).engine,
        PrecedentLLM(model="m", speculation_cache=engine.cache, dtype="float64", loop="pearl").engine,
    ]
    assert [one is engine for one in same] == [True] * len(same)
    others = [
        shared_engine("n", options),
        shared_engine("m", options, tokenizer=byte_tokenizer()),
        shared_engine("m", options, cache=tmp_path / "others.db"),
        shared_engine("m", options, limits=EngineLimits(max_running=1)),
        ChatPrecedent(model="m", speculation_cache=place, embedder=embedder, dtype="float64", bitwise=True).engine,
    ]
    assert len({id(one) for one in (engine, *others)}) == len(built) == 6
    engine.close()
    assert shared_engine("m", options) is not engine, "one that was closed is built again"


def test_weights_that_are_held_already_share_an_engine_that_is_listed_and_kept_by_nobody() -> None:
    model, tokenizer = tiny_causal_lm(), byte_tokenizer()
    chats = [ChatPrecedent.from_model(model, tokenizer) for _ in range(2)]
    shared, own = shared_engine(model, tokenizer=tokenizer), Engine(model, tokenizer, name="own")
    assert all(chat.engine is shared for chat in chats)
    assert ChatPrecedent.from_model(tiny_causal_lm(), tokenizer).engine is not shared
    holder = ChatPrecedent.from_engine(own)
    assert [running_engines().count(engine) for engine in (shared, own)] == [1, 1]
    own.close()
    assert own not in running_engines()
    assert holder.engine is own
    gone = weakref.ref(shared)
    del shared, chats
    gc.collect()
    assert gone() is None
