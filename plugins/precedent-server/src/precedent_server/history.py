"""Reads the messages of a conversation as clients send them back.

Clients echo what they, other servers and small models have written. What no chat template shows is ignored and counted;
what would change the prompt is checked.
"""

from __future__ import annotations

import json
import typing
from typing import Any

from langchain_core.messages import AIMessage, BaseMessage, InvalidToolCall, convert_to_messages
from langchain_core.messages.tool import invalid_tool_call

from precedent.langchain.exceptions import input_in_our_words
from precedent.runtime.plain_values import shown
from precedent.text.tool_formats.json_text import ARGUMENTS, load_json, seal_of
from precedent_server.bodies import MESSAGE_KINDS, MOST_MESSAGES, check_most, fits, unsupported, without_nulls
from precedent_server.errors import ApiError

_READ = {"assistant": ("reasoning_content", "annotations", "speculation", "function_call"), "tool": ("name",)}
"""Keys of messages that are no keys of OpenAI's types, but part of a conversation, or of our own answers."""

_UNREAD = ("audio",)
"""Keys of OpenAI's types that no chat template shows."""


def read_messages(given: Any) -> tuple[list[BaseMessage], int]:
    """The messages, and the number of their parts that were ignored. Raises ApiError that names the message."""
    if not isinstance(given, list) or not given:
        raise ApiError("messages must be a list of at least one message", param="messages")
    check_most("messages", given, MOST_MESSAGES, "messages")
    messages, num_ignored = list[BaseMessage](), 0
    for position, message in enumerate(given):
        place = f"messages[{position}]"
        said, ignored = _known_part(message, place)
        num_ignored += ignored
        broken = list[InvalidToolCall]()
        if said["role"] == "assistant":
            num_ignored += _complete_assistant(said, place)
            _check_calls(said["tool_calls"], f"{place}.tool_calls")
            broken = _without_broken_calls(said)
        elif said["role"] == "tool":
            said = {"content": "", "tool_call_id": "", **said}
        elif "content" not in said:
            raise ApiError(f"{place}.content is missing", param=f"{place}.content")
        if isinstance(said["content"], dict):  # an empty one would pass as a list of no parts
            raise ApiError(f"{place}.content must be a text or a list of parts", param=f"{place}.content")
        fits(said, MESSAGE_KINDS[said["role"]], place)
        _check_parts(said["content"], place)
        said.pop("refusal", None)
        with input_in_our_words():
            (read,) = convert_to_messages([said])
        if isinstance(read, AIMessage):
            read.invalid_tool_calls += broken
        messages.append(read)
    return messages, num_ignored


def _known_part(message: Any, place: str) -> tuple[dict[str, Any], int]:
    """The keys of a message that are read, and the number of others."""
    role = message.get("role") if isinstance(message, dict) else None
    role = "tool" if role == "function" else role  # the result of a `function_call`, which has no id
    if not isinstance(role, str) or role not in MESSAGE_KINDS:
        raise ApiError(f"{place}.role must be one of {', '.join(MESSAGE_KINDS)}", param=f"{place}.role")
    said = without_nulls(message) | {"role": role}
    known = {*typing.get_type_hints(MESSAGE_KINDS[role]), *_READ.get(role, ())} - set(_UNREAD)
    return {key: part for key, part in said.items() if key in known}, len(said.keys() - known)


def _check_parts(content: Any, place: str) -> None:
    """Raise ApiError for a part of a content that is no text."""
    for number, part in enumerate(content if isinstance(content, list) else ()):
        if part["type"] != "text":
            where = f"{place}.content[{number}]"
            raise unsupported(f"{where} is of type {shown(part['type'])}: only text is read", where)


def _check_calls(calls: Any, place: str) -> None:
    """Raise ApiError for calls that are no list, empty ones too, or that call no function."""
    if not isinstance(calls, list):
        raise ApiError(f"{place} must be a list", param=place)
    for number, call in enumerate(calls):
        kind = call.get("type") if isinstance(call, dict) else None
        if kind not in ("function", None):
            raise unsupported(f"{place}[{number}] is of type {shown(kind)}: only functions are called", place)


def _complete_assistant(said: dict[str, Any], place: str) -> int:
    """Bring the older and looser forms of an assistant's message into today's; return the number of parts ignored."""
    ignored = 0
    if isinstance(said.get("content"), list):
        parts = [_text_part(part) for part in said["content"]]
        said["content"] = [part for part in parts if part is not None]
        ignored = parts.count(None)
    if said.get("content") in (None, "", []):
        said["content"] = said.get("refusal", "")
    called = said.pop("function_call", None)
    if called is not None:
        _check_function(called, f"{place}.function_call")
    if said.get("tool_calls") in (None, []):
        said["tool_calls"] = [] if called is None else [{"function": called}]
    return ignored


def _check_function(called: Any, place: str) -> None:
    """Raise ApiError for a `function_call` that is none, also beside the calls that are read in its place."""
    if not isinstance(called, dict):
        raise ApiError(f"{place} must be an object", param=place)
    if not isinstance(called.get("name"), str):
        raise ApiError(f"{place}.name must be a text", param=f"{place}.name")
    if not isinstance(called.get("arguments", ""), str | dict):
        raise ApiError(f"{place}.arguments must be a JSON text or an object", param=f"{place}.arguments")


def _text_part(part: Any) -> Any:
    """A part of an assistant's content, None for one that is no text, such as another provider's thoughts."""
    if not isinstance(part, dict) or part.get("type") in ("text", None):
        return part
    if part["type"] == "refusal" and isinstance(part.get("refusal"), str):
        return {"type": "text", "text": part["refusal"]}
    return None


def _without_broken_calls(said: dict[str, Any]) -> list[InvalidToolCall]:
    """Complete the calls of a message, and take out those whose arguments are no JSON object: they go back as text."""
    if not isinstance(said.get("tool_calls"), list):
        return []
    whole, broken = list[Any](), list[InvalidToolCall]()
    for call in said.pop("tool_calls"):
        function = call.get("function") if isinstance(call, dict) else None
        if not isinstance(function, dict) or not all(
            isinstance(name, str) for name in (function.get("name"), call.get("id", ""))
        ):
            whole.append(call)  # for the check of its type to refuse
            continue
        function = dict(function)
        text = _arguments_text(function.get("arguments"))
        if text is None:
            written = function["arguments"]
            seal = seal_of(written, ARGUMENTS) if written.lstrip().startswith("{") else ""
            broken.append(invalid_tool_call(name=function["name"], args=written + seal, id=None, error=None))
            continue
        function["arguments"] = text
        whole.append({"type": "function", "id": "", **call, "function": function})
    if whole:
        said["tool_calls"] = whole
    return broken


def _arguments_text(arguments: Any) -> Any:
    """The arguments as the JSON text of an object; None for a text that is none."""
    if isinstance(arguments, dict):
        return json.dumps(arguments, ensure_ascii=False)
    if arguments is None or (isinstance(arguments, str) and not arguments.strip()):
        return "{}"
    if not isinstance(arguments, str):
        return arguments
    try:
        found = load_json(arguments)
    except (ValueError, RecursionError):
        return None
    return arguments if isinstance(found, dict) else "{}" if found is None else None
