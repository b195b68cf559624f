"""`/openapi.json` says what the routes take and answer, out of the tables that they use themselves."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from jsonschema import Draft202012Validator

from precedent_server.description import ROUTES
from precedent_server.keys import KeyFile, add_key

HELLO = [{"role": "user", "content": "Hello?"}]
TOOL = {"type": "function", "name": "look_up"}
CALL = '<tool_call>\n{"name": "look_up", "arguments": {}}\n</tool_call>'

REQUESTS: list[tuple[str, dict[str, Any]]] = [
    ("/v1/chat/completions", {"messages": HELLO}),
    ("/v1/chat/completions", {"messages": HELLO, "logprobs": True, "top_logprobs": 1, "n": 2}),
    ("/v1/chat/completions", {"messages": HELLO, "tools": [{"type": "function", "function": {"name": "look_up"}}]}),
    ("/v1/chat/completions", {"messages": []}),
    ("/v1/completions", {"prompt": ["a", "b"], "logprobs": 1}),
    ("/v1/completions", {"prompt": "a", "best_of": 2}),
    ("/v1/responses", {"input": "Hello?"}),
    ("/v1/responses", {"input": "Hello?", "tools": [TOOL], "tool_choice": {"type": "function", "name": "look_up"}}),
    ("/v1/responses", {"input": "Hello?", "tool_choice": None, "parallel_tool_calls": None, "text": None}),
    ("/v1/responses", {"input": "Hello?", "background": True}),
    ("/v1/embeddings", {"input": ["a", "b"]}),
    ("/v1/embeddings", {"input": "a", "encoding_format": "base64"}),
    ("/v1/embeddings", {"input": ""}),
    ("/api/chat", {"messages": HELLO, "stream": False, "logprobs": True}),
    (
        "/api/chat",
        {"messages": HELLO, "stream": False, "tools": [{"type": "function", "function": {"name": "look_up"}}]},
    ),
    ("/api/chat", {"messages": HELLO, "options": {"top_p": 2}}),
    ("/api/generate", {"prompt": "Hello?", "stream": False, "no_key_of_ollama": 1}),
    ("/api/generate", {}),
    ("/api/embed", {"input": ["a", "b"]}),
    ("/api/embeddings", {"prompt": "a"}),
    ("/v1/completions", {"prompt": "a", "logprobs": 1, "echo": True, "max_tokens": 0}),
    ("/tokenize", {"prompt": "a", "return_token_strs": True}),
    ("/detokenize", {"tokens": [65]}),
    ("/detokenize", {"tokens": "a"}),
    ("/v1/messages", {"messages": HELLO, "max_tokens": 50}),
    ("/v1/messages", {"messages": HELLO, "max_tokens": 50, "tools": [{"name": "look_up", "input_schema": {}}]}),
    ("/v1/messages", {"messages": HELLO}),
    ("/v1/messages/count_tokens", {"messages": HELLO}),
]


async def described(client: Any, **asked: Any) -> dict[str, Any]:
    answer = await client.get("/openapi.json", **asked)
    assert answer.status_code == 200, answer.text
    found: dict[str, Any] = answer.json()
    return found


def check(told: dict[str, Any], value: Any, schema: dict[str, Any]) -> None:
    Draft202012Validator({**schema, "components": told["components"]}).validate(value)


def schema_of_answer(told: dict[str, Any], method: str, path: str, status: int) -> dict[str, Any]:
    answers = told["paths"][path][method]["responses"]
    found: dict[str, Any] = answers["200" if status == 200 else f"{status // 100}XX"]["content"]
    return found["application/json"]["schema"]  # type: ignore[no-any-return]


@pytest.mark.parametrize(("path", "body"), REQUESTS)
async def test_answers_are_of_the_type_described(serve: Any, path: str, body: dict[str, Any]) -> None:
    client = serve(lambda prompt: CALL if '"name": "look_up"' in prompt else "x")
    told = await described(client)
    answer = await client.post(path, json={"model": "scripted", **body})
    assert answer.status_code in (200, 400), answer.text
    check(told, answer.json(), schema_of_answer(told, "post", path, answer.status_code))


async def test_a_conversation_is_described_by_role(client: Any) -> None:
    told = await described(client)
    body = told["paths"]["/v1/chat/completions"]["post"]["requestBody"]["content"]["application/json"]["schema"]
    check(told, {"model": "scripted", "messages": HELLO}, body)
    called = {"role": "assistant", "tool_calls": [{"function": {"name": "look_up", "arguments": {"number": 1}}}]}
    parts = {"role": "assistant", "content": [{"type": "refusal"}, {"type": "thinking", "thinking": "Hm."}, None]}
    result = {"role": "function", "name": "look_up", "content": "sent"}
    check(told, {"model": "scripted", "messages": [*HELLO, called, parts, result]}, body)
    for wrong in ([], [{"role": "nobody", "content": "Hello?"}], [{"role": "user"}], "Hello?"):
        assert not Draft202012Validator({**body, "components": told["components"]}).is_valid(
            {"model": "scripted", "messages": wrong}
        )


async def test_keys_are_described_where_they_are_needed(serve: Any, client: Any, path: Path) -> None:
    key = add_key(path, "desk", "shop")
    guarded = serve(["x"], keys=KeyFile(path))
    assert (await guarded.get("/openapi.json")).status_code == 401
    told = await described(guarded, headers={"Authorization": f"Bearer {key}"})
    needs = {path: "security" in operation for path, one in told["paths"].items() for operation in one.values()}
    assert needs == {path: path != "/health" for path in ROUTES}
    assert told["components"]["securitySchemes"] == {
        "bearer": {"type": "http", "scheme": "bearer"},
        "x-api-key": {"type": "apiKey", "in": "header", "name": "x-api-key"},
    }
    assert "securitySchemes" not in (await described(client))["components"]
