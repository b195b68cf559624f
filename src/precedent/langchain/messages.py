"""LangChain messages as plain dicts: role, content (a text), tool_calls, invalid_calls, reasoning_content, name."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from langchain_core.messages import (
    AIMessage,
    BaseMessage,
    ChatMessage,
    FunctionMessage,
    ToolMessage,
    convert_to_messages,
)

from precedent.errors import PromptError, UnsupportedError
from precedent.langchain.wording import input_in_our_words
from precedent.runtime.plain_values import shown
from precedent.text.history import Message
from precedent.text.prompt import ROLES

_ROLE_OF_TYPE = {"system": "system", "human": "user", "ai": "assistant", "tool": "tool", "function": "tool"}
_TEXT_BLOCKS = frozenset({"text", "input_text", "output_text", "text-plain"})
_REASONING_BLOCKS = frozenset({"thinking", "reasoning", "redacted_thinking"})
_CALL_BLOCKS = frozenset({"tool_use", "tool_call", "tool_call_chunk", "invalid_tool_call"})
"""Blocks that mostly repeat the entries of `tool_calls`."""

_ARGUMENTS_OF = {"tool_use": "input", "tool_call": "args"}
"""The key of a call's arguments in Anthropic's blocks and in LangChain's."""


def template_messages_of(given: Iterable[Any]) -> list[Message]:
    """Convert a text, or messages in any form that LangChain accepts. Raises PromptError for anything else."""
    with input_in_our_words():
        messages = convert_to_messages([given] if isinstance(given, str) else given)
    return to_template_messages(messages)


def to_template_messages(messages: Sequence[BaseMessage]) -> list[Message]:
    """Convert the messages of one request.

    Anthropic's `tool_use` and `tool_result` blocks become tool calls and tool turns. The reasoning of earlier turns
    goes into `reasoning_content`. Raises PromptError for an empty list or an unknown role, UnsupportedError for
    images, audio and files.
    """
    if not messages:
        raise PromptError("the message list is empty: give at least one message")
    converted: list[Message] = []
    for position, message in enumerate(messages, start=1):
        converted += _converted(message, position)
    return _with_tool_names(converted)


def _converted(message: BaseMessage, position: int) -> list[Message]:
    role = _role_of(message, position)
    if isinstance(message, AIMessage):
        return [_assistant_turn(message, position)]
    if role == "tool":
        return [_tool_turn(message, position)]
    results = [
        _tool_result(block, position) for block in _blocks(message.content) if block.get("type") == "tool_result"
    ]
    content = _text_of(message.content, position)
    if results and not content:
        return results
    return [*results, _turn(role, content, message.name)]


def _role_of(message: BaseMessage, position: int) -> str:
    role = message.role if isinstance(message, ChatMessage) else message.type
    role = _ROLE_OF_TYPE.get(role.removesuffix("MessageChunk").lower(), role)
    role = "system" if role == "developer" else role
    if role not in ROLES:
        raise PromptError(f"message {position} has role {role!r}: use one of {', '.join(ROLES)}")
    return role


def _turn(role: str, content: str, name: str | None) -> Message:
    return {"role": role, "content": content, **({"name": name} if name else {})}


def _assistant_turn(message: AIMessage, position: int) -> Message:
    turn = _turn("assistant", _text_of(message.content, position), message.name)
    calls = [_call(call["name"], call["args"], call["id"]) for call in message.tool_calls]
    known = {call["id"] for call in calls}
    for block in _blocks(message.content):
        if block.get("type") in _ARGUMENTS_OF and block.get("id") not in known:
            calls.append(_called_in_a_block(block, position))
    broken = [
        {"name": call["name"], "args": call["args"] or "", **({"id": call["id"]} if call["id"] else {})}
        for call in message.invalid_tool_calls
    ]
    reasoning = _reasoning_of(message)
    return {
        **turn,
        **({"tool_calls": calls} if calls else {}),
        **({"invalid_calls": broken} if broken else {}),
        **({"reasoning_content": reasoning} if reasoning else {}),
    }


def _call(name: str, arguments: Mapping[str, Any], call_id: str | None) -> dict[str, Any]:
    return {"type": "function", "id": call_id or "", "function": {"name": name, "arguments": dict(arguments)}}


def _called_in_a_block(block: Mapping[str, Any], position: int) -> dict[str, Any]:
    name, arguments = block.get("name"), block.get(_ARGUMENTS_OF[str(block["type"])]) or {}
    if not isinstance(name, str) or not isinstance(arguments, Mapping):
        raise PromptError(f"message {position} holds a tool call without a name, or with arguments that are not a dict")
    return _call(name, arguments, block.get("id"))


def _reasoning_of(message: AIMessage) -> str:
    said = [block.get("thinking") or block.get("reasoning") or "" for block in _blocks(message.content)]
    return "".join(said) or str(message.additional_kwargs.get("reasoning_content") or "")


def _tool_turn(message: BaseMessage, position: int) -> Message:
    failed = isinstance(message, ToolMessage) and message.status == "error"
    turn = _turn("tool", _result_text(_text_of(message.content, position), failed), message.name)
    if isinstance(message, ToolMessage):
        turn["tool_call_id"] = message.tool_call_id
    elif isinstance(message, FunctionMessage):
        turn["tool_call_id"] = ""
    return turn


def _tool_result(block: Mapping[str, Any], position: int) -> Message:
    """An Anthropic `tool_result` block as a turn of its own."""
    content = _result_text(_text_of(block.get("content") or "", position), bool(block.get("is_error")))
    return {"role": "tool", "content": content, "tool_call_id": block.get("tool_use_id") or ""}


def _result_text(text: str, failed: bool) -> str:
    """Mark a failed result in its text, because templates have no error status."""
    return f"Error: {text}" if failed and not text.lower().startswith("error") else text


def _blocks(content: Any) -> list[Mapping[str, Any]]:
    return [block for block in content if isinstance(block, Mapping)] if isinstance(content, list) else []


def _text_of(content: Any, position: int) -> str:
    """The text of a message's content; other blocks are handled elsewhere or refused by name."""
    if isinstance(content, str):
        return content
    if not isinstance(content, list):
        raise PromptError(f"message {position} has content={shown(content)}, which is neither a text nor a list")
    return "".join(block if isinstance(block, str) else _block_text(block, position) for block in content)


def _block_text(block: Mapping[str, Any], position: int) -> str:
    kind = block.get("type")
    if kind in _TEXT_BLOCKS:
        return str(block.get("text") or "")
    if kind in _REASONING_BLOCKS or kind in _CALL_BLOCKS or kind == "tool_result":
        return ""
    if kind == "json":
        return json.dumps(block.get("json"), ensure_ascii=False)
    raise UnsupportedError(f"message {position} holds a block of type {kind!r}: only text is read; put it into words")


def _with_tool_names(messages: list[Message]) -> list[Message]:
    """Fill in the tool's name of each result from its call, because some templates print it."""
    names = {call["id"]: call["function"]["name"] for turn in messages for call in turn.get("tool_calls") or ()}
    for turn in messages:
        if turn["role"] == "tool" and "name" not in turn and names.get(turn.get("tool_call_id")):
            turn["name"] = names[turn["tool_call_id"]]
    return messages
