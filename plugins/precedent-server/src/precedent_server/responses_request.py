"""Reads a body of `/v1/responses` by writing it as one of `/v1/chat/completions`."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

from openai.types.responses.response_create_params import ResponseCreateParamsBase

from precedent_server.bodies import Keys, checked
from precedent_server.chat_request import ChatRequest, chat_request
from precedent_server.errors import ApiError
from precedent_server.history import own_items
from precedent_server.settings import ServerLimits

KEYS = Keys(
    ResponseCreateParamsBase,
    required=("model", "input"),
    supported=(
        *("input", "instructions", "model", "max_output_tokens", "temperature", "top_p", "tools", "tool_choice"),
        *("parallel_tool_calls", "text", "reasoning", "truncation", "background", "include", "top_logprobs"),
        "stream_options",
    ),
    own={
        **{"stream": bool, "input": str | list[Any], "tools": list[dict[str, Any]], "text": dict[str, Any]},
        **{"tool_choice": str | dict[str, Any], "include": list[str], "speculation": bool | dict[str, Any]},
    },
    instead={
        "previous_response_id": "nothing is kept between requests: send the whole conversation as input",
        "conversation": "nothing is kept between requests: send the whole conversation as input",
        "prompt": "there are no stored prompts: send instructions and input",
        "max_tool_calls": "tools run at the client: count there",
    },
)

_NESTED = {"text": ("format", "verbosity"), "reasoning": ("effort", "summary", "generate_summary")}
"""Keys that may stand within others. A summary of the reasoning is never made: all of it is in the answer."""

_TEXT_OF = {"input_text": "text", "output_text": "text", "text": "text", "refusal": "refusal"}
"""The key of a part's text, by the part's type."""

_ROLES = ("system", "developer", "user")
"""Who else than the assistant speaks in messages; tools answer in items of their own."""

_CHAT_NAMES = {"messages": "input", "max_completion_tokens": "max_output_tokens", "response_format": "text"}
"""Keys of a chat completion, each with the one of this route that it was made of."""


def responses_request(body: Mapping[str, Any], limits: ServerLimits) -> ChatRequest:
    """Read a parsed body. Raises ApiError that names the key of this route."""
    said = checked(body, KEYS)
    if said.get("background"):
        raise ApiError("an answer is sent while it is written: leave background out", param="background")
    if unknown := set(said.get("include", ())) - {"message.output_text.logprobs", "reasoning.encrypted_content"}:
        raise ApiError(f"include={min(unknown)!r} is not supported", param="include", code="unsupported_value")
    for name, known in _NESTED.items():
        if unknown := said.get(name, {}).keys() - known:
            raise ApiError(f"{name}.{min(unknown)} is not supported; known: {known[0]}", param=name)
    if said.get("text", {}).get("verbosity", "medium") != "medium":
        raise ApiError("text.verbosity is not supported: say in the prompt how long the answer should be", param="text")
    same = ("model", "temperature", "top_p", "parallel_tool_calls", "stream", "speculation", "top_logprobs")
    chat = {name: said[name] for name in same if name in said}
    if "top_logprobs" in said or "message.output_text.logprobs" in said.get("include", ()):
        chat["logprobs"] = True
    if "max_output_tokens" in said:
        chat["max_completion_tokens"] = said["max_output_tokens"]
    if said.get("tools"):
        chat["tools"] = [_tool(tool) for tool in said["tools"]]
    if "tool_choice" in said:
        chat["tool_choice"] = _choice(said["tool_choice"])
    if effort := said.get("reasoning", {}).get("effort"):
        chat["reasoning_effort"] = effort
    if wanted := said.get("text", {}).get("format"):
        chat["response_format"] = _format(wanted)
    num_foreign = 0 if isinstance(said["input"], str) else own_items(said["input"])[1]
    chat["messages"] = messages_of(said["input"], said.get("instructions"))
    try:
        asked = chat_request(chat, limits)
        renamed = {name: _CHAT_NAMES.get(key, key) for name, key in asked.renamed.items()}
        return replace(asked, num_ignored=asked.num_ignored + num_foreign, renamed=renamed)
    except ApiError as error:
        error.error.param = _CHAT_NAMES.get(error.error.param or "", error.error.param)
        raise


def _tool(tool: Mapping[str, Any]) -> dict[str, Any]:
    if tool.get("type") != "function":
        raise ApiError(f"a tool of type {tool.get('type')!r} is not supported: use functions", param="tools")
    return {"type": "function", "function": {name: part for name, part in tool.items() if name != "type"}}


def _choice(choice: Any) -> Any:
    if not isinstance(choice, Mapping):
        return choice
    if choice.get("type") == "allowed_tools":
        tools = [_tool(tool) for tool in choice.get("tools") or () if isinstance(tool, Mapping)]
        return {"type": "allowed_tools", "allowed_tools": {"mode": choice.get("mode", "auto"), "tools": tools}}
    if choice.get("type") != "function":
        raise ApiError(f"tool_choice of type {choice.get('type')!r} is not supported", param="tool_choice")
    return {"type": "function", "function": {"name": choice.get("name")}}


def _format(wanted: Any) -> Any:
    """The format in a chat completion's words, which nest a schema one level deeper."""
    if isinstance(wanted, Mapping) and wanted.get("type") == "json_schema":
        return {
            "type": "json_schema",
            "json_schema": {name: part for name, part in wanted.items() if name != "type"},
        }
    return wanted


def messages_of(given: str | Sequence[Any], instructions: Any = None) -> list[dict[str, Any]]:
    """The input's items as messages: calls that follow each other belong to one assistant's turn."""
    begun = [] if instructions is None else [{"role": "system", "content": instructions}]
    items = [{"role": "user", "content": given}] if isinstance(given, str) else list(_turns(given))
    return [*begun, *items]


def _turns(items: Sequence[Any]) -> Iterator[dict[str, Any]]:
    turn: dict[str, Any] | None = None
    for position, item in own_items(items)[0]:
        if not isinstance(item, Mapping):
            raise ApiError(f"input[{position}] must be an object", param="input")
        kind = item.get("type", "message")
        if kind in ("function_call", "reasoning") or (kind == "message" and item.get("role") == "assistant"):
            turn = turn or {"role": "assistant", "content": ""}
            _add(turn, item, kind)
            continue
        if turn is not None:
            yield turn
            turn = None
        if kind == "function_call_output":
            content = _content(item.get("output"))
            yield {"role": "tool", "tool_call_id": item.get("call_id"), "content": content}
        elif kind == "message" and item.get("role") not in _ROLES:
            raise ApiError(f"input[{position}].role must be one of assistant, {', '.join(_ROLES)}", param="input")
        elif kind == "message":
            yield {"role": item["role"], "content": _content(item.get("content"))}
        else:
            raise ApiError(f"input[{position}] of type {kind!r} is not supported", param="input")
    if turn is not None:
        yield turn


def _add(turn: dict[str, Any], item: Mapping[str, Any], kind: Any) -> None:
    """Add a call, a thought or a text to an assistant's turn."""
    if kind == "function_call":
        function = {"name": item.get("name"), "arguments": item.get("arguments")}
        turn.setdefault("tool_calls", []).append({"id": item.get("call_id"), "type": "function", "function": function})
    elif kind == "reasoning":
        said = "".join(str(part.get("text", "")) for part in item.get("content") or () if isinstance(part, Mapping))
        if said:
            turn["reasoning_content"] = turn.get("reasoning_content", "") + said
    else:
        content = _content(item.get("content") or "")
        turn["content"] += content if isinstance(content, str) else "".join(part["text"] for part in content)


def _content(content: Any) -> Any:
    """Parts in a chat completion's words; anything else is for its checks to refuse."""
    if not isinstance(content, list):
        return content
    parts = []
    for part in content:
        kind = part.get("type") if isinstance(part, Mapping) else None
        text = part.get(_TEXT_OF[kind]) if kind in _TEXT_OF else None
        if not isinstance(text, str):
            raise ApiError(f"a part of type {kind!r} is not supported: only text is read", param="input")
        parts.append({"type": "text", "text": text})
    return parts
