"""Streams that are left cancel their request; many run side by side, and handlers see every text."""

from __future__ import annotations

import asyncio
import threading

import pytest
from helpers.order_chat import TOKENIZER, Streaming, engine_of, scripted

from precedent.langchain import ChatPrecedent
from precedent.testing.scripted_engine import ScriptedEngine


def test_breaking_out_of_a_stream_cancels_the_request() -> None:
    model = scripted("x" * 5000, max_burst=1, pace=0.001)
    for _ in model.stream("hi", max_tokens=4000):
        break
    (request,) = engine_of(model).requests
    assert request.ended.wait(5)
    assert request.cancelled


async def test_leaving_an_async_stream_or_cancelling_its_task_cancels_the_request() -> None:
    model = scripted("x" * 5000, "x" * 5000, max_burst=1, pace=0.001)
    stream = model.astream("hi", max_tokens=4000)
    await anext(stream)
    await stream.aclose()  # type: ignore[attr-defined]
    task = asyncio.create_task(model.ainvoke("hi", max_tokens=4000))
    await asyncio.sleep(0.05)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    for request in engine_of(model).requests:
        assert await asyncio.to_thread(request.ended.wait, 5)
        assert request.cancelled


async def test_async_streams_run_side_by_side_on_the_callers_thread() -> None:
    threads = set()
    engine = ScriptedEngine(TOKENIZER, lambda prompt: prompt[-40:-30] * 3, pace=0.001)
    model = ChatPrecedent.from_engine(engine)

    async def one(number: int) -> str:
        text = ""
        async for chunk in model.astream(f"request {number}"):
            threads.add(threading.current_thread())
            text += str(chunk.content)
        return text

    answers = await asyncio.gather(*(one(number) for number in range(16)))
    assert answers == [engine_answer(engine, number) for number in range(16)]
    assert threads == {threading.main_thread()}


def engine_answer(engine: ScriptedEngine, number: int) -> str:
    (request,) = [request for request in engine.requests if f"request {number}<" in request.prompt]
    return request.generation.result().text


def test_a_streaming_handler_sees_every_text() -> None:
    handler = Streaming()
    message = scripted("Hello there", max_burst=3).invoke("hi", {"callbacks": [handler]}, stream=True)
    assert "".join(handler.texts) == message.content == "Hello there"
