"""Ids of tool calls over HTTP: no two calls share one, whoever asks and however often."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from precedent_server.keys import KeyFile, add_key

CALL = '<tool_call>\n{"name": "look_up", "arguments": {"number": "10 €"}}\n</tool_call>'
FUNCTION = {"name": "look_up", "parameters": {"type": "object", "properties": {"number": {"type": "string"}}}}
CHAT = {
    "model": "scripted",
    "messages": [{"role": "user", "content": "Where is it?"}],
    "tools": [{"type": "function", "function": FUNCTION}],
}
RESPONSES = {"model": "scripted", "input": "Where is it?", "tools": [{"type": "function", **FUNCTION}]}


async def chat_ids(client: Any, headers: Any = None, **more: Any) -> list[str]:
    answer = await client.post("/v1/chat/completions", json={**CHAT, **more}, headers=headers)
    assert answer.status_code == 200, answer.text
    if not more.get("stream"):
        return [call["id"] for choice in answer.json()["choices"] for call in choice["message"]["tool_calls"]]
    events = [json.loads(line[6:]) for line in answer.text.split("\n\n") if line.startswith("data: {")]
    deltas = [choice["delta"] for event in events for choice in event["choices"]]
    return [call["id"] for delta in deltas for call in delta.get("tool_calls", ()) if "id" in call]


async def response_ids(client: Any) -> list[str]:
    answer = await client.post("/v1/responses", json=RESPONSES)
    return [item["call_id"] for item in answer.json()["output"] if item["type"] == "function_call"]


async def test_samples_streams_routes_and_repeated_requests_share_no_id(serve: Any) -> None:
    client = serve(lambda prompt: f"{CALL}\n{CALL}")
    ids = await chat_ids(client, n=3)
    for more in ({"seed": 1}, {"seed": 1}, {"seed": 1, "n": 3}, {"temperature": 0}, {"temperature": 0}):
        ids += await chat_ids(client, **more)
        ids += await chat_ids(client, stream=True, **more)
    ids += [*await response_ids(client), *await response_ids(client)]
    assert len(ids) == 6 + 2 * (4 * 2 + 6) + 4
    assert len(set(ids)) == len(ids)


async def test_tenants_share_no_id(serve: Any, path: Path) -> None:
    keys = [add_key(path, tenant, tenant) for tenant in ("shop", "bank")]
    client = serve(lambda prompt: CALL, keys=KeyFile(path))
    ids = [one for key in keys for one in await chat_ids(client, {"Authorization": f"Bearer {key}"}, temperature=0)]
    assert len(set(ids)) == len(ids) == 2
