"""Leaving a stream anywhere, on a real engine: the worker goes on, nothing leaks into the caller's thread."""

from __future__ import annotations

import asyncio
import gc
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch

from precedent.engine.engine import Engine
from precedent.langchain import ChatPrecedent
from precedent_testing.scripted_model import scripted_model_engine

TEXT = "The order was sent to the new address, and the refund is on its way."


@pytest.fixture(scope="module")
def engine() -> Iterator[Engine]:
    running = scripted_model_engine(lambda prompt: TEXT)
    yield running
    running.close()


@pytest.fixture
def llm(engine: Engine) -> ChatPrecedent:
    return ChatPrecedent.from_engine(engine)


def is_idle(engine: Engine) -> bool:
    """True once nothing runs; a later request is answered after whatever was cancelled had left."""
    answer = ChatPrecedent.from_engine(engine).invoke("still there?")
    found = engine.metrics()
    return answer.content == TEXT and found.num_requests_running + found.num_requests_waiting == 0


def test_a_stream_may_be_left_at_every_chunk(llm: ChatPrecedent, engine: Engine) -> None:
    for number in range(1, 8):
        stream = llm.stream("hi", speculation=False)
        for _ in range(number):
            next(stream)
            assert not torch.is_inference_mode_enabled(), "nothing of the model's mode reaches the caller"
        stream.close()
        assert not torch.is_inference_mode_enabled()
    assert is_idle(engine)


def test_a_stream_that_is_dropped_is_cancelled(llm: ChatPrecedent, engine: Engine) -> None:
    before = engine.metrics().num_requests_cancelled
    stream = llm.stream("hi", speculation=False)
    next(stream)
    del stream
    gc.collect()
    assert is_idle(engine)
    assert engine.metrics().num_requests_cancelled == before + 1


async def test_async_streams_may_be_left_at_every_chunk(llm: ChatPrecedent, engine: Engine) -> None:
    for number in range(1, 8):
        stream = llm.astream("hi", speculation=False)
        for _ in range(number):
            await anext(stream)
        await stream.aclose()  # type: ignore[attr-defined]
    assert await asyncio.to_thread(is_idle, engine)


async def test_sixteen_async_streams_half_of_them_cancelled(llm: ChatPrecedent, engine: Engine) -> None:
    async def one(number: int) -> str:
        text = ""
        async for chunk in llm.astream(f"request {number}", speculation=False):
            text += str(chunk.content)
            if number % 2 and len(text) > number:
                raise asyncio.CancelledError
        return text

    answers = await asyncio.gather(*(asyncio.create_task(one(number)) for number in range(16)), return_exceptions=True)
    assert answers[::2] == [TEXT] * 8
    assert all(isinstance(answer, asyncio.CancelledError) for answer in answers[1::2])
    assert await asyncio.to_thread(is_idle, engine)


def test_each_chunk_may_be_taken_on_another_thread(llm: ChatPrecedent) -> None:
    """As LangChain's default `astream` does with the sync one."""
    modes, text, stream = set(), "", llm.stream("hi", speculation=False)
    for _ in iter(int, 1):
        with ThreadPoolExecutor(max_workers=1) as elsewhere:
            chunk = elsewhere.submit(next, stream, None).result()
            modes.add(elsewhere.submit(torch.is_inference_mode_enabled).result())
        if chunk is None:
            break
        text += str(chunk.content)
    assert text == TEXT
    assert modes == {False}


def test_no_thread_is_left_behind(llm: ChatPrecedent) -> None:
    llm.invoke("hi")
    before = set(threading.enumerate())
    for _ in range(3):
        stream = llm.stream("hi")
        next(stream)
        stream.close()
    assert set(threading.enumerate()) <= before
