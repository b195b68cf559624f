"""What an answer holds, event by event as it streams in, and the base of what reads its calls.

A region of calls is read character by character, so that the result does not depend on how the text is split.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Generator, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from precedent.text.assembly import partial_match
from precedent.text.tool_formats.json_text import dump_json, escaped_in_string


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


Tools = Sequence[Mapping[str, Any]]
"""OpenAI function dicts."""


Reading = Generator[None, str, str]
"""Takes characters; returns the text that belongs to what follows the region."""


class EndOfAnswer(Exception):
    """Raised in a reading where the answer ends within the region."""


class CallReader(ABC):
    """Reads one region, a call or a list of calls, from after its opening tag to the end of its closing tag.

    `head` is the text that opened the region. `rejected` says that it turned out not to be a call; the text that was
    handed back is then plain text.
    """

    rejected = False

    def __init__(self, head: str) -> None:
        self._log = CallLog(head)
        self._reading = self._read()
        next(self._reading)

    @abstractmethod
    def _read(self) -> Reading:
        """Read the region; `EndOfAnswer` is raised in it where the answer ends."""

    def feed(self, char: str) -> str | None:
        """Take a character. Returns None inside the region, and at its end the text that belongs to what follows."""
        self._log.raw.append(char)
        try:
            self._reading.send(char)
        except StopIteration as end:
            return str(end.value)
        return None

    def finish(self) -> str:
        """End the region with the answer. Returns the text that turned out not to belong to it."""
        try:
            self._reading.throw(EndOfAnswer())
        except StopIteration as end:
            return str(end.value)
        raise AssertionError("a reading goes on after the end of its answer")

    def take(self) -> list[Event]:
        """Return the events since the last call, and forget them."""
        events, self._log.events = self._log.events, []
        return events


class CallLog:
    """The events of one region's calls, and how much of the current call was already handed out."""

    def __init__(self, head: str) -> None:
        self.events: list[Event] = []
        self._start_over(head)

    def _start_over(self, head: str = "") -> None:
        self.raw: list[str] = [head]
        self.name: str | None = None
        self.begun = False
        self._written: list[str] = []
        self._mark = 0

    @property
    def written(self) -> str:
        """The JSON text handed out so far."""
        return "".join(self._written)

    def begin(self, name: str) -> None:
        """Begin a call whose name is known; from here on it is handed to the caller."""
        self.name, self.begun = name, True
        self._mark = len(self.raw)
        self.events.append(CallBegin(name))

    def write(self, json_text: str, held: int = 0) -> None:
        """Hand out JSON text, which covers all raw text except the last `held` characters."""
        self._written.append(json_text)
        self._mark = len(self.raw) - held
        self.events.append(CallArguments(json_text))

    def write_pair(self, key: str, value: Any) -> None:
        """Hand out one argument. Raises ValueError if JSON cannot represent its value."""
        self.write(f"{', ' if self._written else '{'}{dump_json(key)}: {dump_json(value)}")

    def end(self) -> None:
        """End a complete call."""
        self.events.append(CallEnd())
        self._start_over()

    def end_pairs(self) -> None:
        """End a call after its last argument."""
        self.write("}" if self._written else "{}")
        self.end()

    def fail(self, error: object) -> None:
        """End a call that cannot be parsed."""
        rest = "".join(self.raw[self._mark :]) if self.begun else None
        self.events.append(InvalidCall("".join(self.raw), self.name, f"this is not a tool call: {error}", rest))
        self._start_over()


class StringWriter:
    """Streams a text as the inside of a JSON string, holding back what may be the start of one of its `ends`."""

    def __init__(self, log: CallLog, ends: Sequence[str]) -> None:
        self._log, self._ends = log, ends
        self._held = ""
        self._started = False

    def step(self, char: str, skip: str = "") -> bool:
        """Take a character, ignoring a first one that equals `skip`; True once an end is complete."""
        started, self._started = self._started, True
        if not started and char == skip:
            return False
        self._held += char
        end = next((end for end in self._ends if self._held.endswith(end)), "")
        self._show(len(end) if end else held_tail(self._held, self._ends))
        return bool(end)

    def _show(self, keep: int) -> None:
        ready = len(self._held) - keep
        if ready:
            self._log.write("".join(map(escaped_for_json, self._held[:ready])), keep)
            self._held = self._held[ready:]


def escaped_for_json(char: str) -> str:
    """A plain-text character as it is written inside a JSON string."""
    return f"\\{char}" if char in '"\\' else escaped_in_string(char)


def held_tail(text: str, tags: Sequence[str]) -> int:
    """Number of characters at the end that may be the start of a tag."""
    return max((partial_match(text, tag) for tag in tags), default=0)
