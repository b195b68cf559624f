"""What a conversation holds at the moment: what was said, what tools were asked and what they answered.

Messages are in OpenAI's form: `{"role", "content", "tool_calls", "tool_call_id"}`.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from precedent_run_ahead.actions.calls import Call, leaves

Message = Mapping[str, Any]

SAID = "user"
"""The event of a user's message among the names of called tools."""

ANSWERED = "assistant"
"""The event of an answer that calls nothing."""

_WORD = re.compile(r"\w+")


@dataclass(frozen=True, slots=True)
class Result:
    """A tool's answer: which tool, the text, and the text read as JSON or None."""

    tool: str
    text: str
    value: Any


class Live:
    """The messages that the model is about to answer."""

    def __init__(self, messages: Sequence[Message]) -> None:
        self._messages = messages

    @cached_property
    def calls(self) -> list[Call]:
        """All calls so far, oldest first."""
        return [call for message in self._messages for call in calls_of(message)]

    @cached_property
    def events(self) -> list[str]:
        """The course of the conversation: names of called tools, and who spoke."""
        found: list[str] = []
        for message in self._messages:
            role, names = message["role"], [call.name for call in calls_of(message)]
            found += names or ([SAID] if role == "user" else [ANSWERED] if role == "assistant" else [])
        return found

    @cached_property
    def said(self) -> list[str]:
        """The user's messages, latest first."""
        return [text_of(message) for message in reversed(self._messages) if message["role"] == "user"]

    @cached_property
    def results(self) -> list[Result]:
        """The tools' answers, latest first."""
        names = {
            call.get("id"): call.get("function", {}).get("name", "")
            for message in self._messages
            for call in message.get("tool_calls") or ()
        }
        answers = [message for message in self._messages if message["role"] == "tool"]
        return [
            Result(
                str(message.get("name") or names.get(message.get("tool_call_id")) or ""),
                text_of(message),
                read(text_of(message)),
            )
            for message in reversed(answers)
        ]

    @cached_property
    def _trusted(self) -> set[str]:
        spoken = [text_of(message) for message in self._messages if message["role"] in ("user", "system", "developer")]
        return words(" ".join(spoken))

    @cached_property
    def _reported(self) -> set[str]:
        return words(" ".join(result.text for result in self.results))

    def from_tools(self, call: Call) -> bool:
        """Whether a word of the call's arguments stands in a tool's answer, and in no user's or system's message."""
        values = [leaf for value in call.arguments.values() for leaf in leaves(value)]
        texts = [str(value) for value in values if value is not None and not isinstance(value, bool)]
        return bool((words(" ".join(texts)) & self._reported) - self._trusted)


def calls_of(message: Message) -> list[Call]:
    """The calls in an assistant's message whose arguments are a JSON object."""
    found = []
    for call in message.get("tool_calls") or ():
        function = call.get("function", {})
        written = function.get("arguments")
        arguments = read(written) if isinstance(written, str) else written
        if isinstance(arguments, dict):
            found.append(Call(str(function.get("name")), arguments))
    return found


def text_of(message: Message) -> str:
    """A message's text; of content blocks, that of the text blocks."""
    content = message.get("content") or ""
    if isinstance(content, str):
        return content
    return "\n".join(str(part.get("text", "")) for part in content if isinstance(part, Mapping))


def read(text: str) -> Any:
    """A text read as JSON; None if it is none."""
    try:
        return json.loads(text)
    except (ValueError, RecursionError):
        return None


def words(text: str) -> set[str]:
    """The words and numbers of a text, in lower case."""
    return {word.lower() for word in _WORD.findall(text)}
