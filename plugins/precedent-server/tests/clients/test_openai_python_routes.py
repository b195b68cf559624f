"""openai-python on the other routes, and on the packaged model behind `precedent serve`."""

from __future__ import annotations

import json
from typing import Any

import pytest
from helpers.openai_questions import ADA, CALL, LOOK_UP, Person, user
from openai import OpenAI

pytestmark = pytest.mark.clients


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
