"""A draft model in forwards of fixed size, as its target is, or without them where it cannot."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from helpers.hybrids import random_ids
from helpers.static_targets import WITHOUT_GRAPHS, plain_target, static_target

from precedent.config import SamplingParams, SpeculationConfig
from precedent.engine.engine import Engine
from precedent.planning.costs import CostCurve
from precedent.target import TargetModel
from precedent.target.load.first_layers import first_layers
from precedent_drafts.heads import HEAD_TOKENS
from precedent_drafts.trained import draft_beside, initial_weights
from precedent_testing.tiny_models import byte_tokenizer, tiny_causal_lm


def drafted(target: TargetModel, draft: Any, sampling: SamplingParams) -> tuple[Engine, tuple[int, ...], int]:
    """The engine of a draft model, what it answered, and how many forwards of fixed size the draft took for it."""
    engine = Engine(target, byte_tokenizer(), name="tiny", draft_model=draft)
    engine.planner.cost = CostCurve()
    speculation = SpeculationConfig(drafters=("draft-model",))
    static = next(iter(engine._parts.draft_model.runner.backends), None)
    before = static.forwards if static else 0
    result = engine.submit(random_ids(4, 60), sampling, speculation=speculation).result()
    return engine, result.token_ids, static.forwards - before if static else 0


@pytest.mark.parametrize("sampling", [SamplingParams(max_tokens=24), SamplingParams(max_tokens=24, temperature=1.0)])
def test_a_draft_model_runs_in_fixed_sizes_as_its_target_does(sampling: SamplingParams) -> None:
    """A trained one, with a head of few tokens; greedy texts are those of ordinary forwards."""
    static, plain = static_target(), plain_target()
    drafts = [
        draft_beside(one.model, (0, 1), {**initial_weights(one.model, (0, 1)), HEAD_TOKENS: torch.arange(0, 250, 2)})
        for one in (static, plain)
    ]
    engine, text, forwards = drafted(static, drafts[0], sampling)
    draft = engine._parts.draft_model
    assert draft.arena.shape == draft.kv_shape != static.kv_shape
    assert forwards > 4
    engine.close()
    other, expected, _ = drafted(plain, drafts[1], sampling)
    assert other._parts.draft_model.arena is None
    other.close()
    assert not sampling.greedy or text == expected


def test_a_draft_model_that_cannot_run_in_fixed_sizes_goes_without_and_the_log_says_so(
    caplog: pytest.LogCaptureFixture,
) -> None:
    windowed = tiny_causal_lm("mistral", sliding_window=16)
    engine, text, _ = drafted(static_target(), windowed, SamplingParams(max_tokens=9))
    assert engine._parts.draft_model.arena is None
    assert "the draft model runs without graphs: mistral" in caplog.text
    engine.close()
    early = first_layers(model := tiny_causal_lm(), 1)
    engine, again, _ = drafted(TargetModel(model, cuda_graphs=WITHOUT_GRAPHS), early, SamplingParams(max_tokens=9))
    assert engine._parts.draft_model.arena is None, "an early exit reads its target's arena"
    engine.close()
    assert text == again


def test_a_draft_models_arena_holds_no_more_tokens_than_its_targets() -> None:
    static = static_target()
    draft = TargetModel(tiny_causal_lm(num_hidden_layers=1))
    draft.run_as_graphs(static.runner.backends[0].cuda_graphs_beside)
    tokens = static.arena.nbytes // static.kv_shape.row_bytes
    assert draft.arena.nbytes == tokens * draft.kv_shape.row_bytes
