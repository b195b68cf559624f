"""Tool calls in the Hermes format, parsed while the text streams in.

    <tool_call>
    {"name": "look_up_order", "arguments": {"number": "1042"}}
    </tool_call>

Whatever the model writes, parsing raises nothing: a call that cannot be read becomes an `InvalidCall` that keeps the
text. The events, adjacent texts joined, are the same under every split of the text.
"""

from __future__ import annotations

import json
import re
from dataclasses import dataclass, field
from typing import Any, NoReturn

from precedent.text.stop import partial_match

OPEN, CLOSE = "<tool_call>", "</tool_call>"
_BOUNDARY = re.compile(f"{CLOSE}|{OPEN}")
_STRING = re.compile(r'"(?:[^"\\]|\\.)*"', re.DOTALL)
_NAME = re.compile(r'"name"\s*:\s*"([^"\\]+)"')


@dataclass(frozen=True, slots=True)
class Text:
    """Text outside of tool calls."""

    text: str


@dataclass(frozen=True, slots=True)
class ParsedCall:
    """A complete tool call."""

    name: str
    arguments: dict[str, Any]


@dataclass(frozen=True, slots=True)
class InvalidCall:
    """A tool call that cannot be read: the text as the model wrote it, tags included, and what is wrong with it."""

    raw: str
    name: str | None
    error: str


Event = Text | ParsedCall | InvalidCall


@dataclass(slots=True)
class ToolCallParser:
    """Splits streamed text into text and tool calls.

    A newline before a call and blank text around calls belong to the format and are not text. `</tool_call>` inside a
    JSON string does not end a call. A call whose JSON is complete is valid even if its closing tag is missing.
    """

    _buffer: str = ""
    _in_call: bool = False
    _after_call: bool = False
    _blank: bool = True
    _text_shown: bool = False
    _events: list[Event] = field(default_factory=list)

    def push(self, text: str) -> list[Event]:
        """The events that `text` completes."""
        self._buffer += text
        while self._advance():
            pass
        return self._taken()

    def finish(self) -> list[Event]:
        """The events of what was held back; call it once, at the end of the answer."""
        while self._in_call:
            self._end_unclosed_call()
            while self._advance():
                pass
        if not (self._blank and self._after_call and not self._buffer.strip()):
            self._show(self._buffer)
        self._buffer = ""
        return self._taken()

    def _taken(self) -> list[Event]:
        events, self._events = self._events, []
        return events

    def _advance(self) -> bool:
        """Consume one text or one call from the buffer; False when more input is needed."""
        return self._advance_call() if self._in_call else self._advance_text()

    def _advance_text(self) -> bool:
        start = self._buffer.find(OPEN)
        if start < 0:
            self._show_safe_text()
            return False
        before, self._buffer = self._buffer[:start], self._buffer[start + len(OPEN) :]
        if not self._blank or before.strip():
            self._show(before.removesuffix("\n"))
        self._in_call, self._after_call, self._blank = True, True, True
        return True

    def _show_safe_text(self) -> None:
        """Show what cannot belong to a coming call: all but a partial tag, one newline, and leading blanks."""
        end = len(self._buffer) - partial_match(self._buffer, OPEN)
        end -= self._buffer[:end].endswith("\n")
        head = self._buffer[:end]
        if self._blank and not head.strip():
            return
        self._buffer = self._buffer[end:]
        self._show(head)

    def _show(self, text: str) -> None:
        if self._after_call and not self._text_shown:
            text = text.lstrip()
        if text:
            self._events.append(Text(text))
            self._blank, self._text_shown = False, True

    def _advance_call(self) -> bool:
        for boundary in _BOUNDARY.finditer(self._buffer):
            if not _inside_string(self._buffer[: boundary.start()]):
                self._end_call(boundary)
                return True
        return False

    def _end_call(self, boundary: re.Match[str]) -> None:
        """End the call at a tag; an opening tag means that the closing one was forgotten, and is not consumed."""
        closed = boundary.group() == CLOSE
        body, end = self._buffer[: boundary.start()], boundary.end() if closed else boundary.start()
        self._events.append(parse_call(body, OPEN + self._buffer[: end if closed else len(body)]))
        self._buffer, self._in_call = self._buffer[end:], False

    def _end_unclosed_call(self) -> None:
        """At the end of the answer: take the call as complete, else cut it at the first tag that its string hid."""
        call = parse_call(self._buffer, OPEN + self._buffer)
        boundary = _BOUNDARY.search(self._buffer)
        if isinstance(call, ParsedCall) or boundary is None:
            self._events.append(call)
            self._buffer, self._in_call = "", False
        else:
            self._end_call(boundary)


def parse_call(body: str, raw: str) -> ParsedCall | InvalidCall:
    """Read the JSON between the tags; `raw` is kept when it cannot be read."""
    try:
        return _call_of(_load_json(body))
    except (ValueError, RecursionError) as error:
        name = _NAME.search(body)
        return InvalidCall(raw, name.group(1) if name else None, f"this is no tool call: {error}")


def _call_of(value: Any) -> ParsedCall:
    if not isinstance(value, dict) or not isinstance(value.get("name"), str) or not value["name"]:
        raise ValueError('expected {"name": "…", "arguments": {…}}')
    arguments = value.get("arguments")
    if isinstance(arguments, str):
        arguments = _load_json(arguments)
    if not isinstance(arguments, dict | None):
        raise ValueError(f'"arguments" must be an object, not {type(arguments).__name__}')
    return ParsedCall(value["name"], arguments or {})


def _load_json(text: str) -> Any:
    """Parse JSON, line breaks inside strings allowed; ValueError for what JSON or UTF-8 cannot carry back."""
    value = json.loads(text, strict=False, parse_constant=_refuse_constant)
    json.dumps(value, ensure_ascii=False, allow_nan=False).encode()
    return value


def _refuse_constant(name: str) -> NoReturn:
    raise ValueError(f"{name} is not JSON")


def _inside_string(text: str) -> bool:
    """Whether `text` ends within a JSON string."""
    return '"' in _STRING.sub("", text)
