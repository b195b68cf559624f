"""Streams that are left cancel their request; many run side by side, and nothing leaks into the caller's thread."""

from __future__ import annotations

import asyncio
import gc
import threading
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from helpers.order_chat import merged

from precedent.cache import SpeculationCache
from precedent.engine.engine import Engine
from precedent.langchain import ChatPrecedent, PrecedentLLM
from precedent_testing.embedders import HashEmbedder
from precedent_testing.scripted_engine import ScriptedEngine, chatml_tokenizer
from precedent_testing.scripted_model import scripted_model_engine, scripted_tokenizer

TEXT = "The order was sent to the new address, and the refund is on its way."
NUM_TOKENS = len(scripted_tokenizer()(TEXT).input_ids) + 1


# On a scripted engine, which is slower than its readers


@pytest.mark.parametrize("kind", [ChatPrecedent, PrecedentLLM])
async def test_leaving_a_stream_or_cancelling_a_task_cancels_the_request(kind: Any) -> None:
    engine: Any = ScriptedEngine(chatml_tokenizer(), lambda prompt: "x" * 3000, max_burst=1, pace=0.001)
    model = kind.from_engine(engine, max_tokens=2000)
    for _ in model.stream("hi"):
        break
    stream = model.astream("hi")
    await anext(stream)
    await stream.aclose()
    task = asyncio.create_task(model.ainvoke("hi"))
    while len(engine.requests) < 3:
        await asyncio.sleep(0)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    for request in engine.requests:
        assert await asyncio.to_thread(request.ended.wait, 10)
        assert request.cancelled


# On a real engine


@pytest.fixture(scope="module")
def engine() -> Iterator[Engine]:
    running = scripted_model_engine(lambda prompt: TEXT)
    yield running
    running.close()


def is_idle(engine: Engine) -> bool:
    """True once nothing runs; a later request is answered after whatever was cancelled had left."""
    answer = ChatPrecedent.from_engine(engine).invoke("still there?")
    found = engine.metrics()
    return answer.content == TEXT and found.num_requests_running + found.num_requests_waiting == 0


async def test_a_stream_may_be_left_at_every_chunk(engine: Engine) -> None:
    llm = ChatPrecedent.from_engine(engine, speculation=False)
    llm.invoke("hi")
    before, threads = engine.metrics().num_requests_cancelled, set(threading.enumerate())
    for number in range(1, 6):
        stream, other = llm.stream("hi"), llm.astream("hi")
        for _ in range(number):
            next(stream)
            await anext(other)
            assert not torch.is_inference_mode_enabled(), "nothing of the model's mode reaches the caller"
        if number % 2:
            stream.close()
        else:
            del stream
            gc.collect()
        await other.aclose()  # type: ignore[attr-defined]
    assert await asyncio.to_thread(is_idle, engine)
    assert engine.metrics().num_requests_cancelled == before + 10
    left = {one for one in set(threading.enumerate()) - threads if not one.name.startswith("asyncio")}
    assert not left, "no thread is left behind"


async def test_no_text_from_behind_the_end_token_is_seen() -> None:
    """From the second answer on the cache proposes the whole answer with its end token."""
    with SpeculationCache.open(embedder=HashEmbedder()) as cache:
        engine = scripted_model_engine(lambda prompt: TEXT, cache=cache)
        model = ChatPrecedent.from_engine(engine, logprobs=True)
        events = [one async for one in model.astream_events("Where is my order?", version="v2")]
        answers: list[Any] = [
            merged([one["data"]["chunk"] for one in events if one["event"] == "on_chat_model_stream"]),
            merged(list(model.stream("Where is my order?"))),
            merged([chunk async for chunk in model.astream("Where is my order?")]),
            await model.ainvoke("Where is my order?"),
        ]
        for message in answers:
            assert (message.content, message.response_metadata["finish_reason"]) == (TEXT, "stop")
            assert message.usage_metadata["output_tokens"] == NUM_TOKENS
            assert len(message.response_metadata["logprobs"]["content"]) == NUM_TOKENS
        assert all(one.response_metadata["speculation"]["accepted_by_source"]["recall"] for one in answers[1:])
        engine.close()


@pytest.fixture
def llm(engine: Engine) -> ChatPrecedent:
    return ChatPrecedent.from_engine(engine, speculation=False)


async def test_sixteen_async_streams_half_of_them_cancelled(llm: ChatPrecedent, engine: Engine) -> None:
    async def one(number: int) -> str:
        text = ""
        async for chunk in llm.astream(f"request {number}"):
            text += str(chunk.content)
            if number % 2 and len(text) > number:
                raise asyncio.CancelledError
        return text

    answers = await asyncio.gather(*(asyncio.create_task(one(number)) for number in range(16)), return_exceptions=True)
    assert answers[::2] == [TEXT] * 8
    assert all(isinstance(answer, asyncio.CancelledError) for answer in answers[1::2])
    assert await asyncio.to_thread(is_idle, engine)
