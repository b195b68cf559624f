"""A server that answers from a script over `httpx.MockTransport`, to requests whose whole body is as expected."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

import httpx

from precedent_server.client import ChatPrecedentServer

SPECULATION = {
    "mode": "greedy",
    "lossless": True,
    "num_steps": 3,
    "accepted_by_source": {"recall": 4},
    "tokens_per_step": 2.333,
    "latency_microseconds": {"time_to_first_token": 81},
}
USAGE = {
    "prompt_tokens": 11,
    "completion_tokens": 7,
    "total_tokens": 18,
    "prompt_tokens_details": {"cached_tokens": 5},
    "completion_tokens_details": {"reasoning_tokens": 2, "accepted_prediction_tokens": 3},
}
USAGE_METADATA = {
    "input_tokens": 11,
    "output_tokens": 7,
    "total_tokens": 18,
    "input_token_details": {"cache_read": 5},
    "output_token_details": {"reasoning": 2, "accepted_prediction": 3},
}
HELLO: dict[str, Any] = {
    "model": "smol",
    "messages": [{"role": "user", "content": "hello"}],
    "temperature": 0.0,
    "max_completion_tokens": 512,
}
"""The body of `invoke("hello")` with the default settings."""

STREAMED = {"stream": True, "stream_options": {"include_usage": True}}


def completion(finish_reason: str = "stop", **message: Any) -> dict[str, Any]:
    """A whole answer, with speculation and usage."""
    choice = {"index": 0, "finish_reason": finish_reason, "logprobs": None}
    return {
        "id": "chatcmpl-1",
        "object": "chat.completion",
        "created": 1,
        "model": "smol",
        "choices": [{**choice, "message": {"role": "assistant", "content": None, **message}}],
        "usage": USAGE,
        "speculation": SPECULATION,
    }


def chunks(*deltas: Mapping[str, Any], finish_reason: str = "stop") -> list[dict[str, Any]]:
    """A streamed answer: the role, the deltas, the reason for its end, and at last usage and speculation."""
    shared = {"id": "chatcmpl-1", "object": "chat.completion.chunk", "created": 1, "model": "smol"}
    said = [{"role": "assistant", "content": ""}, *deltas, {}]
    ends = [None] * (len(said) - 1) + [finish_reason]
    choices = [[{"index": 0, "delta": delta, "finish_reason": end}] for delta, end in zip(said, ends, strict=True)]
    found = [{**shared, "choices": choice, "usage": None} for choice in choices]
    return [*found, {**shared, "choices": [], "usage": USAGE, "speculation": SPECULATION}]


class FakeServer:
    """Answers each expected body with its answer (a completion, or a list of chunks), and refuses every other one."""

    def __init__(self, *script: tuple[Mapping[str, Any], Any]) -> None:
        self.script = [(json.loads(json.dumps(body)), answer) for body, answer in script]
        self.requests: list[httpx.Request] = []

    @property
    def bodies(self) -> list[Any]:
        return [json.loads(request.content) for request in self.requests]

    def __call__(self, request: httpx.Request) -> httpx.Response:
        self.requests.append(request)
        body = json.loads(request.content)
        answer = next((answer for expected, answer in self.script if expected == body), None)
        if answer is None:
            expected = [expected for expected, _ in self.script]
            return httpx.Response(400, json={"error": {"message": f"asked {body}, expected one of {expected}"}})
        return answer if isinstance(answer, httpx.Response) else _response(answer)

    def client(self, **fields: Any) -> ChatPrecedentServer:
        """A chat model whose requests arrive here."""
        transport = httpx.MockTransport(self)
        given = {"model": "smol", "base_url": "http://server", "max_retries": 0, **fields}
        return ChatPrecedentServer(
            http_client=httpx.Client(transport=transport),
            http_async_client=httpx.AsyncClient(transport=transport),
            **given,
        )


class Echo(FakeServer):
    """Answers everything, to look at what was asked."""

    def __call__(self, request: httpx.Request) -> httpx.Response:
        self.requests.append(request)
        streamed = json.loads(request.content).get("stream")
        return _response(chunks({"content": "hi"}) if streamed else completion(content="hi"))

    def body_of(self, text: Any = "hello", fields: Mapping[str, Any] | None = None, **call: Any) -> dict[str, Any]:
        """The body that a call sends."""
        self.client(**(fields or {})).invoke(text, **call)
        found: dict[str, Any] = self.bodies[-1]
        return found


def _response(answer: Mapping[str, Any] | Sequence[Any]) -> httpx.Response:
    if isinstance(answer, Mapping):
        return httpx.Response(200, json=answer)
    events = [*(json.dumps(chunk) for chunk in answer), "[DONE]"]
    text = "".join(f"data: {event}\n\n" for event in events)
    return httpx.Response(200, headers={"content-type": "text/event-stream"}, text=text)
