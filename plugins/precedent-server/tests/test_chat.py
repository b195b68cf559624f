"""`/v1/chat/completions`: what comes back, whole and streamed, is what the model was asked for and wrote."""

from __future__ import annotations

import json
from typing import Any

import pytest
from openai.types.chat import ChatCompletion, ChatCompletionChunk

HELLO = [{"role": "user", "content": "Hello?"}]
CALL = '<tool_call>\n{"name": "look_up", "arguments": {"number": "10 €"}}\n</tool_call>'
TOOL = {
    "type": "function",
    "function": {
        "name": "look_up",
        "parameters": {"type": "object", "properties": {"number": {"type": "string"}}, "required": ["number"]},
    },
}


def asked(**more: Any) -> dict[str, Any]:
    return {"model": "scripted", "messages": HELLO, "temperature": 0, **more}


async def whole(client: Any, **more: Any) -> ChatCompletion:
    answer = await client.post("/v1/chat/completions", json=asked(**more))
    assert answer.status_code == 200, answer.text
    return ChatCompletion.model_validate(answer.json())


async def streamed(client: Any, **more: Any) -> list[ChatCompletionChunk]:
    answer = await client.post("/v1/chat/completions", json=asked(stream=True, **more))
    assert answer.status_code == 200, answer.text
    events = answer.text.split("\n\n")
    assert events[-2:] == ["data: [DONE]", ""]
    return [ChatCompletionChunk.model_validate(json.loads(event.removeprefix("data: "))) for event in events[:-2]]


async def test_an_answer(serve: Any) -> None:
    completion = await whole(serve(["Good morning."]), logprobs=True)
    (choice,) = completion.choices
    assert choice.message.content == "Good morning."
    assert (choice.finish_reason, choice.index, choice.message.role) == ("stop", 0, "assistant")
    assert completion.usage is not None
    assert choice.logprobs is not None
    assert completion.usage.completion_tokens == len(choice.logprobs.content or ())
    assert completion.speculation["num_steps"] >= 1  # type: ignore[attr-defined]


async def test_a_stream_says_the_same(serve: Any) -> None:
    chunks = await streamed(serve(["Good morning, Zoë!"]), stream_options={"include_usage": True})
    assert chunks[0].choices[0].delta.role == "assistant"
    assert "".join(chunk.choices[0].delta.content or "" for chunk in chunks if chunk.choices) == "Good morning, Zoë!"
    assert [chunk.choices[0].finish_reason for chunk in chunks if chunk.choices][-1] == "stop"
    assert chunks[-1].choices == []
    assert chunks[-1].usage is not None
    assert all(chunk.usage is None for chunk in chunks[:-1])
    assert len({chunk.id for chunk in chunks}) == 1


@pytest.mark.parametrize("stream", [False, True])
async def test_tool_calls(serve: Any, stream: bool) -> None:
    client = serve([f"Let me see.{CALL}\n{CALL}"])
    if not stream:
        choice = (await whole(client, tools=[TOOL])).choices[0]
        calls = [(call.function.name, call.function.arguments, call.id) for call in choice.message.tool_calls or ()]
        reason, text = choice.finish_reason, choice.message.content
    else:
        chunks = await streamed(client, tools=[TOOL])
        deltas = [delta for chunk in chunks for delta in chunk.choices[0].delta.tool_calls or ()]
        heads = [delta for delta in deltas if delta.id]
        assert [head.index for head in heads] == [0, 1]
        calls = [
            (
                head.function.name,
                "".join(delta.function.arguments for delta in deltas if delta.index == head.index),
                head.id,
            )
            for head in heads
        ]
        reason = chunks[-1].choices[0].finish_reason
        text = "".join(chunk.choices[0].delta.content or "" for chunk in chunks)
    assert [(name, json.loads(arguments)) for name, arguments, _ in calls] == [("look_up", {"number": "10 €"})] * 2
    assert len({call_id for *_, call_id in calls}) == 2
    assert (reason, text) == ("tool_calls", "Let me see.")


async def test_several_answers(serve: Any) -> None:
    client = serve(["one", "two", "three"])
    found = {choice.index: choice.message.content for choice in (await whole(client, n=3)).choices}
    assert sorted(found) == [0, 1, 2]
    assert sorted(found.values()) == ["one", "three", "two"]


async def test_several_streamed_answers(serve: Any) -> None:
    chunks = await streamed(serve(["one", "two"]), n=2, stream_options={"include_usage": True})
    texts = {0: "", 1: ""}
    for chunk in chunks:
        for choice in chunk.choices:
            texts[choice.index] += choice.delta.content or ""
    assert sorted(texts.values()) == ["one", "two"]


async def test_log_probabilities(serve: Any) -> None:
    completion = await whole(serve(["ab"]), logprobs=True, top_logprobs=2)
    told = completion.choices[0].logprobs
    assert told is not None
    assert told.content is not None
    assert [one.token for one in told.content][:2] == ["a", "b"]
    assert all(len(one.top_logprobs) == 2 for one in told.content)
    chunks = await streamed(serve(["ab"]), logprobs=True, top_logprobs=2)
    streamed_tokens = [
        one.token
        for chunk in chunks
        if chunk.choices[0].logprobs is not None
        for one in chunk.choices[0].logprobs.content or ()
    ]
    assert streamed_tokens == [one.token for one in told.content]


async def test_a_prediction_is_counted_and_not_billed(serve: Any) -> None:
    text = "The order is sent on Monday, and arrives on Thursday."
    completion = await whole(serve([text]), prediction={"type": "content", "content": text}, logprobs=True)
    assert completion.usage is not None
    details = completion.usage.completion_tokens_details
    assert details is not None
    assert details.accepted_prediction_tokens is not None
    assert details.accepted_prediction_tokens > 10
    told = completion.choices[0].logprobs
    assert told is not None
    assert completion.usage.completion_tokens == len(told.content or ())


async def test_stop_and_length(serve: Any) -> None:
    assert (await whole(serve(["one. two."]), stop=". ")).choices[0].message.content == "one"
    cut = await whole(serve(["one. two."]), max_completion_tokens=3)
    assert cut.usage is not None
    assert (cut.usage.completion_tokens, cut.choices[0].finish_reason) == (3, "length")
    assert "one. two.".startswith(cut.choices[0].message.content or "nothing")


async def test_a_failed_request_says_nothing_about_the_process(serve: Any) -> None:
    """The grammar does not allow what the script wants to write."""
    answer = await serve(["no JSON"]).post("/v1/chat/completions", json=asked(response_format={"type": "json_object"}))
    assert answer.status_code == 500
    assert answer.json()["error"]["message"] == "the server failed to answer this request; its log says why"
