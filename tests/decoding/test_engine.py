"""The engine's answers: those of plain decoding, whatever is drafted, kept, or asked beside them."""

from __future__ import annotations

import threading
from contextlib import closing

import pytest
from helpers.small_engines import PLAIN, PROMPT, make_engine

from precedent.cache import SpeculationCache
from precedent.config import SamplingParams, SpeculationConfig
from precedent.engine.engine import Engine
from precedent.planning.costs import CostCurve
from precedent_testing.drafters import OracleDrafter
from precedent_testing.embedders import HashEmbedder
from precedent_testing.tiny_models import byte_tokenizer, tiny_causal_lm


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
@pytest.mark.parametrize("sampled", [{}, {"temperature": 1.2, "seed": 5}], ids=["greedy", "seeded"])
def test_nothing_follows_an_end_token_whoever_drafts(engine: Engine, sampled: dict[str, float]) -> None:
    """Recall knows the answer without the end: it proposes the end token, and what came behind it."""
    sampling = SamplingParams(max_tokens=40, **sampled)  # type: ignore[arg-type]
    whole = engine.submit(PROMPT, sampling, speculation=SpeculationConfig(drafters=()), query="order").result()
    end = whole.token_ids[20]
    expected = whole.token_ids[: whole.token_ids.index(end) + 1]
    ending = SamplingParams(max_tokens=40, stop_token_ids=(end,), **sampled)  # type: ignore[arg-type]
    plain = engine.submit(PROMPT, ending, speculation=PLAIN).result()
    for names in (("recall",), ("prompt",), ("draft-model",), ("recall", "prompt", "draft-model")):
        speculation = SpeculationConfig(drafters=names, write_back=False)
        found = engine.submit(PROMPT, ending, speculation=speculation, query="order").result()
        assert (found.token_ids, found.finish_reason) == (expected, "stop")
        assert found.text == plain.text
        assert len(found.sources) == len(expected)


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
            engine.planner.cost = CostCurve()
            engine.add_drafter(OracleDrafter([*answer[: end + 1], 65, 66]))
            result = engine.submit(PROMPT, SamplingParams(max_tokens=40), speculation=speculation).result()
            assert (result.finish_reason, result.token_ids) == ("stop", answer[: end + 1])
            assert (result.stats.num_accepted_tokens == end + 1) == (speculation is not PLAIN)
            kept.append(engine.admission._pool.acquire("default", [*PROMPT, *answer, 1]).token_ids)
    assert kept == [[*PROMPT, *answer[:end]]] * 2


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
