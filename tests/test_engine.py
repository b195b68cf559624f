"""The engine: requests, streams, cancels, prefix reuse, write-back, and errors that stay where they belong."""

from __future__ import annotations

import asyncio
import gc
import threading
import weakref
from collections.abc import Iterator

import pytest
import torch

from precedent import config, verify
from precedent.cache import SpeculationCache
from precedent.config import SamplingParams, SpeculationConfig
from precedent.cost_curve import CostCurve
from precedent.engine import Engine, shared_engine
from precedent.errors import ConfigError, ContextOverflowError, GenerationError, PromptError, RequestCancelled
from precedent.testing.embedders import HashEmbedder
from precedent.testing.tiny_models import byte_tokenizer, tiny_causal_lm

PLAIN = SpeculationConfig(enabled=False, write_back=False)
PROMPT = list(b"look up order 17, then order 18, then order 19")


class FlatCost(CostCurve):
    """Every width costs the same: the planner's choices do not hang on the clock of a busy machine."""

    def observe(self, width: int, milliseconds: float) -> None:
        """Learn nothing."""


def make_engine(cache: SpeculationCache | None = None, **settings: object) -> Engine:
    """An engine on a tiny float64 model, for which width is free."""
    engine = Engine.load(tiny_causal_lm("llama", seed=21), tokenizer=byte_tokenizer(), cache=cache, **settings)
    engine.planner.cost = FlatCost()
    return engine


@pytest.fixture(scope="module")
def engine() -> Iterator[Engine]:
    """An engine with a cache in memory and a draft model."""
    cache = SpeculationCache.open(None, embedder=HashEmbedder())
    running = make_engine(cache, draft_model=tiny_causal_lm("llama", seed=22, num_hidden_layers=1))
    yield running
    running.close()
    cache.close()


def test_every_way_of_drafting_gives_the_plain_answer(engine: Engine) -> None:
    """Greedy, float64: recall cold and warm, prompt lookup, the draft model and all together change nothing."""
    sampling = SamplingParams(max_tokens=48)
    expected = engine.submit(PROMPT, sampling, speculation=PLAIN).result()
    for names in (("recall",), ("prompt",), ("draft-model",), ("recall", "prompt", "draft-model")):
        for _ in range(2):
            got = engine.submit(PROMPT, sampling, speculation=SpeculationConfig(drafters=names), query="order").result()
            assert got.token_ids == expected.token_ids
            assert got.text == expected.text


def test_a_repeated_request_is_recalled_in_few_steps() -> None:
    """After write-back the same request takes far fewer target forwards, and the tokens are credited to recall."""
    with SpeculationCache.open(None, embedder=HashEmbedder()) as cache:
        running, sampling = make_engine(cache), SamplingParams(max_tokens=60)
        cold = running.submit(PROMPT, sampling, query="order 17").result()
        warm = running.submit(PROMPT, sampling, query="order 17").result()
        running.close()
    assert warm.token_ids == cold.token_ids
    assert warm.stats.num_steps <= 10
    assert warm.stats.accepted_by_source["recall"] > 30
    assert warm.sources.count("target") + warm.stats.num_accepted_tokens == len(warm.token_ids)


def test_tenants_do_not_recall_each_other() -> None:
    """The same request of another tenant finds nothing."""
    with SpeculationCache.open(None, embedder=HashEmbedder()) as cache:
        running, sampling = make_engine(cache), SamplingParams(max_tokens=40)
        only = SpeculationConfig(drafters=("recall",))
        running.submit(PROMPT, sampling, speculation=only, tenant="a", query="q").result()
        other = running.submit(PROMPT, sampling, speculation=only, tenant="b", query="q").result()
        same = running.submit(PROMPT, sampling, speculation=only, tenant="a", query="q").result()
        running.close()
    assert other.stats.num_draft_tokens == 0
    assert same.stats.num_accepted_tokens > 0


def test_emissions_add_up_to_the_result(engine: Engine) -> None:
    """Text, ids and sources of a stream are those of the result."""
    generation = engine.submit(PROMPT, SamplingParams(max_tokens=30), query="order")
    emissions = list(generation)
    result = generation.result()
    assert "".join(e.text for e in emissions) == result.text
    assert tuple(token for e in emissions for token in e.token_ids) == result.token_ids
    assert tuple(source for e in emissions for source in e.sources) == result.sources


def test_async_iteration_gives_the_same(engine: Engine) -> None:
    """`async for` reads the same emissions, several requests at once."""

    async def ask(number: int) -> tuple[str, str]:
        generation = engine.submit([*PROMPT, number], SamplingParams(max_tokens=20), speculation=PLAIN)
        return "".join([emission.text async for emission in generation]), generation.result().text

    async def ask_all() -> list[tuple[str, str]]:
        return await asyncio.gather(*(ask(number) for number in range(5)))

    for streamed, whole in asyncio.run(ask_all()):
        assert streamed == whole


def test_leaving_a_stream_cancels_its_request_and_frees_the_engine(engine: Engine) -> None:
    """After a break at any position the request is over and the next one is right."""
    sampling = SamplingParams(max_tokens=400)
    expected = engine.submit(PROMPT, SamplingParams(max_tokens=5), speculation=PLAIN).result().token_ids
    for position in range(4):
        generation = engine.submit(PROMPT, sampling, speculation=PLAIN)
        for number, _ in enumerate(generation):
            if number == position:
                break
        with pytest.raises(RequestCancelled):
            generation.result()
        again = engine.submit(PROMPT, SamplingParams(max_tokens=5), speculation=PLAIN).result()
        assert again.token_ids == expected


def test_a_cancelled_request_is_not_stored() -> None:
    """Write-back happens at a normal end only."""
    with SpeculationCache.open(None, embedder=HashEmbedder()) as cache:
        running = make_engine(cache)
        generation = running.submit(PROMPT, SamplingParams(max_tokens=500), query="q")
        next(iter(generation))
        generation.cancel()
        with pytest.raises(RequestCancelled):
            generation.result()
        assert cache.since("default", running.tokenizer_fingerprint) == []
        running.submit(PROMPT, SamplingParams(max_tokens=3), query="q").result()
        assert len(cache.since("default", running.tokenizer_fingerprint)) == 1
        running.close()


def test_concurrent_requests_equal_single_ones(engine: Engine) -> None:
    """Requests of several threads share steps and do not disturb each other."""
    prompts = [[*PROMPT, 65 + number] for number in range(6)]
    sampling = SamplingParams(max_tokens=20)
    expected = [engine.submit(p, sampling, speculation=PLAIN).result().token_ids for p in prompts]
    got: dict[int, tuple[int, ...]] = {}

    def ask(number: int) -> None:
        got[number] = engine.submit(prompts[number], sampling, query="order").result().token_ids

    threads = [threading.Thread(target=ask, args=(number,)) for number in range(len(prompts))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert [got[number] for number in range(len(prompts))] == expected


def test_the_next_turn_of_a_conversation_prefills_only_what_is_new() -> None:
    """Prompt and answer of the turn before are in the KV cache, whatever else was asked in between."""
    running = make_engine()
    first = running.submit(PROMPT, SamplingParams(max_tokens=10), speculation=PLAIN).result()
    running.submit([*PROMPT[:12], 1, 2, 3] * 3, SamplingParams(max_tokens=5), speculation=PLAIN).result()
    following = [*PROMPT, *first.token_ids, 70, 71, 72]
    second = running.submit(following, SamplingParams(max_tokens=10), speculation=PLAIN).result()
    fresh = make_engine()
    expected = fresh.submit(following, SamplingParams(max_tokens=10), speculation=PLAIN).result()
    running.close()
    fresh.close()
    assert second.cached_prompt_tokens >= len(PROMPT) + 9
    assert second.token_ids == expected.token_ids


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
    with pytest.raises(ConfigError, match="did you mean 'recall'"):
        engine.submit(PROMPT, sampled, speculation=SpeculationConfig(drafters=("recal",)))
    with pytest.raises(ConfigError, match=r"temperature=0\.7"):
        engine.submit(PROMPT, sampled, speculation=SpeculationConfig(mode="greedy"))
    seeded = SamplingParams(temperature=0.7, seed=1)
    with pytest.raises(ConfigError, match="drop the seed"):
        engine.submit(PROMPT, seeded, speculation=SpeculationConfig(mode="traversal"))
    with pytest.raises(ConfigError, match="needs a seed"):
        engine.submit(PROMPT, sampled, speculation=SpeculationConfig(mode="coupled"))


def test_a_seed_fixes_the_text_whatever_the_cache_holds() -> None:
    """Cold, warm and without speculation: byte-identical (float64)."""
    sampling = SamplingParams(temperature=1.0, seed=5, max_tokens=40)
    with SpeculationCache.open(None, embedder=HashEmbedder()) as cache:
        running = make_engine(cache, draft_model="first-layers:2")
        texts = {running.submit(PROMPT, sampling, speculation=PLAIN).result().text}
        for _ in range(3):
            texts.add(running.submit(PROMPT, sampling, query="order").result().text)
        running.close()
    assert len(texts) == 1


def test_a_lossy_mode_says_so_and_how_much_it_spent(engine: Engine) -> None:
    """Opt-in by name; the statistics carry the total variation, and every other mode spends nothing."""
    sampling = SamplingParams(temperature=1.0, max_tokens=30)
    lossy = SpeculationConfig(drafters=("draft-model",), mode="lossy_mentored:kl=0.5")
    spent = engine.submit(PROMPT, sampling, speculation=lossy).result().stats
    exact = engine.submit(PROMPT, sampling, query="order").result().stats
    assert spent.as_dict()["lossless"] is False
    assert float(spent.as_dict()["spent_total_variation"]) == pytest.approx(spent.spent_tv, abs=1e-6)
    assert exact.as_dict()["lossless"] is True
    assert exact.spent_tv == 0.0
    with pytest.raises(ConfigError, match="no parameter 'kk'"):
        engine.submit(PROMPT, sampling, speculation=SpeculationConfig(mode="lossy_mentored:kk=1"))


def test_settings_and_verifiers_know_the_same_modes() -> None:
    """A mode that can be asked for can be verified."""
    assert set(config.MODES) - {"auto"} == set(verify.MODES)
    assert set(config.LOSSY_MODES) == set(verify.LOSSY_MODES)


def test_logits_that_are_nan_fail_the_request_and_not_the_engine() -> None:
    """The error names the position; the next request is served."""
    model = tiny_causal_lm("llama", seed=23)
    running = Engine.load(model, tokenizer=byte_tokenizer())
    head = model.get_output_embeddings().weight
    healthy = head.detach().clone()
    with torch.no_grad():
        head.fill_(torch.nan)
    with pytest.raises(GenerationError, match="output position 0"):
        running.submit(PROMPT, SamplingParams(max_tokens=4)).result()
    with torch.no_grad():
        head.copy_(healthy)
    assert running.submit(PROMPT, SamplingParams(max_tokens=4)).result().finish_reason == "length"
    running.close()


def test_padded_output_rows_are_never_emitted() -> None:
    """A head with more rows than the tokenizer has tokens: the padding is masked."""
    running = Engine.load(tiny_causal_lm("llama", vocab_size=400), tokenizer=byte_tokenizer())
    sampled = running.submit(PROMPT, SamplingParams(temperature=3.0, max_tokens=200)).result()
    running.close()
    assert max(sampled.token_ids) < len(byte_tokenizer())


def test_a_failing_cache_never_fails_an_answer(caplog: pytest.LogCaptureFixture) -> None:
    """Write-back errors are logged; the caller gets the answer."""
    cache = SpeculationCache.open(None, embedder=HashEmbedder())
    running = make_engine(cache)
    cache.insert = None  # type: ignore[assignment, method-assign]  # a cache that cannot store
    result = running.submit(PROMPT, SamplingParams(max_tokens=4), query="q").result()
    running.close()
    assert len(result.token_ids) == 4
    assert "was not stored" in caplog.text


def test_equal_settings_share_one_engine_which_ends_with_its_last_user() -> None:
    """The registry loads weights once and holds nobody alive."""
    model, tokenizer = tiny_causal_lm("llama"), byte_tokenizer()
    first = shared_engine(model, tokenizer=tokenizer)
    assert shared_engine(model, tokenizer=tokenizer) is first
    assert shared_engine(model, tokenizer=tokenizer, draft_model="first-layers:1") is not first
    worker, gone = first._worker, weakref.ref(first)
    del first
    gc.collect()
    assert gone() is None
    worker._thread.join(timeout=10)
    assert not worker._thread.is_alive()


def test_closing_the_engine_cancels_what_is_running() -> None:
    """Nobody waits for ever on a closed engine."""
    running = make_engine()
    generations = [running.submit(PROMPT, SamplingParams(max_tokens=900), speculation=PLAIN) for _ in range(4)]
    next(iter(generations[-1]))
    running.close()
    for generation in generations:
        assert generation.done
        with pytest.raises(RequestCancelled):
            generation.result()
