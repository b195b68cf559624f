"""What an engine sends while it answers: emissions, read in threads and tasks, cancelled at any token."""

from __future__ import annotations

import asyncio
import threading
from itertools import count

import pytest
from helpers.small_engines import PLAIN, PROMPT, make_engine, poison

from precedent.cache import SpeculationCache
from precedent.config import SamplingParams, SpeculationConfig
from precedent.engine.engine import Engine
from precedent.engine.generation import Emission, Generation
from precedent.errors import GenerationError, RequestCancelled
from precedent_testing.embedders import HashEmbedder


def test_emissions_add_up_to_the_result(engine: Engine) -> None:
    """Text, ids and sources of a stream are those of the result."""
    generation = engine.submit(PROMPT, SamplingParams(max_tokens=30), query="order")
    emissions = list(generation)
    result = generation.result()
    assert "".join(e.text for e in emissions) == result.text
    assert tuple(token for e in emissions for token in e.token_ids) == result.token_ids
    assert tuple(source for e in emissions for source in e.sources) == result.sources


@pytest.mark.usefixtures("searches_at_once")
@pytest.mark.parametrize("reader", ["thread", "task"])
def test_a_stream_ends_with_its_end_token(engine: Engine, reader: str) -> None:
    """No emission holds a token, a source or a text from behind it, though recall proposes what came there."""
    whole = engine.submit(PROMPT, SamplingParams(max_tokens=40), query="order").result()
    end = whole.token_ids[20]
    expected = whole.token_ids[: whole.token_ids.index(end) + 1]
    ending = SamplingParams(max_tokens=40, stop_token_ids=(end,))
    plain = engine.submit(PROMPT, ending, speculation=PLAIN).result()
    generation = engine.submit(PROMPT, ending, speculation=SpeculationConfig(write_back=False), query="order")

    async def read() -> list[Emission]:
        return [emission async for emission in generation]

    emissions = list(generation) if reader == "thread" else asyncio.run(read())
    assert tuple(token for emission in emissions for token in emission.token_ids) == expected
    assert sum(len(emission.sources) for emission in emissions) == len(expected)
    assert "".join(emission.text for emission in emissions) == plain.text
    assert "recall" in generation.result().sources


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


def test_a_slow_reader_holds_nobody(engine: Engine) -> None:
    """A stream that nobody reads is written to its end, beside one that is read."""
    unread = engine.submit(PROMPT, SamplingParams(max_tokens=40), query="order")
    assert len(engine.submit(PROMPT, SamplingParams(max_tokens=5), query="order").result().token_ids) == 5
    expected = unread.result()
    assert tuple(token for emission in unread for token in emission.token_ids) == expected.token_ids


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
