"""openai-python on a real server: its helpers, its classes of errors, every route, and the packaged model."""

from __future__ import annotations

import asyncio
import json
import threading
from itertools import islice
from pathlib import Path
from typing import Any

import openai
import pytest
from helpers.openai_questions import ADA, CALL, LOOK_UP, Person, ask, look_up, user
from openai import AsyncOpenAI, OpenAI

pytestmark = pytest.mark.clients

BORN = Person(name="Ada", born=1815)


def test_chat(client: OpenAI) -> None:
    text = "A sentence that is long enough to be predicted as a whole, and then some more of it."
    answer = ask(client, text, prediction={"type": "content", "content": text}, logprobs=True, top_logprobs=2)
    (choice,) = answer.choices
    assert (answer.object, answer.model, choice.message.content, choice.finish_reason) == (
        *("chat.completion", "echo", text, "stop"),
    )
    assert answer.model_extra["speculation"]["lossless"] is True
    assert 0 < answer.usage.completion_tokens_details.accepted_prediction_tokens <= answer.usage.completion_tokens
    assert "".join(one.token for one in choice.logprobs.content).startswith(text)
    again = ask(client, text).usage
    assert 0 < again.prompt_tokens_details.cached_tokens < again.prompt_tokens == answer.usage.prompt_tokens


def test_stream(client: OpenAI) -> None:
    *chunks, last = ask(client, "One two three.", stream=True, n=2, stream_options={"include_usage": True})
    texts = {0: "", 1: ""}
    for chunk in chunks:
        texts[chunk.choices[0].index] += chunk.choices[0].delta.content or ""
    assert texts == dict.fromkeys(range(2), "One two three.")
    assert (last.choices, last.usage.completion_tokens > 0) == ([], True)
    with client.chat.completions.stream(model="echo", messages=user(ADA), response_format=Person) as stream:
        kinds = {event.type for event in stream}
        final = stream.get_final_completion()
    assert {"chunk", "content.delta", "content.done"} <= kinds
    assert final.choices[0].message.parsed == BORN


def test_tool_call_and_its_result(client: OpenAI) -> None:
    answer = ask(client, f"{CALL}\n{CALL.replace('1042', '7')}", tools=[LOOK_UP])
    call, other = answer.choices[0].message.tool_calls
    assert answer.choices[0].finish_reason == "tool_calls"
    assert (call.function.name, json.loads(call.function.arguments)) == ("look_up", {"number": "1042"})
    assert (json.loads(other.function.arguments), other.id == call.id) == ({"number": "7"}, False)
    results = [{"role": "tool", "tool_call_id": one.id, "content": "sent on Monday"} for one in (call, other)]
    messages = [*user(CALL), answer.choices[0].message, *results]
    after = client.chat.completions.create(model="echo", messages=messages, tools=[LOOK_UP])
    assert "sent on Monday" in (after.choices[0].message.content or "")


def test_tool_calls_are_forced_forbidden_streamed_and_parsed(client: OpenAI) -> None:
    for choice in ("required", {"type": "function", "function": {"name": "look_up"}}):
        answer = ask(client, CALL, tools=[LOOK_UP], tool_choice=choice, parallel_tool_calls=False)
        assert [call.function.name for call in answer.choices[0].message.tool_calls] == ["look_up"]
    message = ask(client, "Just a text.", tools=[LOOK_UP], tool_choice="none").choices[0].message
    assert (message.content, message.tool_calls) == ("Just a text.", None)
    tools = [openai.pydantic_function_tool(look_up)]
    with client.chat.completions.stream(model="echo", messages=user(CALL), tools=tools) as stream:
        (done,) = [event for event in stream if event.type == "tool_calls.function.arguments.done"]
    assert (done.name, json.loads(done.arguments)) == ("look_up", {"number": "1042"})
    parsed = client.chat.completions.parse(model="echo", messages=user(CALL), tools=tools)
    (call,) = parsed.choices[0].message.tool_calls or ()
    assert call.function.parsed_arguments == look_up(number="1042")


@pytest.mark.parametrize("strictly", [True, False, None])
def test_structured_answers(client: OpenAI, strictly: bool | None) -> None:
    described = {"name": "person", "schema": {**Person.model_json_schema(), "additionalProperties": False}}
    described |= {} if strictly is None else {"strict": strictly}
    for wanted in ({"type": "json_schema", "json_schema": described}, {"type": "json_object"}):
        answer = ask(client, ADA, response_format=wanted)
        assert json.loads(answer.choices[0].message.content) == {"name": "Ada", "born": 1815}
    parsed = client.chat.completions.parse(model="echo", messages=user(ADA), response_format=Person)
    assert parsed.choices[0].message.parsed == BORN


def test_messages_of_every_role(client: OpenAI) -> None:
    parts = [{"type": "text", "text": "And "}, {"type": "text", "text": "you?"}]
    messages: Any = [
        {"role": "developer", "content": "Be brief."},
        {"role": "user", "content": [{"type": "text", "text": "Hello."}]},
        {"role": "assistant", "content": "Hi.", "reasoning_content": "A greeting."},
        {"role": "user", "name": "ada", "content": parts},
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


def test_completions(client: OpenAI) -> None:
    answer = client.completions.create(model="echo", prompt="Once upon", max_tokens=50, logprobs=2)
    assert (answer.choices[0].text, answer.choices[0].finish_reason) == (" Once upon", "stop")
    told = answer.choices[0].logprobs
    assert told is not None
    assert len(told.tokens or ()) == len(told.token_logprobs or ()) == len(told.text_offset or ()) > 1
    several = client.completions.create(model="echo", prompt=["One", "Two"], n=2, max_tokens=50, echo=True)
    assert [one.text for one in several.choices] == ["One One", "One One", "Two Two", "Two Two"]
    chunks = list(client.completions.create(model="echo", prompt="Once upon", max_tokens=50, stream=True))
    assert "".join(chunk.choices[0].text for chunk in chunks) == " Once upon"


def test_embeddings_and_models(client: OpenAI) -> None:
    for asked in ({"encoding_format": "float"}, {"encoding_format": "base64"}, {}):
        found = client.embeddings.create(model="echo", input=["one", "two", "one"], **asked)  # type: ignore[arg-type]
        vectors = [one.embedding for one in found.data]
        assert vectors[0] == vectors[2] != vectors[1]
        assert found.usage.prompt_tokens == 3
    assert [model.id for model in client.models.list()] == ["echo", "scripted-model", "other-model"]
    assert client.models.retrieve("echo").owned_by == "precedent"


def test_responses(client: OpenAI) -> None:
    answer = client.responses.create(model="echo", input="Hello to you.", instructions="Be brief.")
    assert (answer.status, answer.output_text) == ("completed", "Hello to you.")
    events = list(client.responses.create(model="echo", input="Hello to you.", stream=True))
    assert [event.sequence_number for event in events] == list(range(len(events)))
    assert [events[0].type, events[-1].type] == ["response.created", "response.completed"]
    with client.responses.stream(model="echo", input=ADA, text_format=Person) as stream:
        kinds = {event.type for event in stream}
        assert stream.get_final_response().output_parsed == BORN
    assert {"response.output_text.delta", "response.output_text.done", "response.completed"} <= kinds
    assert client.responses.parse(model="echo", input=ADA, text_format=Person).output_parsed == BORN


@pytest.mark.parametrize("streamed", [False, True])
def test_responses_with_a_tool(client: OpenAI, streamed: bool) -> None:
    tool: Any = {"type": "function", "strict": False, **LOOK_UP["function"]}
    said: list[Any] = user(CALL)
    if streamed:
        with client.responses.stream(model="echo", input=said, tools=[tool]) as stream:
            answer: Any = stream.get_final_response()
    else:
        answer = client.responses.create(model="echo", input=said, tools=[tool])
    (call,) = answer.output
    assert (call.type, call.name, json.loads(call.arguments)) == ("function_call", "look_up", {"number": "1042"})
    said += [call.to_dict(), {"type": "function_call_output", "call_id": call.call_id, "output": "sent on Monday"}]
    assert "sent on Monday" in client.responses.create(model="echo", input=said, tools=[tool]).output_text


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


@pytest.mark.parametrize(
    ("asked", "param"),
    [
        ({"extra_body": {"top_kk": 1}}, "top_kk"),
        ({"temperature": -1}, "temperature"),
        ({"temperature": -1, "stream": True}, "temperature"),
        ({"verbosity": "low"}, "verbosity"),
    ],
)
def test_a_bad_request(client: OpenAI, asked: dict[str, Any], param: str) -> None:
    with pytest.raises(openai.BadRequestError) as caught:
        ask(client, "Hi.", **asked)
    assert (caught.value.type, caught.value.param) == ("invalid_request_error", param)


def test_other_refusals(client: OpenAI, server: Any) -> None:
    with pytest.raises(openai.BadRequestError) as caught:
        ask(client, "x" * 100_000)
    assert caught.value.code == "context_length_exceeded"
    with pytest.raises(openai.BadRequestError, match="send the whole conversation"):
        client.responses.create(model="echo", input="Hi.", previous_response_id="resp_1")
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


@pytest.mark.parametrize("route", ["chat", "completions", "embeddings", "responses", "models"])
def test_an_unknown_model(client: OpenAI, route: str) -> None:
    asks: dict[str, Any] = {
        "chat": lambda: client.chat.completions.create(model="gpt", messages=user("Hi.")),
        "completions": lambda: client.completions.create(model="gpt", prompt="Hi."),
        "embeddings": lambda: client.embeddings.create(model="gpt", input="Hi."),
        "responses": lambda: client.responses.create(model="gpt", input="Hi."),
        "models": lambda: client.models.retrieve("gpt"),
    }
    with pytest.raises(openai.NotFoundError) as caught:
        asks[route]()
    assert caught.value.code == "model_not_found"


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
