"""Requests are described on the span that an instrumentation of the server opens around each."""

from __future__ import annotations

from typing import Any

import pytest
from opentelemetry.sdk.trace import ReadableSpan, TracerProvider

TRACER = TracerProvider().get_tracer("test")


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(
    ("path", "asked", "operation"),
    [
        ("/v1/chat/completions", {"messages": [{"role": "user", "content": "secret"}]}, "chat"),
        ("/v1/responses", {"input": "secret"}, "chat"),
        ("/v1/completions", {"prompt": "secret", "max_tokens": 50}, "text_completion"),
    ],
)
async def test_spans(serve: Any, path: str, asked: dict[str, Any], operation: str, stream: bool) -> None:
    client = serve(["a secret"])
    with TRACER.start_as_current_span("request") as span:
        body = {"model": "scripted", "temperature": 0, "stream": stream, **asked}
        assert (await client.post(path, json=body)).status_code == 200
    assert isinstance(span, ReadableSpan)
    told = dict(span.attributes or {})
    expected = {
        "gen_ai.operation.name": operation,
        "gen_ai.request.model": "scripted",
        "gen_ai.request.temperature": 0.0,
        "gen_ai.response.model": "scripted",
        "gen_ai.response.finish_reasons": ("stop",),
        "precedent.speculation.mode": "greedy",
    }
    assert {name: told.get(name) for name in expected} == expected
    assert told["gen_ai.usage.output_tokens"] > 1
    assert "secret" not in str(told)
