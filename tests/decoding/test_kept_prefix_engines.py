"""Kept prefixes in engines: asked again after a restart, forgotten, refused by name."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest
import torch
from helpers.kept import PREFIX, PROMPT, TOKENIZER, tiny

from precedent.cache import SpeculationCache
from precedent.cache import prefixes as prefix_files
from precedent.config import SamplingParams, SpeculationConfig
from precedent.engine.engine import Engine
from precedent.engine.options import EngineOptions
from precedent.errors import ConfigError, PrecedentError, UnsupportedError
from precedent.langchain import PrecedentLLM
from precedent.planning.costs import CostCurve
from precedent.target import TargetModel, fingerprints
from precedent_testing.embedders import HashEmbedder


@pytest.fixture(scope="module")
def target() -> TargetModel:
    return TargetModel(tiny())


@pytest.fixture
def cache(tmp_path: Path) -> Iterator[SpeculationCache]:
    with SpeculationCache.open(tmp_path / "c.db", embedder=HashEmbedder()) as cache:
        yield cache


def engine_on(folder: Path, **options: Any) -> Engine:
    """An engine as after a restart."""
    place = {"cache": folder / "c.db", "embedder": HashEmbedder(), "keep_prefixes": True}
    engine = Engine.load(tiny(), tokenizer=TOKENIZER, **{**place, **options})
    engine.planner.cost = CostCurve()
    return engine


def ask(engine: Engine, prompt: list[int] = PROMPT, *, tenant: str = "shop", **others: Any) -> tuple[Any, int]:
    """The answer's tokens, and how many tokens of the prompt were not computed."""
    others = {"prefix_tokens": len(PREFIX), **others}
    result = engine.submit(prompt, SamplingParams(max_tokens=12), tenant=tenant, **others).result()
    return result.token_ids, result.cached_prompt_tokens


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A folder in which an engine that has ended kept a prefix of the tenant "shop"."""
    with closing(engine_on(tmp_path)) as engine:
        assert ask(engine)[1] == 0
    return tmp_path


def test_a_restarted_engine_answers_the_same_from_the_kept_prefix(folder: Path, tmp_path_factory: Any) -> None:
    with closing(engine_on(tmp_path_factory.mktemp("empty"), keep_prefixes=False)) as engine:
        without = [ask(engine, [*PREFIX, *question], prefix_tokens=0)[0] for question in (b"order 18?", b"hello")]
    with closing(engine_on(folder)) as engine:
        first, second = (ask(engine, [*PREFIX, *question]) for question in (b"order 18?", b"hello"))
        assert [first[0], second[0]] == without
        assert [first[1], second[1]] == [len(PREFIX)] * 2
        assert ask(engine, tenant="other")[1] == 0
        assert ask(engine, PREFIX, tenant="fresh")[1] == 0, "a prompt that is a prefix and no more"


def test_what_memory_holds_is_not_read_from_disk(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    reads: list[str] = []
    read = prefix_files.PrefixFiles.read
    monkeypatch.setattr(
        prefix_files.PrefixFiles, "read", lambda self, *named: reads.append(named[0]) or read(self, *named)
    )
    with closing(engine_on(folder)) as engine:
        for question in (b"a", b"b", b"c"):
            assert ask(engine, [*PREFIX, *question])[1] >= len(PREFIX)
    assert reads == ["shop"]


@pytest.mark.parametrize("condition", ["write_back", "switched off", "prefix_tokens"])
def test_a_request_that_stores_nothing_keeps_nothing(
    condition: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    if condition == "switched off":
        monkeypatch.setenv("PRECEDENT_SPECULATION", "off")
    told = {
        "write_back": {"speculation": SpeculationConfig(write_back=False)},
        "switched off": {},
        "prefix_tokens": {"prefix_tokens": 0},
    }
    with closing(engine_on(tmp_path)) as engine:
        ask(engine, **told[condition])
    assert list(tmp_path.rglob("*.safetensors")) == []


def test_an_engine_forgets_with_its_cache(folder: Path) -> None:
    with closing(engine_on(folder)) as engine:
        engine.cache.forget(tenant="shop")
    with closing(engine_on(folder)) as engine:
        assert ask(engine)[1] == 0


def test_a_damaged_file_costs_a_request_nothing_but_time(folder: Path) -> None:
    (file,) = folder.rglob("*.safetensors")
    content = file.read_bytes()
    with closing(engine_on(folder)) as engine:
        expected, _ = ask(engine)
    file.write_bytes(content[:-100])
    with closing(engine_on(folder)) as engine:
        assert ask(engine) == (expected, 0)
    assert len(file.read_bytes()) == len(content), "it is written anew"


# What is refused


@pytest.mark.parametrize(
    ("options", "said"),
    [
        (EngineOptions(keep_prefixes=True), "beside a speculation cache on disk"),
        (EngineOptions(keep_prefixes=True, cache="postgresql://host/db"), "beside a speculation cache on disk"),
    ],
)
def test_options_that_cannot_be_kept_are_refused_before_anything_is_loaded(options: EngineOptions, said: str) -> None:
    with pytest.raises(PrecedentError, match=said):
        Engine.load("/nowhere", options)


def test_a_cache_in_memory_is_refused() -> None:
    with (
        SpeculationCache.open(embedder=HashEmbedder()) as cache,
        pytest.raises(ConfigError, match="beside a speculation cache on disk"),
    ):
        Engine.load("/nowhere", keep_prefixes=True, cache=cache)


def test_a_model_with_adapters_or_without_readable_weights_is_refused(target: TargetModel) -> None:
    with pytest.raises(UnsupportedError, match=r"the bytes of w cannot be read"):
        fingerprints.weights_digest({"w": torch.empty(3, device="meta")})
    model = tiny()
    model._hf_peft_config_loaded = True
    with pytest.raises(UnsupportedError, match="does not support adapters: merge them"):
        fingerprints.identity_of(TargetModel(model))


def test_wrong_prefix_tokens_are_refused(tmp_path: Path) -> None:
    with closing(engine_on(tmp_path)) as engine:
        for wrong in (-1, len(PROMPT) + 1, 1.5, True, "7"):
            with pytest.raises(ConfigError, match=r"prefix_tokens=.* must be a number of the prompt's 117 tokens"):
                ask(engine, prefix_tokens=wrong)
    with (
        closing(engine_on(tmp_path, keep_prefixes=False)) as engine,
        pytest.raises(ConfigError, match="load it with keep_prefixes=True"),
    ):
        ask(engine)


def test_a_model_of_plain_texts_refuses_it() -> None:
    with pytest.raises(UnsupportedError, match="is for chat models"):
        PrecedentLLM(model="m", speculation_cache="c.db", keep_prefixes=True)
