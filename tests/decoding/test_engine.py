"""The engine: its answers, its streams, and its end. Nothing that is drafted, kept or asked beside changes a token."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Iterator, Sequence
from contextlib import closing
from typing import Any

import pytest
import torch
from helpers.forked import run
from helpers.small_engines import PLAIN, PROMPT, make_engine, poison

from precedent.cache import SpeculationCache
from precedent.config import EngineLimits, PromptScores, SamplingParams, SpeculationConfig
from precedent.decoding.sequence import Emission
from precedent.engine.engine import Engine
from precedent.engine.generation import Generation
from precedent.errors import CapacityError, ContextOverflowError, EngineClosedError, GenerationError, RequestCancelled
from precedent.grammar import Regex
from precedent.planning.costs import CostCurve
from precedent.runtime.fence import Fences
from precedent.target import Slot
from precedent.tree import CandidateTree
from precedent_testing.drafters import OracleDrafter
from precedent_testing.embedders import HashEmbedder
from precedent_testing.tiny_models import byte_tokenizer, tiny_causal_lm

# Answers


@pytest.fixture
def recalling() -> Iterator[Engine]:
    """An engine with an empty cache of its own and no draft model."""
    with SpeculationCache.open(None, embedder=HashEmbedder()) as cache, closing(make_engine(cache)) as running:
        yield running


@pytest.mark.usefixtures("searches_at_once")
def test_a_repeated_request_is_recalled_in_few_steps_by_its_own_tenant(recalling: Engine) -> None:
    sampling, only = SamplingParams(max_tokens=60), SpeculationConfig(drafters=("recall",))
    cold, other, warm = (
        recalling.submit(PROMPT, sampling, speculation=only, query="order 17", tenant=tenant).result()
        for tenant in ("a", "b", "a")
    )
    assert warm.token_ids == cold.token_ids
    assert other.stats.num_draft_tokens == 0
    assert warm.stats.num_steps <= 10
    assert warm.stats.accepted_by_source["recall"] > 30
    assert warm.sources.count("target") + warm.stats.num_accepted_tokens == len(warm.token_ids)


@pytest.mark.usefixtures("searches_at_once")
def test_what_a_tenants_drafts_taught_is_its_own_and_goes_with_anything_forgotten(recalling: Engine) -> None:
    for _ in range(2):
        recalling.submit(PROMPT, SamplingParams(max_tokens=40), query="order 17", tenant="a").result()
    learned = recalling.planner.calibrations
    assert learned.of("a").seen.sum() > 10
    assert learned.of("b").seen.sum() == 0
    assert recalling.cache is not None
    recalling.cache.forget(ids=[99])
    assert learned.of("a").seen.sum() == 0


def test_the_next_turn_of_a_conversation_prefills_only_what_is_new() -> None:
    """Prompt and answer of the turn before are in the KV cache, whatever else was asked in between."""
    with closing(make_engine()) as running, closing(make_engine()) as fresh:
        first = running.submit(PROMPT, SamplingParams(max_tokens=10), speculation=PLAIN).result()
        running.submit([*PROMPT[:12], 1, 2, 3] * 3, SamplingParams(max_tokens=5), speculation=PLAIN).result()
        following = [*PROMPT, *first.token_ids, 70, 71, 72]
        second, expected = (
            engine.submit(following, SamplingParams(max_tokens=10), speculation=PLAIN).result()
            for engine in (running, fresh)
        )
    assert second.cached_prompt_tokens >= len(PROMPT) + 9
    assert second.token_ids == expected.token_ids


def test_what_is_kept_of_a_conversation_does_not_depend_on_what_was_drafted() -> None:
    """An accepted path may hold the end token itself; plain decoding never computes its keys, so they are not kept."""
    model = tiny_causal_lm("llama", seed=21)
    with closing(Engine.load(model, tokenizer=byte_tokenizer())) as engine:
        answer = engine.submit(PROMPT, SamplingParams(max_tokens=12), speculation=PLAIN).result().token_ids
    end = answer.index(answer[-1])
    model.generation_config.eos_token_id = answer[end]
    for speculation in (PLAIN, SpeculationConfig(drafters=("oracle",))):
        with closing(Engine(model, byte_tokenizer(), name="tiny", cost=CostCurve())) as engine:
            engine.add_drafter(OracleDrafter([*answer[: end + 1], 65, 66]))
            result = engine.submit(PROMPT, SamplingParams(max_tokens=40), speculation=speculation).result()
            assert (result.finish_reason, result.token_ids) == ("stop", answer[: end + 1])
            assert (result.stats.num_accepted_tokens == end + 1) == (speculation is not PLAIN)
            again = engine.submit([*PROMPT, *answer, 1], SamplingParams(max_tokens=1), speculation=PLAIN).result()
            assert again.cached_prompt_tokens == len(PROMPT) + end


# The prompt's own tokens


@pytest.mark.parametrize("beside", [False, True], ids=["alone", "beside a runner"])
def test_a_prompt_is_scored_as_one_plain_forward_scores_it_whatever_is_kept_of_it(beside: bool) -> None:
    prompt, sampling = [*PROMPT, *range(200)] * 2, SamplingParams(max_tokens=6, logprobs=1)
    logits = tiny_causal_lm("llama", seed=21)(torch.tensor([prompt])).logits[0].detach()
    expected = logits.log_softmax(-1)[:-1].gather(1, torch.tensor(prompt[1:]).unsqueeze(1)).squeeze(1)
    likeliest = logits.log_softmax(-1)[:-1].topk(2)
    with closing(make_engine(limits=EngineLimits(prefill_tokens_per_round=40))) as running:
        plain = running.submit(prompt, sampling, speculation=PLAIN).result()
        other = running.submit(PROMPT, SamplingParams(max_tokens=100)) if beside else None
        scored = running.submit(prompt, sampling, scores=PromptScores(2)).result()
        alone = running.submit(prompt, sampling, scores=PromptScores(alone=True)).result()
        again = running.submit(prompt, sampling, speculation=PLAIN).result()
        assert other is None or len(other.result().token_ids) == 100
    found = [one.logprob for one in scored.prompt_logprobs]
    torch.testing.assert_close(torch.tensor(found, dtype=torch.float64), expected)
    assert [[token for token, _ in one.top] for one in scored.prompt_logprobs] == likeliest.indices.tolist()
    assert [one.token_id for one in alone.prompt_logprobs] == prompt[1:]
    assert [one.logprob for one in alone.prompt_logprobs] == pytest.approx(found)
    assert (alone.token_ids, alone.finish_reason, alone.cached_prompt_tokens) == ((), "length", 0)
    assert plain.token_ids == scored.token_ids == again.token_ids
    assert again.cached_prompt_tokens == len(prompt) - 1, "what was scored is kept like any prompt"
    assert plain.prompt_logprobs == ()


# Where an answer ends


def test_max_tokens_is_exact_under_speculation_and_the_context_ends_an_answer(engine: Engine) -> None:
    for length in (1, 2, 7, 7):
        result = engine.submit(PROMPT, SamplingParams(max_tokens=length), query="order").result()
        assert (len(result.token_ids), result.finish_reason) == (length, "length")
    prompt = [65] * (engine.context_length - 3)
    assert len(engine.submit(prompt, SamplingParams(max_tokens=50)).result().token_ids) == 3
    with pytest.raises(ContextOverflowError, match="shorten"):
        engine.submit([65] * engine.context_length, SamplingParams())


@pytest.mark.parametrize("temperature", [0.0, 3.0])
def test_padded_output_rows_are_never_emitted(temperature: float) -> None:
    """A head with more rows than the tokenizer has tokens, which the model loves: masked, also where it is proposed."""
    model, sampling = tiny_causal_lm("llama", vocab_size=400), SamplingParams(temperature=temperature, max_tokens=60)
    with torch.no_grad():
        head = model.get_output_embeddings().weight
        head[259:] = 3.0 * head[:141]
    with (
        SpeculationCache.open(None, embedder=HashEmbedder()) as cache,
        closing(Engine(model, byte_tokenizer(), name="wide", cache=cache, cost=CostCurve())) as running,
    ):
        poison(cache, running, running.submit(PROMPT, sampling, speculation=PLAIN).result().token_ids)
        for _ in range(3):
            assert max(running.submit(PROMPT, sampling, query="order").result().token_ids) < len(byte_tokenizer())


def test_the_memory_of_a_draft_model_is_set_aside_too() -> None:
    """Its keys and values count for requests that draw from it, and for no others."""
    draft, asked = tiny_causal_lm(seed=9, num_hidden_layers=1), SamplingParams(max_tokens=100)
    with closing(make_engine()) as plain:
        most = plain.target.kv_bytes(100 + 100 + 39)
    with closing(make_engine(draft_model=draft, limits=EngineLimits(max_kv_bytes=most))) as running:
        running.submit([65] * 100, asked, speculation=SpeculationConfig(drafters=("prompt",))).cancel()
        with pytest.raises(CapacityError, match="100 prompt tokens, max_tokens=100"):
            running.submit([65] * 100, asked, speculation=SpeculationConfig(drafters=("draft-model",)))


# What breaks


def test_broken_logits_inside_a_drafted_answer_are_named_by_their_position(
    recalling: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whatever was proposed behind them, and however many tokens a step accepts: the first broken row is the error."""
    sampling = SamplingParams(max_tokens=20)
    recalling.submit(PROMPT, sampling, query="order").result()
    score, broken_at = recalling.target.score, 9

    def broken_score(batch: Sequence[tuple[Slot, CandidateTree]]) -> list[torch.Tensor]:
        scored = [logits.clone() for logits in score(batch)]
        for (slot, tree), logits in zip(batch, scored, strict=True):
            first = len(slot.token_ids) + 1 - len(PROMPT)
            for row, depth in enumerate((0, *tree.depths.tolist())):
                logits[row, 3] = torch.nan if first + depth == broken_at else logits[row, 3]
        return scored

    monkeypatch.setattr(recalling.target, "score", broken_score)
    for speculation in (PLAIN, SpeculationConfig(drafters=("recall",))):
        generation = recalling.submit(PROMPT, sampling, speculation=speculation, query="order")
        with pytest.raises(GenerationError, match=f"output position {broken_at} hold NaN"):
            generation.result()
    assert recalling.metrics().num_draft_tokens > 0
    monkeypatch.undo()
    assert recalling.submit(PROMPT, sampling).result().finish_reason == "length", "the engine goes on"


# Log-probabilities


@pytest.mark.parametrize("temperature", [0.0, 0.7])
@pytest.mark.parametrize("drafted", [False, True])
def test_logprobs_are_those_of_a_plain_forward_over_the_answer(
    engine: Engine, temperature: float, drafted: bool
) -> None:
    sampling = SamplingParams(temperature=temperature, seed=5, max_tokens=24, logprobs=3)
    plain = engine.submit(PROMPT, sampling, speculation=PLAIN).result()
    result = engine.submit(PROMPT, sampling, prediction=plain.token_ids if drafted else None).result()
    assert result.token_ids == plain.token_ids
    assert result.stats.num_steps < 24 or not drafted, "several tokens of one step each have their own row"
    with torch.inference_mode():
        rows = engine.target.model(input_ids=torch.tensor([[*PROMPT, *result.token_ids]])).logits[0]
    expected = rows[len(PROMPT) - 1 : -1, : len(engine.tokenizer)].log_softmax(-1)
    for row, one, token in zip(expected, result.logprobs, result.token_ids, strict=True):
        assert one.token_id == token
        assert one.logprob == pytest.approx(float(row[token]), abs=1e-9)
        best = row.topk(3)
        assert [token for token, _ in one.top] == best.indices.tolist()
        assert [value for _, value in one.top] == pytest.approx(best.values.tolist(), abs=1e-9)


def test_what_a_grammar_forbids_is_no_alternative_and_what_a_stop_string_cuts_off_has_no_logprobs(
    engine: Engine,
) -> None:
    result = engine.submit(PROMPT, SamplingParams(max_tokens=1, logprobs=20), grammar=Regex("[ab]")).result()
    assert sorted(token for token, _ in result.logprobs[0].top) == engine.tokenizer.encode("ab")
    whole = engine.submit(PROMPT, SamplingParams(max_tokens=8, logprobs=0)).result()
    cutting = SamplingParams(max_tokens=8, logprobs=0, stop=(engine.tokenizer.decode([whole.token_ids[3]]),))
    cut = engine.submit(PROMPT, cutting, prediction=whole.token_ids).result()
    assert [one.token_id for one in cut.logprobs] == list(cut.token_ids) == list(whole.token_ids[: len(cut.token_ids)])
    assert len(cut.token_ids) <= 4


# Streams, read in threads and tasks, cancelled at any token


@pytest.mark.usefixtures("searches_at_once")
@pytest.mark.parametrize("sampled", [{}, {"temperature": 1.2, "seed": 5}], ids=["greedy", "seeded"])
@pytest.mark.parametrize("reader", ["thread", "task"])
def test_a_stream_adds_up_to_its_result_and_ends_with_its_end_token(
    engine: Engine, reader: str, sampled: dict[str, Any]
) -> None:
    """No emission holds a token, a source or a text from behind the end, though recall proposes what came there."""
    sampling, undrafted = SamplingParams(max_tokens=40, **sampled), SpeculationConfig(drafters=())
    whole = engine.submit(PROMPT, sampling, speculation=undrafted, query="order").result()
    end = whole.token_ids[20]
    expected = whole.token_ids[: whole.token_ids.index(end) + 1]
    ending = SamplingParams(max_tokens=40, stop_token_ids=(end,), **sampled)
    plain = engine.submit(PROMPT, ending, speculation=PLAIN).result()

    async def read(generation: Generation) -> list[Emission]:
        return [emission async for emission in generation]

    for names in (("recall",), ("prompt",), ("draft-model",), ("recall", "prompt", "draft-model")):
        speculation = SpeculationConfig(drafters=names, write_back=False)
        generation = engine.submit(PROMPT, ending, speculation=speculation, query="order")
        emissions = list(generation) if reader == "thread" else asyncio.run(read(generation))
        result = generation.result()
        assert tuple(token for emission in emissions for token in emission.token_ids) == result.token_ids == expected
        assert tuple(source for emission in emissions for source in emission.sources) == result.sources
        assert "".join(emission.text for emission in emissions) == result.text == plain.text
        assert (result.finish_reason, len(result.sources)) == ("stop", len(expected))
        assert "recall" in result.sources or "recall" not in names


def test_a_stream_cancelled_at_any_token_leaves_a_sound_engine() -> None:
    """The next answers are those of a fresh engine; memory, slots and threads are what they were before."""
    sampling, after = SamplingParams(max_tokens=16), SamplingParams(max_tokens=12)
    fresh = make_engine()
    expected = fresh.submit(PROMPT, sampling, speculation=PLAIN).result().token_ids
    fresh.close()
    drafted = SpeculationConfig(drafters=("recall", "prompt"), write_back=False)
    with SpeculationCache.open(None, embedder=HashEmbedder()) as cache:
        settings: dict[str, Any] = {"cost": CostCurve(), "fences": (fences := Fences())}
        running = Engine(tiny_causal_lm("llama", seed=21), byte_tokenizer(), name="tiny", cache=cache, **settings)
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
            fences.settle()  # a search may end after its request
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


def test_an_error_reaches_an_asynchronous_reader() -> None:
    """A request that fails between two looks of its reader is raised, not taken for its end."""

    async def read() -> None:
        generation = Generation()
        waiting = asyncio.ensure_future(anext(aiter(generation)))
        await asyncio.sleep(0)
        generation.fail(GenerationError("broken"))
        await waiting

    with pytest.raises(GenerationError, match="broken"):
        asyncio.run(read())


# Engines that are closed, dropped or broken, and interpreters that end: nobody is left waiting


SHORT, LONG = SamplingParams(max_tokens=3), SamplingParams(max_tokens=900)


def test_closing_the_engine_cancels_what_is_running() -> None:
    """Nobody waits for ever on a closed engine, also not behind those that run; closing it again is harmless."""
    running = make_engine(limits=EngineLimits(max_running=2))
    generations = [running.submit(PROMPT, LONG, speculation=PLAIN) for _ in range(6)]
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


def test_a_worker_that_breaks_leaves_nobody_waiting(caplog: pytest.LogCaptureFixture) -> None:
    """An error that no request can be blamed for: all of them are told, and the engine is closed."""
    running = make_engine(limits=EngineLimits(max_running=1))
    generations = [running.submit(PROMPT, LONG, speculation=PLAIN) for _ in range(3)]
    running.admission.admits = None  # type: ignore[assignment, method-assign]
    for generation in generations[1:]:
        with pytest.raises(GenerationError, match="closed now"):
            generation.result()
    with pytest.raises(EngineClosedError):
        running.submit(PROMPT, SamplingParams())
    running.close()
    assert "the worker of an engine failed" in caplog.text


def test_many_threads_may_submit_while_the_engine_is_closed() -> None:
    """Each request is refused or failed; none is forgotten in between."""
    running, ends = make_engine(), list[str]()

    def ask() -> None:
        try:
            while True:
                running.submit(PROMPT, SHORT, speculation=PLAIN).result()
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


def test_the_interpreter_ends_with_requests_running() -> None:
    """Nobody closed the engine, one stream is read by a thread that nobody joins, another by no one."""
    script = """
import threading
from precedent.config import SamplingParams
from precedent.engine.engine import Engine
from precedent.errors import RequestCancelled
from precedent_testing.tiny_models import byte_tokenizer, tiny_causal_lm
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
    done = run(["-c", script], timeout=120)
    assert (done.returncode, sorted(done.stdout.split())) == (0, ["9", "True"]), done.stderr
    assert "Traceback" not in done.stderr
