"""The `anthropic` package: messages, streams, a tool loop, counted tokens, models, and errors as its exceptions."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import anthropic
import pytest
from pydantic import BaseModel

pytestmark = pytest.mark.clients

CALL = '<tool_call>\n{"name": "look_up", "arguments": {"number": "1042"}}\n</tool_call>'
ADA = '{"name": "Ada", "born": 1815}'
LOOK_UP: Any = {
    "name": "look_up",
    "description": "Looks an order up.",
    "input_schema": {"type": "object", "properties": {"number": {"type": "string"}}, "required": ["number"]},
}


class Person(BaseModel):
    name: str
    born: int


def asked(text: str, **more: Any) -> dict[str, Any]:
    return {"model": "echo", "max_tokens": 500, "messages": [{"role": "user", "content": text}], **more}


@pytest.fixture
def client(server: Any) -> Iterator[anthropic.Anthropic]:
    with anthropic.Anthropic(base_url=server.address, api_key=server.keys["desk"], max_retries=0) as client:
        yield client


def test_create(client: anthropic.Anthropic) -> None:
    message = client.messages.create(**asked("Where is order 1042?", system="Be brief."))
    assert [block.to_dict() for block in message.content] == [{"type": "text", "text": "Where is order 1042?"}]
    assert (message.stop_reason, message.stop_sequence, message.model) == ("end_turn", None, "echo")
    assert message.usage.input_tokens > 0 < message.usage.output_tokens
    assert message._request_id
    stopped = client.messages.create(**asked("Count to 9", stop_sequences=[" 7"]))
    assert (stopped.stop_reason, stopped.stop_sequence) == ("stop_sequence", " 7")
    assert client.messages.create(**asked("Count to 9", max_tokens=3)).stop_reason == "max_tokens"


def test_stream_helper(client: anthropic.Anthropic) -> None:
    with client.messages.stream(**asked("Count to 9")) as stream:
        assert "".join(stream.text_stream) == "1 2 3 4 5 6 7 8 9"
        final = stream.get_final_message()
    assert final.stop_reason == "end_turn"
    assert final.usage.input_tokens + (final.usage.cache_read_input_tokens or 0) > 0
    kinds = [event.type for event in client.messages.create(**asked("Hi."), stream=True)]
    assert (kinds[0], kinds[-1]) == ("message_start", "message_stop")


async def test_async_stream(server: Any) -> None:
    settings = asked("Think before you answer.", model="scripted-model")
    client = anthropic.AsyncAnthropic(base_url=server.address, auth_token=server.keys["desk"])
    async with client, client.messages.stream(**settings) as stream:
        final = await stream.get_final_message()
    thought, text = final.content
    assert (thought.type, text.type) == ("thinking", "text")
    assert thought.thinking == "Is it a bun?"
    assert final.usage.output_tokens_details is not None
    assert final.usage.output_tokens_details.thinking_tokens > 0


@pytest.mark.parametrize("stream", [False, True])
def test_tool_loop(client: anthropic.Anthropic, stream: bool) -> None:
    settings = asked(CALL, tools=[LOOK_UP])
    if stream:
        with client.messages.stream(**settings) as events:
            message = events.get_final_message()
    else:
        message = client.messages.create(**settings)
    (call,) = message.content
    assert (call.type, call.name, call.input) == ("tool_use", "look_up", {"number": "1042"})
    assert message.stop_reason == "tool_use"
    result = {"type": "tool_result", "tool_use_id": call.id, "content": [{"type": "text", "text": "sent on Monday"}]}
    messages = [*settings["messages"], message.to_param(), {"role": "user", "content": [result]}]
    after = client.messages.create(**{**settings, "messages": messages})
    assert "sent on Monday" in after.content[0].text


@pytest.mark.parametrize("choice", [{"type": "any"}, {"type": "tool", "name": "look_up"}])
def test_forced_call(client: anthropic.Anthropic, choice: Any) -> None:
    message = client.messages.create(**asked(CALL, tools=[LOOK_UP], tool_choice=choice))
    assert message.content[0].name == "look_up"


def test_parsed_answer(client: anthropic.Anthropic) -> None:
    message = client.messages.parse(**asked(ADA), output_format=Person)
    assert message.parsed_output == Person(name="Ada", born=1815)


def test_cache_reads_and_counted_tokens(client: anthropic.Anthropic) -> None:
    system: Any = [{"type": "text", "text": "Be brief. " * 100, "cache_control": {"type": "ephemeral"}}]
    settings = asked("Hello there.", system=system, tools=[LOOK_UP])
    client.messages.create(**settings)
    usage = client.messages.create(**settings).usage
    assert usage.cache_read_input_tokens is not None
    assert usage.cache_read_input_tokens > 100
    del settings["max_tokens"]
    counted = client.messages.count_tokens(**settings).input_tokens
    assert counted == usage.input_tokens + usage.cache_read_input_tokens


def test_models(client: anthropic.Anthropic) -> None:
    assert [model.id for model in client.models.list()] == ["echo", "scripted-model", "other-model"]
    assert client.models.retrieve("echo").display_name == "echo"


def test_errors_are_exceptions_of_their_kind(client: anthropic.Anthropic, server: Any) -> None:
    stranger = anthropic.Anthropic(base_url=server.address, api_key="pk-wrong", max_retries=0)
    refused: list[tuple[Any, type[anthropic.APIStatusError], str]] = [
        (lambda: client.messages.create(**asked("Hi.", max_tokens=0)), anthropic.BadRequestError, "max_tokens: "),
        (
            lambda: client.messages.create(**asked("Hi.", stream=True, extra_body={"top_k": -1})),
            anthropic.BadRequestError,
            "top_k: ",
        ),
        (lambda: client.messages.create(**asked("Hi.", model="claude")), anthropic.NotFoundError, "no model 'claude'"),
        (client.messages.batches.list, anthropic.NotFoundError, "Not Found"),
        (lambda: client.models.retrieve("claude"), anthropic.NotFoundError, "no model 'claude'"),
        (lambda: stranger.messages.create(**asked("Hi.")), anthropic.AuthenticationError, "needs an API key"),
    ]
    for ask, kind, message in refused:
        with pytest.raises(kind, match=message) as error:
            ask()
        assert error.value.type is not None
        assert error.value.request_id
