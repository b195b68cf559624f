"""openai-python on a real server: what only a socket, several clients at once and the packaged model can show.

The routes themselves, their types and errors are `../test_openai_client.py`'s.
"""

from __future__ import annotations

import asyncio
import os
import threading
from itertools import islice
from pathlib import Path
from typing import Any

import openai
import pytest
from openai import AsyncOpenAI, OpenAI
from pydantic import BaseModel

pytestmark = pytest.mark.clients


class Person(BaseModel):
    name: str
    born: int


def user(text: str) -> Any:
    return [{"role": "user", "content": text}]


def ask(client: OpenAI, text: str, **more: Any) -> Any:
    return client.chat.completions.create(model="echo", messages=user(text), **more)


async def test_many_at_once_and_an_async_stream(server: Any) -> None:
    async with AsyncOpenAI(base_url=server.url, api_key=server.keys["desk"], max_retries=0) as client:
        texts = [f"Number {number}." for number in range(8)]
        made = (client.chat.completions.create(model="echo", messages=user(text)) for text in texts)
        answers = await asyncio.gather(*made)
        stream = await client.chat.completions.create(model="echo", messages=user("Hi there."), stream=True)
        pieces = [chunk.choices[0].delta.content or "" async for chunk in stream]
    assert [answer.choices[0].message.content for answer in answers] == texts
    assert "".join(pieces) == "Hi there."


def test_a_stream_that_is_left_is_cancelled(client: OpenAI, server: Any) -> None:
    def cancelled() -> float:
        with OpenAI(base_url=server.address, api_key=server.keys["boss"]) as admin:
            text = admin.get("/metrics", cast_to=str)
        found = [line for line in text.splitlines() if line.startswith("precedent:requests_cancelled")]
        return sum(float(line.rpartition(" ")[2]) for line in found if "echo" in line)

    before = cancelled()
    with ask(client, "Count to 3000", stream=True, extra_body={"speculation": False}) as stream:
        assert len(list(islice(stream, 5))) == 5
    for _ in range(10_000):  # each turn waits for the server
        if cancelled() > before:
            return
    pytest.fail("the answer went on without a reader")


def test_the_packaged_model_follows_a_seed_and_a_schema(smol: Any) -> None:
    with OpenAI(base_url=smol.url, api_key="none") as client:

        def sampled(**more: Any) -> list[Any]:
            found = client.chat.completions.create(
                model="smollm2", messages=user("Tell a story."), max_completion_tokens=12, **more
            )
            return [choice.message.content for choice in found.choices]

        both = sampled(seed=3, n=2)
        assert both == sampled(seed=3, n=2)
        assert both[1:] == sampled(seed=4)
        assert both[0] != both[1]
        found = client.chat.completions.parse(
            model="smollm2", messages=user("Who wrote the first program?"), response_format=Person, temperature=0,
        )  # fmt: skip
    assert isinstance(found.choices[0].message.parsed, Person)


def test_too_many_at_once(client: OpenAI, tmp_path: Path) -> None:
    """A FIFO holds the answer back: who opens it waits for the other end, without a clock."""
    told, fifo = list[str](), tmp_path / "fifo"
    os.mkfifo(fifo)

    def wait() -> None:
        told.append(ask(client, f"Wait for {fifo}").choices[0].message.content)

    waiting = threading.Thread(target=wait)
    waiting.start()
    with fifo.open("w") as answer:  # opens once the model reads it
        with pytest.raises(openai.RateLimitError) as caught:
            ask(client, "Hi.", n=16)
        answer.write("At last.")
    waiting.join()
    assert caught.value.response.headers["retry-after"] == "1"
    assert told == ["At last."]
