"""Reading one region of calls, character by character, so that no split of the text can change what is found."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol

from precedent.text.stop import partial_match
from precedent.text.tool_formats.events import CallArguments, CallBegin, CallEnd, Event, InvalidCall
from precedent.text.tool_formats.json_scanner import dump_json, escaped_in_string


class CallReader(Protocol):
    """Reads one region: a call or a list of calls, from behind its opening tag to behind its closing one."""

    rejected: bool
    """Whether the region was no call at all; what came back is text."""

    def feed(self, char: str) -> str | None:
        """Take a character. None while the region goes on, else the text at its end that belongs to what follows."""

    def finish(self) -> str | None:
        """End the region with the answer. Returns the text that turned out not to belong to it, None if all did."""

    def take(self) -> list[Event]:
        """The events since the last time."""


class CallLog:
    """What one region's calls have come to: the events, and what of the current call was handed out already."""

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
        """The JSON text that was handed out."""
        return "".join(self._written)

    def begin(self, name: str) -> None:
        """The call has a name and goes to the caller from here on."""
        self.name, self.begun = name, True
        self._mark = len(self.raw)
        self.events.append(CallBegin(name))

    def write(self, json_text: str, held: int = 0) -> None:
        """Hand out JSON text, which stands for all raw text but the last `held` characters."""
        self._written.append(json_text)
        self._mark = len(self.raw) - held
        self.events.append(CallArguments(json_text))

    def write_pair(self, key: str, value: Any) -> None:
        """Hand out one argument. Raises ValueError for what JSON cannot carry."""
        self.write(f"{', ' if self._written else '{'}{dump_json(key)}: {dump_json(value)}")

    def end(self) -> None:
        """The call is complete."""
        self.events.append(CallEnd())
        self._start_over()

    def end_pairs(self) -> None:
        """The last argument was written."""
        self.write("}" if self._written else "{}")
        self.end()

    def fail(self, error: object) -> None:
        """The call cannot be read."""
        rest = "".join(self.raw[self._mark :]) if self.begun else None
        self.events.append(InvalidCall("".join(self.raw), self.name, f"this is no tool call: {error}", rest))
        self._start_over()


class LoggedReader:
    """A reader that keeps its raw text and events in a `CallLog`; `head` is what opened the region."""

    rejected = False

    def __init__(self, head: str) -> None:
        self._log = CallLog(head)

    def take(self) -> list[Event]:
        """The events since the last time."""
        events, self._log.events = self._log.events, []
        return events


class StringWriter:
    """Hands out a text as the inside of a JSON string while it is written, but for what may begin one of its `ends`."""

    def __init__(self, log: CallLog, ends: Sequence[str]) -> None:
        self._log, self._ends = log, ends
        self._held = ""
        self._started = False

    def step(self, char: str, skip: str = "") -> bool:
        """Take a character (not a first one that is to `skip`); True once an end is complete."""
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
    """A character of plain text inside a JSON string."""
    return f"\\{char}" if char in '"\\' else escaped_in_string(char)


def held_tail(text: str, tags: Sequence[str]) -> int:
    """How many of the last characters may be the beginning of a tag."""
    return max((partial_match(text, tag) for tag in tags), default=0)
