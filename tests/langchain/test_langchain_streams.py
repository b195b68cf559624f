"""Streams that are left cancel their request; many run side by side, and handlers see every text."""

from __future__ import annotations

import asyncio
import threading
from typing import Any

import pytest
from helpers.order_chat import TOKENIZER, Streaming, engine_of, scripted
from langchain_core.messages import AIMessageChunk

from precedent.cache import SpeculationCache
from precedent.langchain import ChatPrecedent
from precedent_testing.embedders import HashEmbedder
from precedent_testing.scripted_engine import ScriptedEngine
from precedent_testing.scripted_model import scripted_model_engine, scripted_tokenizer

NUM_TOKENS = len(scripted_tokenizer()("The order was sent to the new address.").input_ids) + 1


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


@pytest.mark.parametrize("way", ["stream", "astream", "events", "invoke"])
async def test_no_text_from_behind_the_end_token_is_seen(way: str) -> None:
    """A real decode loop; in the second turn the cache proposes the whole answer with its end token."""
    with SpeculationCache.open(embedder=HashEmbedder()) as cache:
        engine = scripted_model_engine(lambda prompt: "The order was sent to the new address.", cache=cache)
        model = ChatPrecedent.from_engine(engine, logprobs=True)
        for _ in range(2):
            message: Any = AIMessageChunk("")
            if way == "stream":
                for chunk in model.stream("Where is my order?"):
                    message += chunk
            elif way == "astream":
                async for chunk in model.astream("Where is my order?"):
                    message += chunk
            elif way == "events":
                async for event in model.astream_events("Where is my order?", version="v2"):
                    if event["event"] == "on_chat_model_stream":
                        message += event["data"]["chunk"]
            else:
                message = await model.ainvoke("Where is my order?")
            assert message.content == "The order was sent to the new address."
            assert message.response_metadata["finish_reason"] == "stop"
            assert message.usage_metadata["output_tokens"] == NUM_TOKENS
            assert len(message.response_metadata["logprobs"]["content"]) == NUM_TOKENS
        assert engine.metrics().accepted_by_source["recall"] > 0
        engine.close()
