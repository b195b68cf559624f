"""Engines on hybrids, and on indexers: what works on attention alone works on them, token for token."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import closing
from pathlib import Path

import pytest
from helpers.hybrids import random_ids
from helpers.small_engines import PLAIN, PROMPT

from precedent.cache import SpeculationCache
from precedent.config import SamplingParams, SpeculationConfig
from precedent.engine.engine import Engine
from precedent.errors import UnsupportedError
from precedent.planning.costs import CostCurve
from precedent_testing.embedders import HashEmbedder
from precedent_testing.sweep import tiny_model
from precedent_testing.tiny_models import byte_tokenizer

SLOW = ("falcon_h1", "jamba", "glm_moe_dsa", "qwen4_exp_text")
HYBRIDS = ("qwen3_next", "lfm2", "deepseek_v32", *(pytest.param(name, marks=pytest.mark.slow) for name in SLOW))
ONE_PATH = ("zaya", pytest.param("bloom", marks=pytest.mark.slow))


def engine_on(model_type: str, cache: SpeculationCache | None = None, **settings: object) -> Engine:
    """An engine on a tiny float64 model, for which width is free."""
    engine = Engine.load(tiny_model(model_type), tokenizer=byte_tokenizer(), cache=cache, **settings)
    engine.planner.cost = CostCurve()
    return engine


@pytest.fixture(scope="module", params=[*HYBRIDS, *ONE_PATH])
def engine(request: pytest.FixtureRequest) -> Iterator[Engine]:
    with SpeculationCache.open(None, embedder=HashEmbedder()) as cache:
        engine = engine_on(request.param, cache, draft_model=tiny_model("qwen3_next"))
        yield engine
        engine.close()


@pytest.mark.usefixtures("searches_at_once")
@pytest.mark.sampled(2)
def test_every_way_of_drafting_gives_the_plain_answer(engine: Engine) -> None:
    """Recall, prompt lookup and a hybrid as draft model, for concurrent requests of ragged lengths."""
    prompts = [PROMPT, PROMPT[:9], random_ids(1, 70)]
    sampling = SamplingParams(max_tokens=24)
    expected = [engine.submit(prompt, sampling, speculation=PLAIN).result().token_ids for prompt in prompts]
    for names in (("recall",), ("recall", "prompt", "draft-model")):
        for _ in range(2):
            asked = [
                engine.submit(prompt, sampling, speculation=SpeculationConfig(drafters=names), query="order")
                for prompt in prompts
            ]
            assert [each.result().token_ids for each in asked] == expected
    warm = engine.submit(PROMPT, sampling, speculation=SpeculationConfig(drafters=("recall",)), query="order").result()
    assert warm.stats.num_accepted_tokens > 10


@pytest.mark.parametrize("model_type", ["qwen3_next", "glm_moe_dsa", "jamba", "bamba", "mamba", "lfm2"])
@pytest.mark.sampled(3)
def test_the_first_layers_draft(model_type: str) -> None:
    """On states of their own; also where a configuration derives the kinds of its layers from their number."""
    with closing(engine_on(model_type, draft_model="first-layers:1")) as engine:
        sampling = SamplingParams(max_tokens=24)
        plain = engine.submit(PROMPT, sampling, speculation=PLAIN).result()
        drafted = engine.submit(PROMPT, sampling, speculation=SpeculationConfig(drafters=("draft-model",))).result()
    assert drafted.token_ids == plain.token_ids
    assert drafted.stats.num_draft_tokens > 0


@pytest.mark.parametrize("model_type", ["qwen3_next", "deepseek_v32"])
def test_a_prompts_beginning_is_kept_on_disk_with_its_states(model_type: str, tmp_path: Path) -> None:
    """A new engine reads the system prompt's keys, values, states or index keys back, and answers the same."""
    prompt, sampling = [*random_ids(5, 100), *PROMPT], SamplingParams(max_tokens=12)
    answers, cached = [], []
    for _ in range(2):
        with SpeculationCache.open(tmp_path / "c.db", embedder=HashEmbedder()) as cache:
            engine = engine_on(model_type, cache, keep_prefixes=True)
            result = engine.submit(prompt, sampling, prefix_tokens=100).result()
            engine.close()
        answers.append(result.token_ids)
        cached.append(result.cached_prompt_tokens)
    assert answers[0] == answers[1]
    assert cached == [0, 100]


@pytest.mark.parametrize(("model_type", "count"), [("recurrent_gemma", 1), ("zamba", 3)])
def test_first_layers_that_a_hybrid_cannot_have_are_refused(model_type: str, count: int) -> None:
    model = tiny_model(model_type)
    with pytest.raises(UnsupportedError, match=f"first layers of a {type(model).__name__} .*give a smaller model"):
        Engine.load(model, tokenizer=byte_tokenizer(), draft_model=f"first-layers:{count}")
