"""Where an answer ends, and which requests are refused at once or wait for memory."""

from __future__ import annotations

import pytest
from helpers.small_engines import PLAIN, PROMPT, make_engine, poison

from precedent.cache import SpeculationCache
from precedent.config import EngineLimits, SamplingParams, SpeculationConfig
from precedent.engine.engine import Engine
from precedent.engine.generation import Generation
from precedent.errors import CapacityError, ConfigError, ContextOverflowError, PromptError
from precedent_testing.embedders import HashEmbedder
from precedent_testing.tiny_models import tiny_causal_lm


def test_a_stop_string_ends_the_answer_before_itself(engine: Engine) -> None:
    """The text is the plain text up to the stop string; the finish reason says so."""
    plain = engine.submit(PROMPT, SamplingParams(max_tokens=40), speculation=PLAIN).result()
    stop = plain.text[10:13]
    cut = engine.submit(PROMPT, SamplingParams(max_tokens=40, stop=(stop,)), query="order").result()
    assert cut.text == plain.text[: plain.text.index(stop)]
    assert cut.finish_reason == "stop"
    assert plain.token_ids[: len(cut.token_ids)] == cut.token_ids


@pytest.mark.parametrize("length", [1, 2, 7])
def test_max_tokens_is_exact_under_speculation(engine: Engine, length: int) -> None:
    """A long accepted path is cut at the limit."""
    for _ in range(2):
        result = engine.submit(PROMPT, SamplingParams(max_tokens=length), query="order").result()
        assert len(result.token_ids) == length
        assert result.finish_reason == "length"


def test_the_context_ends_the_answer(engine: Engine) -> None:
    """Prompt and answer never exceed the model's context; a prompt that fills it is refused before any work."""
    prompt = [65] * (engine.context_length - 3)
    assert len(engine.submit(prompt, SamplingParams(max_tokens=50)).result().token_ids) == 3
    with pytest.raises(ContextOverflowError, match="shorten"):
        engine.submit([65] * engine.context_length, SamplingParams())


def test_bad_requests_are_refused_at_once(engine: Engine) -> None:
    """Each with one line that says what to do."""
    sampled = SamplingParams(temperature=0.7)
    with pytest.raises(PromptError, match="at least one token"):
        engine.submit([], SamplingParams())
    with pytest.raises(ConfigError, match="no drafter is called 'recal'"):
        engine.submit(PROMPT, sampled, speculation=SpeculationConfig(drafters=("recal",)))
    with pytest.raises(ConfigError, match=r"temperature=0\.7"):
        engine.submit(PROMPT, sampled, speculation=SpeculationConfig(mode="greedy"))
    seeded = SamplingParams(temperature=0.7, seed=1)
    with pytest.raises(ConfigError, match="drop the seed"):
        engine.submit(PROMPT, seeded, speculation=SpeculationConfig(mode="traversal"))
    with pytest.raises(ConfigError, match="needs a seed"):
        engine.submit(PROMPT, sampled, speculation=SpeculationConfig(mode="coupled"))


def test_a_long_prompt_leaves_the_streams_of_others_running(monkeypatch: pytest.MonkeyPatch) -> None:
    """Between the submission of a prompt of many pieces and its first token, a stream goes on, piece by piece."""
    emitted, put = [], Generation.put
    monkeypatch.setattr(Generation, "put", lambda self, emission: (emitted.append(self), put(self, emission)))
    running = make_engine(limits=EngineLimits(prefill_tokens_per_round=40))
    streaming = running.submit(PROMPT, SamplingParams(max_tokens=900), speculation=PLAIN)
    stream = iter(streaming)
    next(stream)
    long = running.submit([65 + i % 60 for i in range(801)], SamplingParams(max_tokens=2), speculation=PLAIN)
    already = len(emitted)
    long.result()
    between = emitted[already : emitted.index(long)]
    stream.close()
    running.close()
    assert len(between) >= 18, "a prompt of 20 pieces leaves room for about 20 steps"
    assert set(map(id, between)) == {id(streaming)}


def test_requests_beyond_the_memory_wait_and_all_finish() -> None:
    """Room for two: ten requests at once, each with its single-run answer; one that can never fit is refused."""
    plain = make_engine()
    prompts = [[*PROMPT, 65 + number] for number in range(10)]
    expected = [plain.submit(p, SamplingParams(max_tokens=10), speculation=PLAIN).result().token_ids for p in prompts]
    each = plain.target.kv_bytes(len(prompts[0]) + 10 + 39)
    plain.close()
    with SpeculationCache.open(None, embedder=HashEmbedder()) as cache:
        tight = make_engine(cache, limits=EngineLimits(max_kv_bytes=2 * each))
        poison(cache, tight, expected[0])
        generations = [tight.submit(p, SamplingParams(max_tokens=10), query="order") for p in prompts]
        with pytest.raises(CapacityError, match=r"MiB.*300 prompt tokens, max_tokens=600.*MiB.*raise max_kv_bytes"):
            tight.submit([65] * 300, SamplingParams(max_tokens=600))
        assert [generation.result().token_ids for generation in generations] == expected
        assert tight.metrics().kv_cache_reserved_bytes == 0
        tight.close()


def test_the_memory_of_a_draft_model_is_set_aside_too() -> None:
    """Its keys and values count for requests that draw from it, and for no others."""
    draft = tiny_causal_lm(seed=9, num_hidden_layers=1)
    running = make_engine(draft_model=draft, limits=EngineLimits(max_kv_bytes=10**9))
    alone = running._kv_bytes(100, 100, SpeculationConfig(), {})
    drawing = running._kv_bytes(100, 100, SpeculationConfig(), running._drafters_named(["draft-model"]))
    running.close()
    assert alone == running.target.kv_bytes(201)
    assert drawing > running.target.kv_bytes(239)
