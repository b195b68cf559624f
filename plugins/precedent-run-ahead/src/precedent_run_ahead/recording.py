"""Converts the parts of a finished chat model call to plain data for an OpenAI-format log."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from langchain_core.messages import AIMessage, BaseMessage, convert_to_openai_messages
from langchain_core.outputs import ChatGeneration, LLMResult
from langchain_core.utils.function_calling import convert_to_openai_tool

Redact = Callable[[str], str]
Plain = dict[str, Any]


def plain_messages(messages: Sequence[BaseMessage]) -> list[Plain]:
    """Messages in OpenAI's format, with full texts and tool calls, but only the kind of images, audio and files."""
    return [_plain(message) for message in messages]


def _plain(message: BaseMessage) -> Plain:
    plain: Plain = convert_to_openai_messages(message)
    if isinstance(plain["content"], list):
        plain["content"] = [
            block
            if isinstance(block, str) or block.get("type") == "text"
            else {"type": block.get("type"), "omitted": True}
            for block in plain["content"]
        ]
    if isinstance(message, AIMessage) and message.invalid_tool_calls:
        broken = [
            {"type": "function", "id": call["id"], "function": {"name": call["name"], "arguments": call["args"] or ""}}
            for call in message.invalid_tool_calls
        ]
        plain["tool_calls"] = [*plain.get("tool_calls", ()), *broken]
    return plain


def answer_of(result: LLMResult) -> AIMessage | None:
    """The message that a call returned; None if there is none."""
    for generation in result.generations[0] if result.generations else ():
        if isinstance(generation, ChatGeneration) and isinstance(generation.message, AIMessage):
            return generation.message
    return None


def plain_tools(parameters: Mapping[str, Any]) -> list[Plain]:
    """A call's tool schemas in OpenAI's format; a schema that cannot be converted stays as it is."""
    found = parameters.get("tools") or parameters.get("functions") or ()
    return [_plain_tool(tool) for tool in found]


def _plain_tool(tool: Any) -> Plain:
    try:
        return dict(convert_to_openai_tool(tool))
    except Exception:  # a provider's built-in tool, such as web search, is not a function
        return dict(tool) if isinstance(tool, Mapping) else {"type": str(tool)}


def model_name(answer: AIMessage, parameters: Mapping[str, Any], metadata: Mapping[str, Any]) -> str | None:
    """The model's name from the provider's answer, else from the request."""
    said = answer.response_metadata
    asked = parameters.get("model") or parameters.get("model_name") or metadata.get("ls_model_name")
    found = said.get("model_name") or said.get("model") or asked
    return str(found) if found else None


def token_usage(answer: AIMessage) -> dict[str, int] | None:
    """Token counts under OpenAI's names; None if the model reported none."""
    usage = answer.usage_metadata
    if usage is None:
        return None
    return {
        "prompt_tokens": usage["input_tokens"],
        "completion_tokens": usage["output_tokens"],
        "total_tokens": usage["total_tokens"],
    }


def prefix_digests(messages: Sequence[Plain]) -> list[bytes]:
    """For each message, a digest of the conversation up to and including it."""
    digests, running = [], hashlib.blake2b(digest_size=16)
    for message in messages:
        functions = [call["function"] for call in message.get("tool_calls") or ()]
        said = (message["role"], message["content"], [(one["name"], one["arguments"]) for one in functions])
        running.update(json.dumps(said, sort_keys=True, default=str).encode())
        digests.append(running.digest())
    return digests


def redacted(message: Plain, redact: Redact) -> Plain:
    """The message with every text and every call's arguments passed through `redact`."""
    changed = {**message, "content": _each_text(message["content"], redact)}
    if message.get("tool_calls"):
        changed["tool_calls"] = [
            {**call, "function": {**call["function"], "arguments": _each_text(call["function"]["arguments"], redact)}}
            for call in message["tool_calls"]
        ]
    return changed


def _each_text(value: Any, redact: Redact) -> Any:
    if isinstance(value, str):
        return redact(value)
    if isinstance(value, list):
        return [_each_text(part, redact) for part in value]
    if isinstance(value, Mapping):
        return {key: part if key == "type" else _each_text(part, redact) for key, part in value.items()}
    return value
