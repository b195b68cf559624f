"""openai-python's chat completions: all that its users ask for."""

from __future__ import annotations

import asyncio
import json
from itertools import islice
from typing import Any

import openai
import pytest
from helpers.openai_questions import ADA, CALL, LOOK_UP, Person, ask, look_up, user
from openai import AsyncOpenAI, OpenAI

pytestmark = pytest.mark.clients


def test_chat(client: OpenAI) -> None:
    answer = ask(client, "Where is order 1042?")
    assert answer.object == "chat.completion"
    assert answer.model == "echo"
    assert answer.choices[0].message.role == "assistant"
    assert answer.choices[0].message.content == "Where is order 1042?"
    assert answer.choices[0].finish_reason == "stop"
    assert answer.model_extra["speculation"]["lossless"] is True


def test_usage(client: OpenAI) -> None:
    text = "A sentence that is long enough to be predicted as a whole, and then some more of it."
    usage = ask(client, text, prediction={"type": "content", "content": text}).usage
    assert usage.total_tokens == usage.prompt_tokens + usage.completion_tokens
    assert 0 < usage.completion_tokens_details.accepted_prediction_tokens <= usage.completion_tokens
    assert usage.completion_tokens_details.rejected_prediction_tokens >= 0
    again = ask(client, text).usage
    assert 0 < again.prompt_tokens_details.cached_tokens < again.prompt_tokens == usage.prompt_tokens


def test_stream(client: OpenAI) -> None:
    chunks = list(ask(client, "One two three four five.", stream=True))
    assert chunks[0].choices[0].delta.role == "assistant"
    assert "".join(chunk.choices[0].delta.content or "" for chunk in chunks) == "One two three four five."
    assert [chunk.choices[0].finish_reason for chunk in chunks][-2:] == [None, "stop"]
    assert len({chunk.id for chunk in chunks}) == 1


def test_stream_with_usage(client: OpenAI) -> None:
    *chunks, last = ask(client, "Hi there.", stream=True, stream_options={"include_usage": True})
    assert all(chunk.usage is None for chunk in chunks)
    assert last.choices == []
    assert last.usage.completion_tokens > 0


def test_stream_helper(client: OpenAI) -> None:
    with client.chat.completions.stream(model="echo", messages=user("Hello to you.")) as stream:
        kinds = [event.type for event in stream]
        final = stream.get_final_completion()
    assert {"chunk", "content.delta", "content.done"} <= set(kinds)
    assert final.choices[0].message.content == "Hello to you."


def test_stream_helper_parses(client: OpenAI) -> None:
    with client.chat.completions.stream(model="echo", messages=user(ADA), response_format=Person) as stream:
        final = stream.get_final_completion()
    assert final.choices[0].message.parsed == Person(name="Ada", born=1815)


def test_tool_call_and_its_result(client: OpenAI) -> None:
    answer = ask(client, CALL, tools=[LOOK_UP])
    (call,) = answer.choices[0].message.tool_calls
    assert answer.choices[0].finish_reason == "tool_calls"
    assert (call.function.name, json.loads(call.function.arguments)) == ("look_up", {"number": "1042"})
    result = {"role": "tool", "tool_call_id": call.id, "content": "sent on Monday"}
    messages = [*user(CALL), answer.choices[0].message, result]
    after = client.chat.completions.create(model="echo", messages=messages, tools=[LOOK_UP])
    assert "sent on Monday" in after.choices[0].message.content


def test_streamed_tool_call(client: OpenAI) -> None:
    with client.chat.completions.stream(model="echo", messages=user(CALL), tools=[strict(LOOK_UP)]) as stream:
        events = list(stream)
    (done,) = [event for event in events if event.type == "tool_calls.function.arguments.done"]
    assert (done.name, json.loads(done.arguments)) == ("look_up", {"number": "1042"})


def strict(tool: Any) -> Any:
    schema = {**tool["function"]["parameters"], "additionalProperties": False}
    return {**tool, "function": {**tool["function"], "parameters": schema, "strict": True}}


def test_two_tool_calls(client: OpenAI) -> None:
    calls = f"{CALL}\n{CALL.replace('1042', '7')}"
    found = ask(client, calls, tools=[LOOK_UP]).choices[0].message.tool_calls
    assert [json.loads(call.function.arguments)["number"] for call in found] == ["1042", "7"]
    assert len({call.id for call in found}) == 2


@pytest.mark.parametrize(
    "choice", ["required", {"type": "function", "function": {"name": "look_up"}}], ids=["required", "named"]
)
def test_forced_tool_call(client: OpenAI, choice: Any) -> None:
    answer = ask(client, CALL, tools=[LOOK_UP], tool_choice=choice, parallel_tool_calls=False)
    assert [call.function.name for call in answer.choices[0].message.tool_calls] == ["look_up"]


def test_no_tool_call(client: OpenAI) -> None:
    message = ask(client, "Just a text.", tools=[LOOK_UP], tool_choice="none").choices[0].message
    assert (message.content, message.tool_calls) == ("Just a text.", None)


def test_parsed_tool_call(client: OpenAI) -> None:
    answer = client.chat.completions.parse(
        model="echo", messages=user(CALL), tools=[openai.pydantic_function_tool(look_up)]
    )
    (call,) = answer.choices[0].message.tool_calls or ()
    assert call.function.parsed_arguments == look_up(number="1042")


def test_parsed_answer(client: OpenAI) -> None:
    answer = client.chat.completions.parse(model="echo", messages=user(ADA), response_format=Person)
    assert answer.choices[0].message.parsed == Person(name="Ada", born=1815)


@pytest.mark.parametrize("strictly", [True, False, None])
def test_json_schema(client: OpenAI, strictly: bool | None) -> None:
    described = {"name": "person", "schema": {**Person.model_json_schema(), "additionalProperties": False}}
    described |= {} if strictly is None else {"strict": strictly}
    answer = ask(client, ADA, response_format={"type": "json_schema", "json_schema": described})
    assert json.loads(answer.choices[0].message.content) == {"name": "Ada", "born": 1815}


def test_json_object(client: OpenAI) -> None:
    answer = ask(client, ADA, response_format={"type": "json_object"})
    assert json.loads(answer.choices[0].message.content) == {"name": "Ada", "born": 1815}


def test_logprobs(client: OpenAI) -> None:
    answer = ask(client, "Hello there.", logprobs=True, top_logprobs=2)
    told = answer.choices[0].logprobs.content
    assert "".join(one.token for one in told).startswith("Hello there.")
    assert all(one.logprob <= 0 and len(one.top_logprobs) == 2 for one in told)


def test_streamed_logprobs(client: OpenAI) -> None:
    chunks = list(ask(client, "Hello there.", logprobs=True, stream=True))
    told = [one for chunk in chunks if chunk.choices[0].logprobs for one in chunk.choices[0].logprobs.content]
    assert "".join(one.token for one in told).startswith("Hello there.")


def test_several_answers(client: OpenAI) -> None:
    assert [(one.index, one.message.content) for one in ask(client, "Twice.", n=2).choices] == [
        (0, "Twice."),
        (1, "Twice."),
    ]


def test_several_streamed_answers(client: OpenAI) -> None:
    texts = {0: "", 1: "", 2: ""}
    for chunk in ask(client, "Three times.", n=3, stream=True):
        texts[chunk.choices[0].index] += chunk.choices[0].delta.content or ""
    assert texts == dict.fromkeys(range(3), "Three times.")


def test_stop_and_length(client: OpenAI) -> None:
    stopped = ask(client, "One, two, three.", stop=[" three"]).choices[0]
    assert (stopped.message.content, stopped.finish_reason) == ("One, two,", "stop")
    cut = ask(client, "One, two, three.", max_completion_tokens=2).choices[0]
    assert cut.finish_reason == "length"
    assert "One, two, three.".startswith(cut.message.content)


def test_messages_of_every_role(client: OpenAI) -> None:
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
    answer = client.chat.completions.create(model="echo", messages=messages)
    assert (answer.choices[0].message.content or "").replace("\n", "") == "And you?"


def test_raw_response_has_a_request_id(client: OpenAI) -> None:
    raw = client.chat.completions.with_raw_response.create(
        model="echo", messages=user("Hi."), extra_headers={"X-Request-ID": "mine-1"}
    )
    assert raw.headers["x-request-id"] == raw.request_id == "mine-1"
    assert raw.parse().choices[0].message.content == "Hi."


async def test_many_at_once(server: Any) -> None:
    async with AsyncOpenAI(base_url=server.url, api_key=server.keys["desk"], max_retries=0) as client:
        texts = [f"Number {number}." for number in range(8)]
        made = (client.chat.completions.create(model="echo", messages=user(text)) for text in texts)
        answers = await asyncio.gather(*made)
    assert [answer.choices[0].message.content for answer in answers] == texts


async def test_async_stream(server: Any) -> None:
    async with AsyncOpenAI(base_url=server.url, api_key=server.keys["desk"]) as client:
        stream = await client.chat.completions.create(model="echo", messages=user("Hi there."), stream=True)
        pieces = [chunk.choices[0].delta.content or "" async for chunk in stream]
    assert "".join(pieces) == "Hi there."


def test_a_stream_that_is_left_is_cancelled(client: OpenAI, server: Any) -> None:
    before = cancelled(server)
    with ask(client, "Count to 3000", stream=True, extra_body={"speculation": False}) as stream:
        assert len(list(islice(stream, 5))) == 5
    for _ in range(10_000):  # each turn waits for the server
        if cancelled(server) > before:
            return
    pytest.fail("the answer went on without a reader")


def cancelled(server: Any) -> float:
    with OpenAI(base_url=server.address, api_key=server.keys["boss"]) as admin:
        text = admin.get("/metrics", cast_to=str)
    lines = [line for line in text.splitlines() if line.startswith("precedent:requests_cancelled") and "echo" in line]
    return sum(float(line.rpartition(" ")[2]) for line in lines)
