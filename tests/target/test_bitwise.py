"""`bitwise=True`: the same texts whatever is drafted, reused, or answered beside it.

By rows, as on CPUs, and in forwards of one size, as on GPUs: there on a CPU, with torch's own products and no graphs.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import closing
from dataclasses import replace
from functools import lru_cache
from typing import Any

import pytest
import torch
from helpers.bitwise_models import PLAIN, by_rows, go_without_kernels, model, one_size, tokens
from helpers.hybrids import prefilled
from helpers.packages import graph_settings

from precedent.cache import Completion, SpeculationCache
from precedent.config import EngineLimits, SamplingParams, SpeculationConfig
from precedent.engine.engine import Engine
from precedent.errors import ConfigError
from precedent.planning.costs import CostCurve
from precedent.target import TargetModel
from precedent.tree import EMPTY_TREE, ROOT, TreeBuilder
from precedent_testing.embedders import HashEmbedder
from precedent_testing.tiny_models import byte_tokenizer, tiny_causal_lm

GREEDY, SEEDED = SamplingParams(max_tokens=40), SamplingParams(max_tokens=40, temperature=0.8, seed=5)
WAYS = [pytest.param(None, id="rows", marks=by_rows), pytest.param(True, id="one size", marks=pytest.mark.exhaustive)]


@lru_cache
def made(way: Any) -> TargetModel:
    """Made once: its proof takes some seconds."""
    return TargetModel(model(), bitwise=True, cuda_graphs=way)


@pytest.fixture(params=WAYS)
def way(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Any:
    """Settings of a target, and around it what makes forwards of one size what they are on a GPU."""
    if request.param is None:
        return None
    go_without_kernels(monkeypatch)
    return one_size()


@pytest.fixture
def cache() -> Iterator[SpeculationCache]:
    with SpeculationCache.open(embedder=HashEmbedder()) as opened:
        yield opened


@pytest.fixture
def in_bfloat16(way: Any) -> TargetModel:
    return made(way)


def engine_on(cache: SpeculationCache, target: TargetModel | None = None, **settings: Any) -> Engine:
    draft = tiny_causal_lm("llama", dtype=torch.bfloat16, seed=9, num_hidden_layers=1)
    target = target or TargetModel(model(), bitwise=True)
    running = Engine(target, byte_tokenizer(), name="m", cache=cache, draft_model=draft, bitwise=True, **settings)
    running.planner.cost = CostCurve()
    return running


@pytest.mark.usefixtures("searches_at_once")
@pytest.mark.parametrize(
    "sampling", [pytest.param(GREEDY, id="greedy"), pytest.param(SEEDED, id="seeded", marks=pytest.mark.slow)]
)
def test_texts_are_the_same_off_cold_warm_adversarial_continued_and_together(
    cache: SpeculationCache, in_bfloat16: TargetModel, sampling: SamplingParams
) -> None:
    """Real drafts, a draft model, prefixes that were decoded instead of read, and neighbours in the same forward."""
    lengths = [50 + 40 * number for number in range(4)]
    if in_bfloat16.arena is not None:  # slow here: fewer, but their texts pass from a piece into the next
        lengths, sampling = [210, 242], replace(sampling, max_tokens=16)
    prompts = [tokens(length, seed=length) for length in lengths]
    with closing(engine_on(cache, in_bfloat16)) as alone:
        plain = [alone.submit(prompt, sampling, speculation=PLAIN).result() for prompt in prompts]
    expected = [one.token_ids for one in plain]
    longer = [prompt + list(ids) + [17, 18] for prompt, ids in zip(prompts, expected, strict=True)]
    with closing(engine_on(cache, in_bfloat16)) as alone:
        then = [alone.submit(prompt, sampling, speculation=PLAIN).result().token_ids for prompt in longer]
    with closing(engine_on(cache, in_bfloat16, limits=EngineLimits(prefill_tokens_per_round=37))) as engine:
        for ids in expected:  # answers that begin like the right one and go wrong
            wrong = tuple(token if place % 7 else 3 for place, token in enumerate(ids))
            cache.insert(Completion(wrong, engine.tokenizer_fingerprint, "another", query="order"))
        for _ in range(2):
            cold = [engine.submit(prompt, sampling, query="order").result() for prompt in prompts]
            assert [one.token_ids for one in cold] == expected
        remembered = max(one.stats.num_accepted_tokens for one in cold)
        assert remembered > sampling.max_tokens // 2, "the second time they are known"
        assert all(one.stats.as_dict()["bitwise"] for one in cold)
        continued = [engine.submit(prompt, sampling, query="order") for prompt in longer]
        beside = [engine.submit(prompt, sampling, speculation=PLAIN) for prompt in prompts]
        assert [one.result().token_ids for one in continued] == then
        assert continued[0].result().cached_prompt_tokens > len(prompts[0]), "what was decoded is reused"
        assert [one.result().token_ids for one in beside] == expected


@by_rows
def test_settings_that_would_break_the_promise_are_refused(cache: SpeculationCache) -> None:
    with closing(engine_on(cache)) as engine:
        with pytest.raises(ConfigError, match="sum is at most 63"):
            engine.submit([1], GREEDY, speculation=SpeculationConfig(max_nodes=60))
        with pytest.raises(ConfigError, match="changes answers on purpose"):
            engine.submit([1], SEEDED, speculation=SpeculationConfig(mode="lossy_typical"))
        free = engine.submit([1], SamplingParams(max_tokens=3, temperature=1.0)).result()
        assert not free.stats.bitwise, "without a seed there is no text to be the same"


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_on_cuda_a_tree_gives_the_bits_of_plain_decoding(dtype: torch.dtype) -> None:
    """With graphs and our kernels; prompts beyond a piece of keys and beyond a bucket."""
    chosen = tiny_causal_lm("llama", dtype=dtype, hidden_size=256, head_dim=64, max_position_embeddings=4096).cuda()
    target = TargetModel(chosen, bitwise=True, cuda_graphs=graph_settings(arena_tokens=16 * 1024))
    for length in (3, 250, 1020):
        prompt, path, builder, node = tokens(length, seed=length), tokens(12, seed=1), TreeBuilder(), ROOT
        whole, decoded = prefilled(target, prompt), prefilled(target, prompt[: length // 2])
        target.prefill(decoded, prompt)
        for token in path:
            builder.add_fixed(node, token + 1, "test")
            node = builder.add_fixed(node, token, "test")
        scored = target.score([(whole, builder.build())])[0]
        for place, token in enumerate(path):
            assert torch.equal(scored[2 * place], target.plain_step(decoded)[0])
            target.commit(decoded, EMPTY_TREE, (), token)
    assert len(target.runner.backends[0].graphs) >= 1
