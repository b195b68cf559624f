"""MTP heads in the files of their checkpoints: found in shards, refused where torn, and named to be used."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
import torch
from helpers.mtp_checkpoints import (
    add_head,
    around,
    checkpoint,
    head_weights,
    layer_prefix,
    loaded,
    rewritten,
)
from helpers.small_engines import PROMPT, AlwaysOpen

from precedent import ChatPrecedent
from precedent.config import SamplingParams, SpeculationConfig
from precedent.engine.engine import Engine
from precedent.errors import ConfigError, ModelLoadError, UnsupportedError
from precedent.planning.costs import CostCurve
from precedent_testing.tiny_models import byte_tokenizer, tiny_causal_lm

MTP = SpeculationConfig(drafters=("mtp",))
ALL = SpeculationConfig(drafters=("recall", "prompt", "grammar", "draft-model", "mtp"))
FAMILIES = ("glm4_moe", "qwen3_next", pytest.param("deepseek_v3", marks=pytest.mark.slow))


def engine_on(folder: Path, speculation: SpeculationConfig = MTP, **settings: Any) -> Engine:
    """An engine on a checkpoint in float64, for which width is free; it draws in every step, whether it pays or not."""
    engine = Engine.load(loaded(folder), tokenizer=byte_tokenizer(), speculation=speculation, **settings)
    planner: Any = engine.planner
    planner.cost = CostCurve()
    planner.gates.update({name: AlwaysOpen() for name in ("mtp", "draft-model")})
    return engine


@pytest.fixture(scope="module", params=FAMILIES)
def folder(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return checkpoint(tmp_path_factory.mktemp("mtp") / request.param, request.param)


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


@pytest.fixture(scope="module")
def qwen(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return checkpoint(tmp_path_factory.mktemp("mtp") / "qwen", "qwen3_5_text")


def test_a_model_that_names_mtp_drafts_with_it(qwen: Path) -> None:
    """The answer is that of plain decoding, and the head proposed."""
    llm = ChatPrecedent(model=str(qwen), dtype="float64", drafters=["prompt", "mtp"], max_tokens=12, temperature=0)
    drafted, plain = llm.invoke("hello"), llm.invoke("hello", speculation=False)
    llm.engine.close()
    assert drafted.content == plain.content
    assert drafted.response_metadata["speculation"]["drafted_by_source"]["mtp"] > 0


def test_a_call_alone_cannot_name_it(qwen: Path) -> None:
    """The engine of a model that does not is built without a head."""
    llm = ChatPrecedent(model=str(qwen), dtype="float64", max_tokens=12, temperature=0)
    with pytest.raises(ConfigError, match="name mtp among the drafters of its own speculation settings"):
        llm.invoke("hello", drafters=["mtp"])
    assert llm.engine.target.runner.hidden is None
    llm.engine.close()
