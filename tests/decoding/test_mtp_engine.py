"""Engines that draft with the MTP head of their checkpoint: plain answers in fewer steps, or a clear refusal."""

from __future__ import annotations

import re
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from helpers.draft_head_engines import SAMPLINGS, AlwaysOpen, check_answers, check_grammar, check_next_turns
from helpers.hybrids import random_ids
from helpers.mtp_checkpoints import (
    add_head,
    around,
    checkpoint,
    head_weights,
    layer_prefix,
    loaded,
    rewritten,
    settling,
)
from helpers.small_engines import PROMPT

from precedent.cache import SpeculationCache
from precedent.config import EngineLimits, SamplingParams, SpeculationConfig
from precedent.engine.engine import Engine
from precedent.errors import CapacityError, ConfigError, ModelLoadError, UnsupportedError
from precedent.planning.costs import CostCurve
from precedent.target import TargetModel
from precedent.testing.embedders import HashEmbedder
from precedent.testing.tiny_models import byte_tokenizer, tiny_causal_lm

MTP = SpeculationConfig(drafters=("mtp",))
ALL = SpeculationConfig(drafters=("recall", "prompt", "grammar", "draft-model", "mtp"))
FAMILIES = ("glm4_moe", "qwen3_next", pytest.param("deepseek_v3", marks=pytest.mark.slow))


def engine_on(folder: Path, speculation: SpeculationConfig = MTP, **settings: Any) -> Engine:
    """An engine on a checkpoint in float64, for which width is free; it draws in every step, whether it pays or not."""
    engine = Engine.load(loaded(folder), tokenizer=byte_tokenizer(), speculation=speculation, **settings)
    planner: Any = engine.planner
    planner.cost = CostCurve()
    planner._gates.update({name: AlwaysOpen() for name in ("mtp", "draft-model")})
    return engine


@pytest.fixture(scope="module", params=FAMILIES)
def folder(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return checkpoint(tmp_path_factory.mktemp("mtp") / request.param, request.param)


@pytest.fixture(scope="module")
def engine(folder: Path) -> Iterator[Engine]:
    with SpeculationCache.open(None, embedder=HashEmbedder()) as cache:
        engine = engine_on(folder, ALL, cache=cache, draft_model=tiny_causal_lm())
        yield engine
        engine.close()


@pytest.mark.usefixtures("searches_at_once")
@pytest.mark.parametrize("names", [("mtp",), ("recall", "prompt", "mtp"), ("mtp", "draft-model")])
@pytest.mark.parametrize("sampling", SAMPLINGS.values(), ids=SAMPLINGS)
def test_answers_are_those_of_plain_decoding(engine: Engine, names: tuple[str, ...], sampling: SamplingParams) -> None:
    """Greedy and seeded, alone and beside other drafters, for concurrent requests of ragged lengths."""
    check_answers(engine, "mtp", names, sampling)


def test_grammars_hold(engine: Engine) -> None:
    """What the grammar forbids is neither drafted nor answered."""
    check_grammar(engine, "mtp")


def test_the_next_turn_and_kept_prefixes_answer_the_same(folder: Path, tmp_path: Path) -> None:
    """Hidden states come back with the keys and values, from idle conversations and from disk."""
    check_next_turns(partial(engine_on, folder), tmp_path, MTP)


@pytest.mark.parametrize("temperature", [0.0, 0.7])
def test_a_head_that_knows_its_target_saves_steps(folder: Path, tmp_path: Path, temperature: float) -> None:
    """A target that only looks at its last token, and a head that computes the same from that token.

    The end token is forbidden: a sampled answer that happens to end early has too few steps to say anything.
    """
    engine = engine_on(settling(folder, tmp_path / "settled"))
    sampling = SamplingParams(
        temperature=temperature, max_tokens=40, logit_bias={engine.tokenizer.eos_token_id: -100.0}
    )
    result = engine.submit(PROMPT, sampling, speculation=MTP).result()
    engine.close()
    stats = result.stats
    assert stats.tokens_per_step > 4
    assert stats.accepted_by_source["mtp"] >= 3 * stats.num_steps


def test_memory_covers_hidden_states_and_the_heads_own_cache(folder: Path) -> None:
    """What a request reserves covers what it holds; one that drafts otherwise reserves nothing for the head."""
    engine = engine_on(folder)
    target, head, plain = engine.target, engine._models.head, TargetModel(loaded(folder))
    assert head is not None
    assert target.kv_bytes(300) - plain.kv_bytes(300) == 512 * target.model.config.hidden_size * 8
    with_head, without = (engine._kv_bytes(200, 50, MTP, engine._drafters_named((name,))) for name in ("mtp", "prompt"))
    slot = head.new_slot()
    slot.kv.reserve(250 + MTP.max_nodes + MTP.max_draws)
    assert with_head - without == slot.kv.nbytes > 0
    engine.close()
    engine = engine_on(folder, limits=EngineLimits(max_kv_bytes=with_head - 1))
    with pytest.raises(CapacityError, match="max_kv_bytes"):
        engine.submit(random_ids(1, 200), SamplingParams(max_tokens=50))
    engine.close()


def test_nothing_is_kept_where_mtp_is_not_named(folder: Path) -> None:
    """An engine without it reads no head and keeps no hidden states, and says so when a request names it."""
    engine = engine_on(folder, SpeculationConfig())
    assert engine.target.runner.hidden is None
    assert engine._models.head is None
    with pytest.raises(ConfigError, match="name mtp among the drafters of its own speculation settings"):
        engine.submit(PROMPT, SamplingParams(), speculation=MTP)
    engine.close()


def refused(model: Any, **settings: Any) -> Any:
    """What an engine that drafts with mtp says of a model."""
    with pytest.raises((ConfigError, ModelLoadError, UnsupportedError)) as caught:
        Engine(model, byte_tokenizer(), name="tiny", speculation=MTP, cost=CostCurve(), **settings)
    return caught.value


def test_models_without_a_head_say_so(folder: Path) -> None:
    """Families that have none, families that mtp does not know, and models that come from no files."""
    assert "llama has no MTP head" in str(refused(tiny_causal_lm()))
    strange = tiny_causal_lm()
    strange.config.num_nextn_predict_layers = 1
    assert "names MTP layers, and mtp knows those of deepseek_v3" in str(refused(strange))
    nowhere = loaded(folder)
    nowhere.config._name_or_path = ""
    assert "reads the safetensors files of the target, and there are none at ''" in str(refused(nowhere))
    nowhere.config._name_or_path = "nobody/has-this"
    assert "there are none at 'nobody/has-this'" in str(refused(nowhere))
    several = loaded(folder)
    several.config.num_nextn_predict_layers = 3
    assert "has 3 MTP layers, and mtp runs only one" in str(refused(several))


def without(*names: str) -> Any:
    return lambda weights: {name: weight for name, weight in weights.items() if name not in names}


def test_torn_heads_are_refused_by_the_tensor(folder: Path, tmp_path: Path) -> None:
    """A missing or misshapen tensor, one too many, and one that is quantised."""
    model = loaded(folder)
    prefix, (projection, *_) = layer_prefix(model), around(model)
    inside = f"{prefix}self_attn.o_proj.weight"

    def reshaped(name: str, weight: torch.Tensor) -> Any:
        return lambda weights: weights | {name: weight}

    cases = {
        "no head": (without(*head_weights(model, folder)), f"no whole MTP head.*{projection}"),
        "no projection": (without(projection), f"{projection} is not in its files"),
        "no part of the layer": (without(inside), "does not fit a layer of.*o_proj"),
        "one too many": (reshaped(f"{prefix}more.weight", torch.ones(2)), "does not fit a layer of.*more.weight"),
        "another size": (reshaped(projection, torch.ones(3, 6)), r"has the shape \(3, 6\)"),
        "another layer": (reshaped(inside, torch.ones(3, 6)), "cannot load the MTP head of"),
        "scales": (reshaped(f"{inside}_scale_inv", torch.ones(2)), "is quantised"),
    }
    for name, (change, message) in cases.items():
        error = refused(loaded(rewritten(folder, tmp_path / name, change)))
        assert re.search(message, str(error)), f"{name}: {error}"


def test_a_head_in_a_shard_of_its_own_is_found(folder: Path, tmp_path: Path) -> None:
    """With an index; the target's own copies beside it are left alone. A missing shard is an error of loading."""
    weights = head_weights(loaded(folder), folder)
    sharded = rewritten(folder, tmp_path / "sharded", without(*weights))
    copies = {"model.layers.2.embed_tokens.weight": torch.ones(4, 4)} if "glm" in folder.name else {}
    add_head(sharded, weights | copies, shards=True)
    texts = []
    for place in (folder, sharded):
        engine = engine_on(place)
        result = engine.submit(PROMPT, SamplingParams(max_tokens=12)).result()
        texts.append((result.token_ids, result.stats.accepted_by_source["mtp"]))
        engine.close()
    assert texts[0] == texts[1]
    model = loaded(sharded)
    (sharded / "model-00002-of-00002.safetensors").unlink()
    assert isinstance(refused(model), ModelLoadError)


def test_a_draft_model_that_draws_ahead_is_refused(folder: Path) -> None:
    assert "set pearl=False" in str(refused(loaded(folder), draft_model=tiny_causal_lm(), pearl=True))
