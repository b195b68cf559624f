"""Block drafts in folders and in engines: chains where a folder says so, and clear refusals."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from helpers.draft_head_engines import AlwaysOpen
from helpers.small_engines import PLAIN, PROMPT
from helpers.tiny_block import settings_for, tiny_block_draft
from transformers import PreTrainedModel

from precedent.config import SamplingParams, SpeculationConfig
from precedent.drafters import load_draft
from precedent.engine.engine import Engine
from precedent.errors import ConfigError, ModelLoadError
from precedent.planning.costs import CostCurve
from precedent.planning.plan import Limits
from precedent.planning.planner import Planner
from precedent_drafts.block_draft import load_block_draft, save_block_draft
from precedent_testing.tiny_models import byte_tokenizer, tiny_causal_lm

BLOCK = SpeculationConfig(drafters=("block-draft",))


def target_model() -> PreTrainedModel:
    return tiny_causal_lm(scale=1.5)


def engine_on(model: PreTrainedModel, draft: Any, **settings: Any) -> Engine:
    """An engine for which width is free, and forwards too."""
    engine = Engine(model, byte_tokenizer(), name="tiny", cost=CostCurve(), draft_model=draft, **settings)
    planner: Any = engine.planner
    planner.gates["block-draft"] = AlwaysOpen()
    return engine


def test_chains_are_drawn_where_the_folder_says_so(tmp_path: Path) -> None:
    """Samples in a sampled request, candidates in a greedy one, and the greedy answer of plain decoding."""
    model = target_model()
    engine = engine_on(model, tiny_block_draft(model, proposes="chain"))
    sampled = engine.submit(PROMPT, SamplingParams(temperature=0.8, max_tokens=30), speculation=BLOCK).result()
    greedy, plain = (
        engine.submit(PROMPT, SamplingParams(max_tokens=20), speculation=each).result() for each in (BLOCK, PLAIN)
    )
    engine.close()
    assert sampled.stats.drafted_by_source["block-draft"] > 0
    assert greedy.stats.drafted_by_source["block-draft"] > 0
    assert greedy.token_ids == plain.token_ids


def test_a_folder_is_a_draft_model(tmp_path: Path) -> None:
    """What is saved is what is loaded, by the same name as any draft model."""
    model = target_model()
    draft = tiny_block_draft(model, range(0, 259, 2))
    save_block_draft(tmp_path, draft, torch.float64)
    again = load_draft(tmp_path, model, byte_tokenizer())
    assert again.settings == draft.settings  # type: ignore[union-attr]
    for name, weight in load_block_draft(tmp_path, model).own_weights().items():
        assert torch.equal(weight, draft.own_weights()[name])
    engine = engine_on(model, tmp_path)
    assert engine.submit(PROMPT, SamplingParams(max_tokens=8)).result().stats.drafted_by_source["block-draft"] > 0
    engine.close()


def test_drafts_that_do_not_fit_are_refused(tmp_path: Path) -> None:
    """Another target's embeddings or layers, a torn file, another format, and settings that nothing supports."""
    model = target_model()
    save_block_draft(tmp_path, tiny_block_draft(model), torch.float64)
    other, deeper = tiny_causal_lm(seed=5), target_model()
    with torch.no_grad():
        next(deeper.base_model.layers.parameters()).add_(1.0)
    with pytest.raises(ModelLoadError, match="uses its embeddings, which differ"):
        load_draft(tmp_path, other, byte_tokenizer())
    with pytest.raises(ModelLoadError, match="reads the layers of"):
        load_draft(tmp_path, deeper, byte_tokenizer())
    config = tmp_path / "config.json"
    good = config.read_text(encoding="utf-8")
    for old, new, says in (
        ('"format": 1', '"format": 2', "of format 2"),
        ('"markov_rank": 6', '"markov_rank": 7', r"do not fit its config: markov"),
        ('"num_head_tokens": 259', '"num_head_tokens": 200', r"do not fit its config: head.token_ids"),
        ('"block_size": 4', '"block_size": 40', "must lie between 2 and 16"),
        ('"reads": [', '"read": [', "cannot be read"),
        ('"condition": "target"', '"condition": "none"', "does not fit the condition none"),
    ):
        assert old in good
        config.write_text(good.replace(old, new), encoding="utf-8")
        with pytest.raises(ModelLoadError, match=says):
            load_draft(tmp_path, model, byte_tokenizer())


def test_what_cannot_go_together_is_refused() -> None:
    """Layers that the target lacks."""
    model = target_model()
    assert settings_for(model, 259, reads=(2, 9)).reads == (2, 9)
    with pytest.raises(ConfigError, match="has the layers 1 to 3"):
        engine_on(model, tiny_block_draft(model, reads=(2, 9)))


def test_the_planner_asks_only_where_a_forward_pays() -> None:
    """Cheap forwards that bring much are asked for, dear ones are not, and not where everything is known."""
    limits = Limits(16, 0, 20, frozenset())
    curve = CostCurve.through({1: 10.0, 32: 10.0})

    def asked(milliseconds: float, gain: float, open_mass: float) -> bool:
        planner = Planner(curve)
        for _ in range(4):  # the first steps only try
            planner.forward_pays("block-draft", 1, without._replace(open_mass=1.0), limits)
            planner.observe_forward_of("block-draft", 1, milliseconds, 1)
        planner.gates["block-draft"].tokens = gain
        return planner.forward_pays("block-draft", 1, without._replace(open_mass=open_mass), limits)

    without = Planner(curve).without([], limits)
    assert (without.expected, without.rows, without.open_mass) == (1.0, 0, 1.0)
    assert asked(2.0, 1.0, 1.0)
    assert not asked(12.0, 1.0, 1.0)
    assert not asked(2.0, 0.1, 1.0)
    assert not asked(2.0, 1.0, 0.05)
