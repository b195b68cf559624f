"""Choices among some of the tools, and tools that run at another provider."""

from __future__ import annotations

import json
from typing import Any

import pytest

CHAT, RESPONSES = "/v1/chat/completions", "/v1/responses"
CALL = '<tool_call>\n{"name": "refund", "arguments": {"number": "7"}}\n</tool_call>'


def tools(path: str, *names: str) -> list[dict[str, Any]]:
    parameters = {"type": "object", "properties": {"number": {"type": "string"}}, "required": ["number"]}
    found = [{"name": name, "parameters": parameters} for name in names]
    return [{"type": "function", **(one if path == RESPONSES else {"function": one})} for one in found]


def allowed(path: str, mode: str, *names: str) -> dict[str, Any]:
    named = [
        {"type": "function", **({"name": one} if path == RESPONSES else {"function": {"name": one}})} for one in names
    ]
    choice = {"mode": mode, "tools": named}
    return {"type": "allowed_tools", **(choice if path == RESPONSES else {"allowed_tools": choice})}


def body(path: str, **more: Any) -> dict[str, Any]:
    asked = {"input": "hi"} if path == RESPONSES else {"messages": [{"role": "user", "content": "hi"}]}
    return {"model": "scripted", **asked, "tools": tools(path, "look_up", "refund", "cancel"), **more}


@pytest.mark.parametrize("path", [CHAT, RESPONSES])
@pytest.mark.parametrize("mode", ["auto", "required"])
async def test_only_the_allowed_tools_are_shown_and_the_mode_holds(serve: Any, path: str, mode: str) -> None:
    prompts = list[str]()
    client = serve(lambda prompt: prompts.append(prompt) or CALL)
    answer = await client.post(path, json=body(path, tool_choice=allowed(path, mode, "refund", "cancel")))
    assert answer.status_code == 200, answer.text
    assert '"refund"' in prompts[0]
    assert '"cancel"' in prompts[0]
    assert '"look_up"' not in prompts[0]
    assert "refund" in json.dumps(answer.json()["output" if path == RESPONSES else "choices"])


@pytest.mark.parametrize("path", [CHAT, RESPONSES])
async def test_a_required_call_among_the_allowed_tools_is_forced(serve: Any, path: str) -> None:
    client = serve(lambda prompt: "I would rather talk.", may_stray=True)
    limit = {"max_output_tokens" if path == RESPONSES else "max_tokens": 200}
    answer = await client.post(path, json=body(path, tool_choice=allowed(path, "required", "refund"), **limit))
    assert '"refund"' in answer.text, answer.text


@pytest.mark.parametrize("path", [CHAT, RESPONSES])
@pytest.mark.parametrize(("mode", "names"), [("auto", ("other",)), ("auto", ()), ("sometimes", ("refund",))])
async def test_a_choice_that_allows_nothing_known_is_refused(client: Any, path: str, mode: str, names: Any) -> None:
    answer = await client.post(path, json=body(path, tool_choice=allowed(path, mode, *names)))
    assert (answer.status_code, answer.json()["error"]["param"]) == (400, "tool_choice"), answer.text


@pytest.mark.parametrize("path", [CHAT, RESPONSES])
@pytest.mark.parametrize("kind", ["web_search_2025_08_26", "web_search_preview", "code_interpreter", "mcp", "custom"])
async def test_a_tool_that_the_client_does_not_run_is_refused_by_name(client: Any, path: str, kind: str) -> None:
    answer = await client.post(path, json=body(path, tools=[*tools(path, "refund"), {"type": kind, "name": "x"}]))
    error = answer.json()["error"]
    assert (answer.status_code, error["param"]) == (400, "tools"), answer.text
    assert repr(kind) in error["message"]
