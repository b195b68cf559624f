"""LangChain messages as plain dicts: role, content (a text), tool_calls, invalid_calls, reasoning_content, name.

A history may hold messages that another provider's model wrote. Their text, reasoning and calls are read in every
provider's form; blocks that only their provider can use (server tools and their results, cache points, signatures) are
dropped, with one warning for each kind.
"""

from __future__ import annotations

import json
import logging
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, Literal, get_args

from langchain_core.messages import (
    AIMessage,
    BaseMessage,
    ChatMessage,
    FunctionMessage,
    ToolMessage,
    convert_to_messages,
)
from langchain_core.messages.tool import invalid_tool_call
from langchain_core.prompt_values import PromptValue

from precedent.errors import ConfigError, PromptError, UnsupportedError
from precedent.langchain.exceptions import input_in_our_words
from precedent.runtime.plain_values import check_plain, shown
from precedent.text.history import Message
from precedent.text.prompt import ROLES

log = logging.getLogger(__name__)

Media = Literal["refuse", "placeholder"]
"""What to do with images, audio, video and files: refuse them by name, or put a short text in their place."""

_ROLE_OF_TYPE = {
    **{"system": "system", "developer": "system", "human": "user", "ai": "assistant"},
    **{"tool": "tool", "function": "tool"},
}
_TEXT_BLOCKS = {
    **dict.fromkeys(("text", "input_text", "output_text", "text-plain", "guard_content"), "text"),
    "refusal": "refusal",
}
"""Blocks of text, and the key of their text."""

_REASONING_BLOCKS = ("thinking", "reasoning", "reasoning_content", "redacted_thinking")
_TEXT_KEYS = ("text", "reasoning", "thinking", "reasoning_content", "content", "summary")
"""Keys under which providers put the text of a thought, best first."""

_CALL_BLOCKS = {
    "tool_use": ("id", "input"),
    "tool_call": ("id", "args"),
    "function_call": ("call_id", "arguments"),
    "custom_tool_call": ("call_id", "input"),
    "invalid_tool_call": ("id", "args"),
}
"""Blocks of calls, each with the keys of the call's id and arguments; they mostly repeat entries of `tool_calls`."""

_SILENT_BLOCKS = (*_REASONING_BLOCKS, *_CALL_BLOCKS, "tool_call_chunk", "input_json_delta")
"""Blocks whose text is not content; the last two are pieces of calls, which `tool_calls` holds as a whole."""

_MEDIA_BLOCKS = {
    **dict.fromkeys(("image", "image_url", "input_image", "image_file"), "image"),
    **dict.fromkeys(("audio", "input_audio"), "audio"),
    **dict.fromkeys(("video", "video_url"), "video"),
    **dict.fromkeys(("file", "input_file", "document", "media", "pdf"), "file"),
}
_ANY_ARGUMENT = "__arg1"
"""LangChain's name for the argument of a tool that takes any text."""


def media_of(settings: Mapping[str, Any], own: Media) -> Media:
    """A call's `media`, or else the model's own. Raises ConfigError for another value."""
    given: Media = settings.get("media", own)
    if given not in get_args(Media):
        raise ConfigError(f"media={shown(given)} must be 'refuse' or 'placeholder'")
    return given


# Messages as dicts


def template_messages_of(given: Iterable[Any], *, media: Media = "refuse") -> list[Message]:
    """Convert a text, or messages in any form that LangChain accepts, also as logs and clients write them.

    Raises PromptError for anything else, and what `to_template_messages` raises.
    """
    with input_in_our_words():
        messages = convert_to_messages([given] if isinstance(given, str) else map(completed, given))
    return to_template_messages(messages, media=media)


def checked_input(convert: Callable[[Any], PromptValue], given: Any) -> PromptValue:
    """A model's input as `convert` reads it. Raises PromptError, also for text or nesting that cannot be a prompt."""
    with input_in_our_words():
        prompt = convert(list(map(completed, given)) if isinstance(given, list | tuple) else given)
    for position, message in enumerate(prompt.to_messages(), start=1):  # before LangChain traverses them
        check_plain(f"message {position}", dict(message), PromptError)
    return prompt


def completed(message: Any) -> Any:
    """A dict in OpenAI's form with the fields that LangChain requires and others omit; anything else as it is.

    A missing `content` is empty, as are missing arguments; a call whose arguments are not a JSON object is invalid.
    """
    if not isinstance(message, Mapping) or not isinstance(message.get("role"), str):
        return message
    complete = {**message, "content": message.get("content") or ""}
    if message["role"] in ("tool", "function"):
        complete |= {"role": "tool", "tool_call_id": message.get("tool_call_id") or ""}
    whole, broken = list[Any](), list[Any]()
    for call in complete.pop("tool_calls", None) or ():
        function = call.get("function") if isinstance(call, Mapping) else None
        if not isinstance(function, Mapping):
            whole.append(call)
            continue
        given, call_id = function.get("arguments") or "{}", call.get("id") or ""
        arguments = given if isinstance(given, str) else json.dumps(given, ensure_ascii=False)
        if _json_object(arguments) is None:
            broken.append(invalid_tool_call(name=function.get("name"), args=arguments, id=call_id, error=None))
        else:
            function = {**function, "arguments": arguments}
            whole.append({**call, "type": "function", "id": call_id, "function": function})
    if whole:
        complete["tool_calls"] = whole
    if not broken:
        return complete
    (written,) = convert_to_messages([complete])
    return written.model_copy(update={"invalid_tool_calls": broken})


def _json_object(text: str) -> dict[str, Any] | None:
    try:
        found = json.loads(text)
    except (ValueError, RecursionError):
        return None
    return found if isinstance(found, dict) else None


# Messages as turns


def to_template_messages(messages: Sequence[BaseMessage], *, media: Media = "refuse") -> list[Message]:
    """Convert the messages of one request.

    Calls and results in content blocks (Anthropic's, OpenAI's Responses, LangChain's) become tool calls and tool turns.
    The reasoning of earlier turns goes into `reasoning_content`. With `media="placeholder"` a short text replaces
    images, audio, video and files. Raises PromptError for an empty list or an unknown role, UnsupportedError for media,
    and for blocks of a user's or a tool's message that are not read.
    """
    if not messages:
        raise PromptError("the message list is empty: give at least one message")
    turns: list[Message] = []
    for position, message in enumerate(messages, start=1):
        turns += _Reader(position, _role_of(message, position), media).turns(message)
    names = {call["id"]: call["function"]["name"] for turn in turns for call in turn.get("tool_calls") or ()}
    for turn in turns:  # some templates print the tool's name beside its result
        if turn["role"] == "tool" and "name" not in turn and names.get(turn.get("tool_call_id")):
            turn["name"] = names[turn["tool_call_id"]]
    return turns


def _role_of(message: BaseMessage, position: int) -> str:
    role = message.role if isinstance(message, ChatMessage) else message.type
    role = _ROLE_OF_TYPE.get(role.removesuffix("MessageChunk").lower(), role)
    if role not in ROLES:
        raise PromptError(f"message {position} has role {role!r}: use one of {', '.join(ROLES)}")
    return role


@dataclass(frozen=True, slots=True)
class _Reader:
    """Reads one message, the one at `position` (from 1), as turns of a chat template."""

    position: int
    role: str
    media: Media

    def turns(self, message: BaseMessage) -> list[Message]:
        """The turns that the message becomes; a user's message may hold tool results, which are turns of their own."""
        check_plain(f"message {self.position}", message.content, PromptError)
        blocks = self._blocks(message.content)
        turn: Message = {"role": self.role, "content": self._text(blocks)}
        if message.name:
            turn["name"] = message.name
        if self.role == "assistant":
            extra = message.additional_kwargs
            reasoning = "".join(_written(block) for block in blocks if _kind(block) in _REASONING_BLOCKS)
            reasoning = reasoning or _written(extra.get("reasoning_content")) or _written(extra.get("reasoning"))
            turn["content"] = turn["content"] or _written(extra.get("refusal"))
            found = {**self._calls(message, blocks), "reasoning_content": reasoning}
            return [turn | {key: value for key, value in found.items() if value}]
        if self.role == "tool":
            failed = isinstance(message, ToolMessage) and message.status == "error"
            turn["content"] = result_text(turn["content"], failed)
            if isinstance(message, ToolMessage | FunctionMessage):
                turn["tool_call_id"] = getattr(message, "tool_call_id", "")
            return [turn]
        results = list[Message]()
        for block in blocks:
            if _kind(block) == "tool_result":
                text = self._text(self._blocks(block.get("content") or ""))
                content = result_text(text, bool(block.get("is_error")))
                results.append({"role": "tool", "content": content, "tool_call_id": block.get("tool_use_id") or ""})
        return results if results and not turn["content"] else [*results, turn]

    def _calls(self, message: BaseMessage, blocks: Sequence[Mapping[str, Any]]) -> dict[str, list[dict[str, Any]]]:
        """The calls and the broken calls of an assistant's message; most providers write each one twice."""
        own = list[Mapping[str, Any]]()
        if isinstance(message, AIMessage):
            own += [{**call, "type": "tool_call"} for call in message.tool_calls]
            own += [{**call, "type": "invalid_tool_call"} for call in message.invalid_tool_calls]
        written = [block for block in blocks if _kind(block) in _CALL_BLOCKS]
        legacy = message.additional_kwargs.get("function_call")
        if isinstance(legacy, Mapping) and not (own or written):
            written = [{"type": "function_call", **legacy}]
        known, calls, broken = {call.get("id") or "" for call in own}, list[dict[str, Any]](), list[dict[str, Any]]()
        for number, block in enumerate([*own, *written]):
            id_key, arguments_key = _CALL_BLOCKS[_kind(block)]
            name, ids = block.get("name"), (block.get(id_key), block.get("id"))
            call_id = next((one for one in ids if isinstance(one, str) and one), "")
            if number >= len(own) and call_id in known:
                continue
            arguments = _arguments(_kind(block), block.get(arguments_key))
            if isinstance(arguments, str):
                broken.append({"name": name, "args": arguments, **({"id": call_id} if call_id else {})})
            elif isinstance(name, str) and isinstance(arguments, Mapping):
                function = {"name": name, "arguments": dict(arguments)}
                calls.append({"type": "function", "id": call_id, "function": function})
            else:
                raise PromptError(
                    f"message {self.position} holds a tool call without a name, or with arguments that are not a dict"
                )
        return {"tool_calls": calls, "invalid_calls": broken}

    def _blocks(self, content: Any) -> list[Mapping[str, Any]]:
        """A message's content as blocks, each its provider's own: LangChain may wrap it in a `non_standard` one."""
        if not isinstance(content, str | list):
            raise PromptError(
                f"message {self.position} has content={shown(content)}, which is neither a text nor a list"
            )
        blocks = list[Mapping[str, Any]]()
        for part in [content] if isinstance(content, str) else content:
            block = {"type": "text", "text": part} if isinstance(part, str) else part
            inner = block.get("value") if block.get("type") == "non_standard" else None
            blocks.append(inner if isinstance(inner, Mapping) else block)
        return blocks

    def _text(self, blocks: Iterable[Mapping[str, Any]]) -> str:
        return "".join(map(self._block_text, blocks))

    def _block_text(self, block: Mapping[str, Any]) -> str:
        kind = _kind(block)
        if kind in _TEXT_BLOCKS:
            return _written(block.get(_TEXT_BLOCKS[kind]))
        if kind == "json":
            return json.dumps(block.get("json"), ensure_ascii=False, default=str)
        if kind == "search_result":
            return "\n".join(filter(None, (_written(block.get(key)) for key in ("title", "source", "content"))))
        if kind in _SILENT_BLOCKS or (kind == "tool_result" and self.role in ("user", "system")):
            return ""
        if kind == "document" and (text := _document_text(block)):
            return text
        if kind in _MEDIA_BLOCKS and self.media == "placeholder":
            return f"[{_MEDIA_BLOCKS[kind]} omitted: this model reads text only]"
        if kind not in _MEDIA_BLOCKS and (self.role == "assistant" or kind in ("cachePoint", "cache_point")):
            _warn_of_dropped(kind)
            return ""
        instead = ', or give the chat model media="placeholder"' if kind in _MEDIA_BLOCKS else ""
        raise UnsupportedError(
            f"message {self.position} holds a block of type {kind!r}: only text is read; put it into words{instead}"
        )


@lru_cache(maxsize=256)
def _warn_of_dropped(kind: str) -> None:
    log.warning("blocks of type %s are left out of the prompt: only the provider that wrote them can use them", kind)


def _arguments(kind: str, given: Any) -> Any:
    if kind == "custom_tool_call":
        return {_ANY_ARGUMENT: given}
    if kind == "invalid_tool_call":
        return str(given or "")
    if isinstance(given, str) and given:
        found = _json_object(given)
        return given if found is None else found
    return given or {}


def result_text(text: str, failed: bool) -> str:
    """Mark a failed result in its text, because templates have no error status."""
    return f"Error: {text}" if failed and not text.lower().startswith("error") else text


def _kind(block: Mapping[str, Any]) -> str:
    """The block's type; Bedrock writes it as the block's only key."""
    kind = block.get("type")
    return kind if isinstance(kind, str) else str(next(iter(block), ""))


def _written(value: Any) -> str:
    """The text in a text, in a dict that holds one, or in a list of either."""
    if isinstance(value, str):
        return value
    if isinstance(value, list):
        return "".join(map(_written, value))
    if isinstance(value, Mapping):
        return next(filter(None, (_written(value.get(key)) for key in _TEXT_KEYS)), "")
    return ""


def _document_text(block: Mapping[str, Any]) -> str:
    source = block.get("source")
    if not isinstance(source, Mapping) or source.get("type") not in ("text", "content"):
        return ""
    return _written(source.get("data") or source.get("content"))
