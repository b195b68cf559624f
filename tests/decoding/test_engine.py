"""The engine: requests, streams, cancels, prefix reuse, write-back, and errors that stay where they belong."""

from __future__ import annotations

import asyncio
import gc
import subprocess
import sys
import threading
import weakref
from collections.abc import Iterator, Sequence
from contextlib import closing
from itertools import count

import pytest
import torch

from precedent.cache import NewCompletion, SpeculationCache
from precedent.config import EngineLimits, SamplingParams, SpeculationConfig
from precedent.engine.engine import Engine
from precedent.engine.generation import Generation
from precedent.engine.shared import shared_engine
from precedent.errors import (
    CacheError,
    CapacityError,
    ConfigError,
    ContextOverflowError,
    EngineClosedError,
    GenerationError,
    PromptError,
    RequestCancelled,
)
from precedent.planning.costs import CostCurve
from precedent.target import Slot
from precedent.testing.drafters import OracleDrafter
from precedent.testing.embedders import HashEmbedder
from precedent.testing.tiny_models import byte_tokenizer, tiny_causal_lm
from precedent.tree import CandidateTree

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


def poison(cache: SpeculationCache, engine: Engine, answer: tuple[int, ...], query: str = "order") -> None:
    """Completions that begin like the answer and then go wrong: other tokens, padding, tokens that do not exist."""
    for cut, wrong in ((1, 65), (3, 7), (5, 258), (7, 399), (9, 2**31 - 1), (11, 66)):
        tokens = (*answer[:cut], wrong, *answer[cut + 1 :])
        cache.insert(
            NewCompletion(token_ids=tokens, tokenizer=engine.tokenizer_fingerprint, model="another", query=query)
        )


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


@pytest.mark.usefixtures("searches_at_once")
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


def test_a_stream_cancelled_at_any_token_leaves_a_sound_engine() -> None:
    """The next answers are those of a fresh engine, and memory, slots and threads are what they were before."""
    sampling, after = SamplingParams(max_tokens=16), SamplingParams(max_tokens=12)
    fresh = make_engine()
    expected = fresh.submit(PROMPT, sampling, speculation=PLAIN).result().token_ids
    fresh.close()
    drafted = SpeculationConfig(drafters=("recall", "prompt"), write_back=False)
    with SpeculationCache.open(None, embedder=HashEmbedder()) as cache:
        running = make_engine(cache)
        poison(cache, running, expected)
        threads: set[str] = set()
        for position in range(17):
            generation, taken = running.submit(PROMPT, sampling, speculation=drafted, query="order"), list[int]()
            if position:
                for emission in generation:
                    taken += emission.token_ids
                    if len(taken) >= position:
                        break
            generation.cancel()
            assert tuple(taken) == expected[: len(taken)]
            again = running.submit(PROMPT, after, speculation=drafted, query="order").result()
            assert again.token_ids == expected[:12]
            _wait_until_over(generation)
            now = running.metrics()
            assert (now.num_requests_running, now.num_requests_waiting, now.kv_cache_reserved_bytes) == (0, 0, 0)
            threads = threads or {thread.name for thread in threading.enumerate()}
            assert {thread.name for thread in threading.enumerate()} <= threads
        assert now.num_draft_tokens > 0
        running.close()


def _wait_until_over(generation: Generation) -> None:
    """A cancelled request may also have been finished already."""
    try:
        generation.result()
    except RequestCancelled:
        return


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


def test_what_is_kept_of_a_conversation_does_not_depend_on_what_was_drafted() -> None:
    """An accepted path may hold the end token itself; plain decoding never computes its keys, so they are not kept."""
    model = tiny_causal_lm("llama", seed=21)
    with closing(Engine.load(model, tokenizer=byte_tokenizer())) as engine:
        answer = engine.submit(PROMPT, SamplingParams(max_tokens=12), speculation=PLAIN).result().token_ids
    end = answer.index(answer[-1])
    model.generation_config.eos_token_id = answer[end]
    kept = []
    for speculation in (PLAIN, SpeculationConfig(drafters=("oracle",))):
        with closing(Engine.load(model, tokenizer=byte_tokenizer())) as engine:
            engine.planner.cost = FlatCost()
            engine.add_drafter(OracleDrafter([*answer[: end + 1], 65, 66]))
            result = engine.submit(PROMPT, SamplingParams(max_tokens=40), speculation=speculation).result()
            assert (result.finish_reason, result.token_ids) == ("stop", answer[: end + 1])
            assert (result.stats.num_accepted_tokens == end + 1) == (speculation is not PLAIN)
            kept.append(engine.admission._pool.acquire("default", [*PROMPT, *answer, 1]).token_ids)
    assert kept == [[*PROMPT, *answer[:end]]] * 2


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


def test_broken_logits_inside_a_drafted_answer_are_named_by_their_position(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever was proposed behind them, and however many tokens a step accepts: the first broken row is the error."""
    with SpeculationCache.open(None, embedder=HashEmbedder()) as cache:
        running, sampling = make_engine(cache), SamplingParams(max_tokens=20)
        running.submit(PROMPT, sampling, query="order").result()
        score, broken_at = running.target.score, 9

        def broken_score(batch: Sequence[tuple[Slot, CandidateTree]]) -> list[torch.Tensor]:
            scored = [logits.clone() for logits in score(batch)]
            for (slot, tree), logits in zip(batch, scored, strict=True):
                first = len(slot.token_ids) + 1 - len(PROMPT)
                for row, depth in enumerate((0, *tree.depths.tolist())):
                    logits[row, 3] = torch.nan if first + depth == broken_at else logits[row, 3]
            return scored

        monkeypatch.setattr(running.target, "score", broken_score)
        for speculation in (PLAIN, SpeculationConfig(drafters=("recall",))):
            generation = running.submit(PROMPT, sampling, speculation=speculation, query="order")
            with pytest.raises(GenerationError, match=f"output position {broken_at} hold NaN"):
                generation.result()
        assert running.metrics().num_draft_tokens > 0
        running.close()


def test_a_draft_model_whose_law_is_nan_is_an_error_and_bends_no_answer() -> None:
    """Sampling compares with the law that was drawn from; a proposal by argmax needs none, and is only useless."""
    draft = tiny_causal_lm("llama", seed=22, num_hidden_layers=1)
    with torch.no_grad():
        draft.get_output_embeddings().weight[7] = torch.nan
    running, only = make_engine(draft_model=draft), SpeculationConfig(drafters=("draft-model",))
    with pytest.raises(GenerationError, match="draft model's probabilities hold NaN"):
        running.submit(PROMPT, SamplingParams(temperature=1.0, max_tokens=9), speculation=only).result()
    greedy = running.submit(PROMPT, SamplingParams(max_tokens=9), speculation=only).result()
    plain = running.submit(PROMPT, SamplingParams(max_tokens=9), speculation=PLAIN).result()
    running.close()
    assert greedy.token_ids == plain.token_ids


@pytest.mark.parametrize("temperature", [0.0, 3.0])
def test_padded_output_rows_are_never_emitted(temperature: float) -> None:
    """A head with more rows than the tokenizer has tokens, which the model loves: masked, also where it is proposed."""
    model, sampling = tiny_causal_lm("llama", vocab_size=400), SamplingParams(temperature=temperature, max_tokens=60)
    with torch.no_grad():
        head = model.get_output_embeddings().weight
        head[259:] = 3.0 * head[:141]
    with SpeculationCache.open(None, embedder=HashEmbedder()) as cache:
        running = Engine.load(model, tokenizer=byte_tokenizer(), cache=cache)
        running.planner.cost = FlatCost()
        answer = running.submit(PROMPT, sampling, speculation=PLAIN).result().token_ids
        poison(cache, running, answer)
        for _ in range(3):
            answer = running.submit(PROMPT, sampling, query="order").result().token_ids
            assert max(answer) < len(byte_tokenizer())
        running.close()


def test_a_failing_cache_never_fails_an_answer(caplog: pytest.LogCaptureFixture) -> None:
    """Write-back errors are logged; the caller gets the answer."""
    cache = SpeculationCache.open(None, embedder=HashEmbedder())
    running = make_engine(cache)

    def refuse(completion: NewCompletion) -> int:
        raise CacheError("the disk is full")

    cache.insert = refuse  # type: ignore[method-assign]
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


def test_a_slow_reader_holds_nobody(engine: Engine) -> None:
    """A stream that nobody reads is written to its end, beside one that is read."""
    unread = engine.submit(PROMPT, SamplingParams(max_tokens=40), query="order")
    assert len(engine.submit(PROMPT, SamplingParams(max_tokens=5), query="order").result().token_ids) == 5
    expected = unread.result()
    assert tuple(token for emission in unread for token in emission.token_ids) == expected.token_ids


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


def test_sixteen_asynchronous_streams_some_of_them_cancelled(engine: Engine) -> None:
    """Every stream that is read to its end has its single-run answer; the others are gone when their task is."""
    sampling = SamplingParams(max_tokens=24)
    prompts = [[*PROMPT, 65 + number] for number in range(16)]
    expected = [engine.submit(p, sampling, speculation=PLAIN).result().token_ids for p in prompts]

    async def read(number: int) -> tuple[int, ...]:
        generation, tokens = engine.submit(prompts[number], sampling, query="order"), list[int]()
        async for emission in generation:
            tokens += emission.token_ids
        return tuple(tokens)

    async def read_all() -> list[tuple[int, ...] | BaseException]:
        tasks = [asyncio.create_task(read(number)) for number in range(16)]
        for number, task in enumerate(tasks):
            if number % 3 == 1:
                await asyncio.sleep(0.002 * number)
                task.cancel()
        return await asyncio.wait_for(asyncio.gather(*tasks, return_exceptions=True), timeout=120)

    got = asyncio.run(read_all())
    for number, tokens in enumerate(got):
        assert tokens == expected[number] or (number % 3 == 1 and isinstance(tokens, asyncio.CancelledError))
    assert engine.submit(PROMPT, SamplingParams(max_tokens=1)).result().finish_reason == "length"
    assert engine.metrics().num_requests_running == 0


def test_an_error_reaches_an_asynchronous_reader() -> None:
    """A request that fails between two looks of its reader is raised, not taken for its end."""

    async def read() -> None:
        generation = Generation()
        reader = aiter(generation)
        waiting = asyncio.ensure_future(anext(reader))
        await asyncio.sleep(0)
        generation.fail(GenerationError("broken"))
        await waiting

    with pytest.raises(GenerationError, match="broken"):
        asyncio.run(read())


def test_an_emission_that_comes_with_the_end_is_not_lost() -> None:
    """The worker may write the last emission and the end after the reader found nothing and before it asks for more."""

    class Late(Generation):
        """Finds nothing the first time, while the request is ending."""

        asked = count()

        def _take(self) -> object:
            if next(self.asked) == 0:
                self.put("last")  # type: ignore[arg-type]
                self.finish("result")  # type: ignore[arg-type]
                return None
            return super()._take()

    async def read() -> list[object]:
        return [emission async for emission in Late()]

    assert asyncio.run(asyncio.wait_for(read(), timeout=20)) == ["last"]


def test_closing_the_engine_cancels_what_is_running() -> None:
    """Nobody waits for ever on a closed engine, also not behind those that run; closing it again is harmless."""
    running = make_engine(limits=EngineLimits(max_running=2))
    generations = [running.submit(PROMPT, SamplingParams(max_tokens=900), speculation=PLAIN) for _ in range(6)]
    next(iter(generations[0]))
    for _ in range(2):
        running.close()
    for generation in generations[1:]:
        assert generation.done
        with pytest.raises(RequestCancelled, match="engine was closed"):
            generation.result()
    with pytest.raises(EngineClosedError, match="closed"):
        running.submit(PROMPT, SamplingParams())
    assert running.metrics().num_requests_running == 0


def test_many_threads_may_submit_while_the_engine_is_closed() -> None:
    """Each request is refused or failed; none is forgotten in between."""
    running, ends = make_engine(), list[str]()

    def ask() -> None:
        try:
            while True:
                running.submit(PROMPT, SamplingParams(max_tokens=3), speculation=PLAIN).result()
        except (RequestCancelled, EngineClosedError) as error:
            ends.append(type(error).__name__)

    threads = [threading.Thread(target=ask, daemon=True) for _ in range(8)]
    for thread in threads:
        thread.start()
    running.submit(PROMPT, SamplingParams(max_tokens=30), speculation=PLAIN).result()
    running.close()
    for thread in threads:
        thread.join(timeout=60)
    assert len(ends) == len(threads), "somebody still waits on a closed engine"


def test_an_engine_may_be_closed_by_its_own_threads() -> None:
    """In `on_result`, which runs on a thread of the engine's, `close` cannot wait for that very thread."""
    holder: list[Engine] = []
    running = Engine(
        tiny_causal_lm("llama"),
        byte_tokenizer(),
        name="closes itself",
        cost=FlatCost(),
        on_result=lambda prompt, result: holder[0].close(),
    )
    holder.append(running)
    assert running.submit(PROMPT, SamplingParams(max_tokens=3)).result().finish_reason == "length"
    running._worker._thread.join(timeout=60)
    assert not running._worker._thread.is_alive()
    running.close()


def test_an_engine_may_be_dropped_on_its_own_thread() -> None:
    """The garbage collector runs anywhere, also inside a step: the worker ends and does not wait for itself."""
    running = make_engine()
    worker, holder = running._worker, [running]
    streaming = running.submit(PROMPT, SamplingParams(max_tokens=900), speculation=PLAIN)
    del running

    def drop(*args: object) -> None:
        holder.clear()
        gc.collect()

    worker._scheduler.planner.observe_forward = drop  # type: ignore[method-assign]
    with pytest.raises(RequestCancelled):
        streaming.result()
    worker._thread.join(timeout=60)
    assert not worker._thread.is_alive()


def test_a_worker_that_breaks_leaves_nobody_waiting(caplog: pytest.LogCaptureFixture) -> None:
    """An error that no request can be blamed for: all of them are told, and the engine is closed."""
    running = make_engine(limits=EngineLimits(max_running=1))
    generations = [running.submit(PROMPT, SamplingParams(max_tokens=900), speculation=PLAIN) for _ in range(3)]
    running._worker._scheduler.admission.admits = None  # type: ignore[assignment, method-assign]
    for generation in generations[1:]:
        with pytest.raises(GenerationError, match="closed now"):
            generation.result()
    with pytest.raises(EngineClosedError):
        running.submit(PROMPT, SamplingParams())
    running.close()
    assert "the worker of an engine failed" in caplog.text


def test_the_interpreter_ends_with_requests_running() -> None:
    """Nobody closed the engine, one stream is read by a thread that nobody joins, another by no one."""
    script = """
import threading
from precedent.config import SamplingParams
from precedent.engine.engine import Engine
from precedent.errors import RequestCancelled
from precedent.testing.tiny_models import byte_tokenizer, tiny_causal_lm
engine = Engine.load(tiny_causal_lm("llama"), tokenizer=byte_tokenizer())
unread = engine.submit([65] * 20, SamplingParams(max_tokens=1000))
streams = [engine.submit([65] * 20, SamplingParams(max_tokens=1000)) for _ in range(2)]
def read():
    try:
        list(streams[0])
    except RequestCancelled:
        pass
def ask():
    print(len(engine.submit([66], SamplingParams(max_tokens=9)).result().token_ids))
threading.Thread(target=read, daemon=True).start()
threading.Thread(target=ask).start()
print(next(iter(streams[1])).token_ids[0] >= 0)
"""
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=120, check=False)
    assert (done.returncode, sorted(done.stdout.split())) == (0, ["9", "True"]), done.stderr
    assert "Traceback" not in done.stderr
