"""openai-python on a real server: what only a socket, several clients at once and the packaged model can show.

The routes themselves, their types and errors are `../test_openai_client.py`'s.
"""

from __future__ import annotations

import asyncio
import json
import threading
from itertools import islice
from pathlib import Path
from typing import Any

import openai
import pytest
from openai import AsyncOpenAI, OpenAI
from pydantic import BaseModel

pytestmark = pytest.mark.clients

CALL = '<tool_call>\n{"name": "look_up", "arguments": {"number": "1042"}}\n</tool_call>'
PARAMETERS = {"type": "object", "properties": {"number": {"type": "string"}}, "required": ["number"]}
TOOL: Any = {"type": "function", "strict": False, "name": "look_up", "parameters": PARAMETERS}


class Person(BaseModel):
    name: str
    born: int


def user(text: str) -> Any:
    return [{"role": "user", "content": text}]


def ask(client: OpenAI, text: str, **more: Any) -> Any:
    return client.chat.completions.create(model="echo", messages=user(text), **more)


def test_a_chat_and_its_stream(client: OpenAI) -> None:
    answer = ask(client, "One two three.")
    assert answer.choices[0].message.content == "One two three."
    again = ask(client, "One two three.").usage
    assert 0 < again.prompt_tokens_details.cached_tokens < again.prompt_tokens == answer.usage.prompt_tokens
    *chunks, last = ask(client, "One two three.", stream=True, n=2, stream_options={"include_usage": True})
    texts = {0: "", 1: ""}
    for chunk in chunks:
        texts[chunk.choices[0].index] += chunk.choices[0].delta.content or ""
    assert texts == dict.fromkeys(range(2), "One two three.")
    assert (last.choices, last.usage.completion_tokens > 0) == ([], True)


def test_messages_of_every_role_and_a_request_id(client: OpenAI) -> None:
    messages: Any = [
        {"role": "developer", "content": "Be brief."},
        {"role": "user", "content": [{"type": "text", "text": "Hello."}]},
        {"role": "assistant", "content": "Hi.", "reasoning_content": "A greeting."},
        {
            "role": "user",
            "name": "ada",
            "content": [{"type": "text", "text": "And "}, {"type": "text", "text": "you?"}],
        },
    ]
    raw = client.chat.completions.with_raw_response.create(
        model="echo", messages=messages, extra_headers={"X-Request-ID": "mine-1"}
    )
    assert raw.headers["x-request-id"] == raw.request_id == "mine-1"
    assert (raw.parse().choices[0].message.content or "").replace("\n", "") == "And you?"


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


@pytest.mark.parametrize("streamed", [False, True])
def test_responses_with_a_tool(client: OpenAI, streamed: bool) -> None:
    said: list[Any] = user(CALL)
    if streamed:
        with client.responses.stream(model="echo", input=said, tools=[TOOL]) as stream:
            answer: Any = stream.get_final_response()
    else:
        answer = client.responses.create(model="echo", input=said, tools=[TOOL])
    (call,) = answer.output
    assert (call.type, call.name, json.loads(call.arguments)) == ("function_call", "look_up", {"number": "1042"})
    said += [call.to_dict(), {"type": "function_call_output", "call_id": call.call_id, "output": "sent on Monday"}]
    assert "sent on Monday" in client.responses.create(model="echo", input=said, tools=[TOOL]).output_text


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


def test_refusals(client: OpenAI, server: Any) -> None:
    with pytest.raises(openai.BadRequestError) as caught:
        ask(client, "Hi.", extra_body={"top_kk": 1}, stream=True)
    assert (caught.value.type, caught.value.param) == ("invalid_request_error", "top_kk")
    with OpenAI(base_url=server.url, api_key="pk-wrong") as other, pytest.raises(openai.AuthenticationError) as denied:
        ask(other, "Hi.")
    assert denied.value.code == "invalid_api_key"
    with (
        OpenAI(base_url=server.address, api_key=server.keys["desk"]) as other,
        pytest.raises(openai.PermissionDeniedError, match="'admin' is needed"),
    ):
        other.get("/dashboard/figures", cast_to=object)
    with pytest.raises(openai.NotFoundError):
        client.files.list()


def test_too_many_at_once(client: OpenAI, fifo: Path) -> None:
    told = list[str]()

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
