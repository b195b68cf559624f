"""The events in an answer as it streams in: text, reasoning, and tool calls piece by piece."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True, slots=True)
class TextPiece:
    """Text for the user."""

    text: str


@dataclass(frozen=True, slots=True)
class ReasoningPiece:
    """The model's reasoning before its answer."""

    text: str


@dataclass(frozen=True, slots=True)
class CallBegin:
    """A tool call whose name is known; its arguments follow."""

    name: str


@dataclass(frozen=True, slots=True)
class CallArguments:
    """The next piece of the arguments, as JSON text."""

    json: str


@dataclass(frozen=True, slots=True)
class CallEnd:
    """The call is complete, and its arguments are one JSON object."""


@dataclass(frozen=True, slots=True)
class InvalidCall:
    """A tool call that cannot be parsed: the text as the model wrote it, tags included, and what is wrong with it.

    `rest` is the text after the arguments that were already handed out, None if none were.
    """

    raw: str
    name: str | None
    error: str
    rest: str | None = None


@dataclass(frozen=True, slots=True)
class ParsedCall:
    """A complete tool call."""

    name: str
    arguments: dict[str, Any]


Event = TextPiece | ReasoningPiece | CallBegin | CallArguments | CallEnd | InvalidCall


def joined(events: Iterable[Event]) -> list[Event]:
    """Merge neighbouring events of one kind."""
    result: list[Event] = []
    for event in events:
        last = result[-1] if result else None
        if isinstance(event, TextPiece) and isinstance(last, TextPiece):
            result[-1] = TextPiece(last.text + event.text)
        elif isinstance(event, ReasoningPiece) and isinstance(last, ReasoningPiece):
            result[-1] = ReasoningPiece(last.text + event.text)
        elif isinstance(event, CallArguments) and isinstance(last, CallArguments):
            result[-1] = CallArguments(last.json + event.json)
        else:
            result.append(event)
    return result
