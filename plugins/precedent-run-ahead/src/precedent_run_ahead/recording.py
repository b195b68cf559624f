"""Messages and tools of LangChain as plain data in OpenAI's format."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from langchain_core.messages import AIMessage, BaseMessage, convert_to_openai_messages
from langchain_core.utils.function_calling import convert_to_openai_tool

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


def plain_tools(parameters: Mapping[str, Any]) -> list[Plain]:
    """A call's tool schemas in OpenAI's format; a schema that cannot be converted stays as it is."""
    found = parameters.get("tools") or parameters.get("functions") or ()
    return [_plain_tool(tool) for tool in found]


def _plain_tool(tool: Any) -> Plain:
    try:
        return dict(convert_to_openai_tool(tool))
    except Exception:  # a provider's built-in tool, such as web search, is not a function
        return dict(tool) if isinstance(tool, Mapping) else {"type": str(tool)}
