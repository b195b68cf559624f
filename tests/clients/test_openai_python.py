"""openai-python against the server: everything its users call, and its own classes of errors."""

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

ADA = '{"name": "Ada", "born": 1815}'
CALL = '<tool_call>\n{"name": "look_up", "arguments": {"number": "1042"}}\n</tool_call>'
LOOK_UP: Any = {
    "type": "function",
    "function": {
        "name": "look_up",
        "description": "Looks an order up.",
        "parameters": {"type": "object", "properties": {"number": {"type": "string"}}, "required": ["number"]},
    },
}


class Person(BaseModel):
    name: str
    born: int


class look_up(BaseModel):
    number: str


@pytest.fixture
def client(server: Any) -> Any:
    with OpenAI(base_url=server.url, api_key=server.keys["desk"], max_retries=0) as made:
        yield made


def user(text: str) -> Any:
    return [{"role": "user", "content": text}]


def ask(client: OpenAI, text: str, **more: Any) -> Any:
    return client.chat.completions.create(model="echo", messages=user(text), **more)


# Chat completions


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


# The other routes


def test_completions(client: OpenAI) -> None:
    answer = client.completions.create(model="echo", prompt="Once upon", max_tokens=50)
    assert answer.choices[0].text == " Once upon"
    assert answer.choices[0].finish_reason == "stop"
    several = client.completions.create(model="echo", prompt=["One", "Two"], n=2, max_tokens=50, echo=True)
    assert [one.text for one in several.choices] == ["One One", "One One", "Two Two", "Two Two"]


def test_streamed_completions(client: OpenAI) -> None:
    chunks = list(client.completions.create(model="echo", prompt="Once upon", max_tokens=50, stream=True))
    assert "".join(chunk.choices[0].text for chunk in chunks) == " Once upon"


def test_completions_with_logprobs(client: OpenAI) -> None:
    answer = client.completions.create(model="echo", prompt="Once", max_tokens=50, logprobs=2)
    told = answer.choices[0].logprobs
    assert told is not None
    assert "".join(told.tokens or ()).startswith(" Once")
    assert len(told.tokens or ()) == len(told.token_logprobs or ()) == len(told.text_offset or ())


@pytest.mark.parametrize("encoding", ["float", "base64", None])
def test_embeddings(client: OpenAI, encoding: Any) -> None:
    asked = {} if encoding is None else {"encoding_format": encoding}
    found = client.embeddings.create(model="echo", input=["one", "two", "one"], **asked)
    vectors = [one.embedding for one in found.data]
    assert [one.index for one in found.data] == [0, 1, 2]
    assert vectors[0] == vectors[2] != vectors[1]
    assert found.usage.prompt_tokens == 3


def test_models(client: OpenAI) -> None:
    assert [model.id for model in client.models.list()] == ["echo", "scripted-model", "other-model"]
    assert client.models.retrieve("echo").owned_by == "precedent"


def test_responses(client: OpenAI) -> None:
    answer = client.responses.create(model="echo", input="Hello to you.", instructions="Be brief.")
    assert (answer.status, answer.output_text) == ("completed", "Hello to you.")
    assert answer.usage is not None
    assert answer.usage.total_tokens == answer.usage.input_tokens + answer.usage.output_tokens


def test_streamed_responses(client: OpenAI) -> None:
    events = list(client.responses.create(model="echo", input="Hello to you.", stream=True))
    assert [event.sequence_number for event in events] == list(range(len(events)))
    assert [events[0].type, events[-1].type] == ["response.created", "response.completed"]
    assert "".join(event.delta for event in events if event.type == "response.output_text.delta") == "Hello to you."


def test_responses_stream_helper(client: OpenAI) -> None:
    with client.responses.stream(model="echo", input=ADA, text_format=Person) as stream:
        kinds = {event.type for event in stream}
        final = stream.get_final_response()
    assert {"response.output_text.delta", "response.output_text.done", "response.completed"} <= kinds
    assert final.output_parsed == Person(name="Ada", born=1815)


def test_parsed_responses(client: OpenAI) -> None:
    assert client.responses.parse(model="echo", input=ADA, text_format=Person).output_parsed == Person(
        name="Ada", born=1815
    )


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


# Errors


@pytest.mark.parametrize(
    ("asked", "param"),
    [
        ({"extra_body": {"top_kk": 1}}, "top_kk"),
        ({"temperature": -1}, "temperature"),
        ({"n": 0}, "n"),
        ({"verbosity": "low"}, "verbosity"),
        ({"tool_choice": "required"}, "tool_choice"),
    ],
)
def test_a_bad_request(client: OpenAI, asked: dict[str, Any], param: str) -> None:
    with pytest.raises(openai.BadRequestError) as caught:
        ask(client, "Hi.", **asked)
    assert caught.value.type == "invalid_request_error"
    assert caught.value.param == param


def test_a_prompt_that_is_too_long(client: OpenAI) -> None:
    with pytest.raises(openai.BadRequestError) as caught:
        ask(client, "x" * 100_000)
    assert caught.value.code == "context_length_exceeded"


def test_a_bad_request_for_a_stream(client: OpenAI) -> None:
    with pytest.raises(openai.BadRequestError):
        ask(client, "Hi.", stream=True, temperature=-1)


def test_nothing_is_kept_between_responses(client: OpenAI) -> None:
    with pytest.raises(openai.BadRequestError, match="send the whole conversation"):
        client.responses.create(model="echo", input="Hi.", previous_response_id="resp_1")


def test_a_wrong_key(server: Any) -> None:
    with OpenAI(base_url=server.url, api_key="pk-wrong") as client, pytest.raises(openai.AuthenticationError) as caught:
        ask(client, "Hi.")
    assert caught.value.code == "invalid_api_key"


def test_a_role_that_may_not(server: Any) -> None:
    with (
        OpenAI(base_url=server.address, api_key=server.keys["desk"]) as client,
        pytest.raises(openai.PermissionDeniedError, match="'admin' is needed"),
    ):
        client.get("/dashboard/figures", cast_to=object)


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


def test_an_unknown_route(client: OpenAI) -> None:
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


# A real model, of `precedent serve` without keys


def test_a_seed_makes_an_answer_the_same(smol: Any) -> None:
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


def test_a_schema_is_followed(smol: Any) -> None:
    with OpenAI(base_url=smol.url, api_key="none") as client:
        found = client.chat.completions.parse(
            model="smollm2", messages=user("Who wrote the first program?"), response_format=Person, temperature=0,
        )  # fmt: skip
    assert isinstance(found.choices[0].message.parsed, Person)
