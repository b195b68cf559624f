"""Splits an answer into text, reasoning and tool calls while it streams in.

Parsing never raises, whatever the model writes. Once neighbouring pieces are joined, the events do not depend on how
the text is split.
"""

from __future__ import annotations

import re
from abc import ABC, abstractmethod
from typing import Protocol

from precedent.text.tool_formats.calls import CallReader, Tools, held_tail
from precedent.text.tool_formats.events import Event, ReasoningPiece, TextPiece, joined
from precedent.text.tool_formats.formats import HARMONY, ReasoningTags, ToolFormat
from precedent.text.tool_formats.json_calls import JsonCall

START, CHANNEL, MESSAGE = "<|start|>", "<|channel|>", "<|message|>"
END, CALL, RETURN = "<|end|>", "<|call|>", "<|return|>"
_CHANNEL = re.compile(r"<\|channel\|>\s*(\w+)")
_RECIPIENT = re.compile(r"to=(?:functions\.)?([^\s<]+)")
_HEADER_STARTS = (START, CHANNEL, MESSAGE, " to=")
_BETWEEN = "\n\n"


class EventParser(Protocol):
    """A parser for one answer."""

    reasoning_spans: list[tuple[int, int]]
    """Spans of reasoning in the answer's text, tags included: first character, last character + 1."""

    def push(self, text: str) -> list[Event]:
        """Take more text; return the events that it completes."""

    def finish(self) -> list[Event]:
        """Return the events of the held-back text; call it once, at the end of the answer."""


class BufferedParser(ABC):
    """Buffers unread text, and reads calls with the current reader; a subclass parses what is outside calls."""

    def __init__(self) -> None:
        self.reasoning_spans: list[tuple[int, int]] = []
        self._events: list[Event] = []
        self._buffer = ""
        self._taken_length = 0
        self._reader: CallReader | None = None

    def push(self, text: str) -> list[Event]:
        """Take more text; return the events that it completes."""
        self._buffer += text
        self._advance_as_far_as_possible()
        return self._take()

    def finish(self) -> list[Event]:
        """Return the events of the held-back text; call it once, at the end of the answer."""
        while self._reader is not None:
            self._end_call(self._reader, self._reader.finish())
            self._advance_as_far_as_possible()
        self._finish_text()
        return self._take()

    @abstractmethod
    def _advance_outside(self) -> bool:
        """Consume one piece of the buffer outside calls; False when more input is needed."""

    @abstractmethod
    def _finish_text(self) -> None:
        """Consume the rest of the buffer at the end of the answer."""

    @abstractmethod
    def _after(self, reader: CallReader) -> None:
        """Note that a call, or what looked like one, has ended."""

    def _advance_as_far_as_possible(self) -> None:
        while self._advance_call(self._reader) if self._reader is not None else self._advance_outside():
            pass

    def _advance_call(self, reader: CallReader) -> bool:
        for position, char in enumerate(self._buffer, start=1):
            leftover = reader.feed(char)
            if leftover is not None:
                self._consume(position)
                self._end_call(reader, leftover)
                return True
        self._consume(len(self._buffer))
        self._events += reader.take()
        return False

    def _end_call(self, reader: CallReader, leftover: str | None) -> None:
        """End the call; text that it did not need is read again, as text or as the next call."""
        self._events += reader.take()
        self._buffer = (leftover or "") + self._buffer
        self._taken_length -= len(leftover or "")
        self._reader = None
        self._after(reader)

    def _take(self) -> list[Event]:
        events, self._events = joined(self._events), []
        return events

    def _consume(self, length: int) -> str:
        head, self._buffer = self._buffer[:length], self._buffer[length:]
        self._taken_length += length
        return head


class TaggedParser(BufferedParser):
    """Reads an answer whose reasoning and calls are enclosed in tags.

    The separator before a call and blank text around calls and reasoning belong to the format and are not text.
    Without a `form` (no tool is bound, or the model knows none) calls are text; without `reasoning` so are thoughts.
    `in_reasoning` says that the prompt already opened the reasoning.
    """

    def __init__(
        self,
        form: ToolFormat | None,
        reasoning: ReasoningTags | None = None,
        tools: Tools = (),
        *,
        in_reasoning: bool = False,
    ) -> None:
        super().__init__()
        self._form, self._tools, self._reasoning = form, tools, reasoning
        self._separator = form.separator if form else ""
        self._openers = tuple(tag for tag in (form and form.tag, reasoning and reasoning.open) if tag)
        self._in_reasoning = in_reasoning
        self._reasoning_start = 0
        self._thought = False
        self._may_be_bare = bool(form and form.bare_start)
        self._after_call = self._text_shown = False
        self._blank = True

    def _advance_outside(self) -> bool:
        if self._in_reasoning:
            return self._advance_reasoning()
        return self._advance_bare() if self._may_be_bare else self._advance_text()

    def _finish_text(self) -> None:
        if self._in_reasoning:
            self._end_reasoning(self._buffer, len(self._buffer))
        elif not (self._blank and self._after_call and not self._buffer.strip()):
            self._show(self._buffer)
        self._consume(len(self._buffer))

    # Calls

    def _after(self, reader: CallReader) -> None:
        if reader.rejected:
            self._may_be_bare = False
        else:
            self._after_call, self._blank = True, True
            self._may_be_bare = bool(self._form and self._form.bare_start)

    def _advance_bare(self) -> bool:
        """Advance at a place where a call without a tag may begin."""
        form = self._form
        body = self._buffer.lstrip(" \t\r\n;" if self._after_call else None)
        if not body:
            return False
        if form and form.bare_reader and body.startswith(form.bare_start):
            self._consume(len(self._buffer) - len(body))
            self._reader = form.bare_reader(form, self._tools)
        else:
            self._may_be_bare = False
        return True

    # Text and reasoning

    def _advance_text(self) -> bool:
        found = [(start, tag) for tag in self._openers if (start := self._buffer.find(tag)) >= 0]
        if not found:
            self._show_safe_text()
            return False
        start, tag = min(found)
        before = self._consume(start)
        if not self._blank or before.strip():
            self._show(before.removesuffix(self._separator))
        self._open(self._consume(len(tag)))
        return True

    def _open(self, tag: str) -> None:
        self._after_call, self._blank = True, True
        if self._form and self._form.reader and tag == self._form.tag:
            self._reader = self._form.reader(self._form, self._tools)
        else:
            self._in_reasoning, self._reasoning_start = True, self._taken_length - len(tag)

    def _show_safe_text(self) -> None:
        """Show what cannot belong to a later tag: all but a partial tag, one separator, and leading blanks."""
        end = len(self._buffer) - held_tail(self._buffer, self._openers)
        if self._separator and self._buffer[:end].endswith(self._separator):
            end -= len(self._separator)
        if self._blank and not self._buffer[:end].strip():
            return
        self._show(self._consume(end))

    def _show(self, text: str) -> None:
        if self._after_call and not self._text_shown:
            text = text.lstrip()
        if text:
            self._events.append(TextPiece(text))
            self._blank, self._text_shown = False, True

    def _advance_reasoning(self) -> bool:
        close = self._reasoning.close if self._reasoning else ""
        end = self._buffer.find(close)
        if end >= 0:
            self._end_reasoning(self._buffer[:end], end + len(close))
            return True
        safe = self._buffer[: len(self._buffer) - held_tail(self._buffer, (close,))].rstrip()
        self._think(safe)
        self._consume(len(safe))
        return False

    def _end_reasoning(self, text: str, length: int) -> None:
        self._think(text.rstrip())
        self._consume(length)
        self.reasoning_spans.append((self._reasoning_start, self._taken_length))
        self._in_reasoning = self._thought = False
        self._after_call = True
        self._may_be_bare = bool(self._form and self._form.bare_start)

    def _think(self, text: str) -> None:
        """Hand out reasoning; blank text before it belongs to the format."""
        text = text if self._thought else text.lstrip()
        if text:
            self._events.append(ReasoningPiece(text))
            self._thought = True


class HarmonyParser(BufferedParser):
    """Reads gpt-oss: an answer is a sequence of messages with a channel, and a recipient if it is a call.

    <|channel|>analysis<|message|>I need the order.<|end|>
    <|start|>assistant<|channel|>commentary to=functions.look_up <|constrain|>json<|message|>{"number": "1042"}<|call|>

    The analysis channel is reasoning, a message with a recipient is a call, the rest is text.

    Texts of several messages are joined by an empty line, and so is reasoning. Without a `form` (no tool is bound)
    calls are text.
    """

    def __init__(self, form: ToolFormat | None, tools: Tools = ()) -> None:
        super().__init__()
        self._calls = form is not None
        self._kind: type[TextPiece] | type[ReasoningPiece] | None = None
        self._start = 0
        self._shown: set[type[Event]] = set()
        self._fresh = True

    def _advance_outside(self) -> bool:
        return self._advance_header() if self._kind is None else self._advance_message()

    def _finish_text(self) -> None:
        if self._kind is None and not self._buffer.startswith(_HEADER_STARTS):
            self._kind = TextPiece
        if self._kind is not None:
            self._show(self._consume(len(self._buffer)))
            self._end_message()

    def _after(self, reader: CallReader) -> None:
        """Do nothing: the header of the next message says what follows."""

    def _advance_header(self) -> bool:
        """Read the header up to the message; an answer that begins with something else is text."""
        starts_alike = (start.startswith(self._buffer[: len(start)]) for start in _HEADER_STARTS)
        if not any(starts_alike):
            self._kind, self._fresh = TextPiece, True
            return True
        end = self._buffer.find(MESSAGE)
        if end < 0:
            return False
        start = self._taken_length
        self._open(self._consume(end + len(MESSAGE)), start)
        return True

    def _open(self, header: str, start: int) -> None:
        channel, recipient = _CHANNEL.search(header), _RECIPIENT.search(header)
        self._start, self._fresh = start, True
        if recipient is not None and self._calls:
            self._reader = JsonCall(header, open_tag=START, close_tags=(CALL, END, RETURN), name=recipient.group(1))
        else:
            self._kind = ReasoningPiece if channel is not None and channel.group(1) == "analysis" else TextPiece

    def _advance_message(self) -> bool:
        found = [(start, tag) for tag in (END, CALL, RETURN, START) if (start := self._buffer.find(tag)) >= 0]
        if not found:
            self._show(self._consume(len(self._buffer) - held_tail(self._buffer, HARMONY.tags)))
            return False
        start, tag = min(found)
        self._show(self._consume(start))
        self._consume(0 if tag == START else len(tag))
        self._end_message()
        return True

    def _end_message(self) -> None:
        if self._kind is ReasoningPiece:
            self.reasoning_spans.append((self._start, self._taken_length))
        self._kind = None

    def _show(self, text: str) -> None:
        kind = self._kind
        if not text or kind is None:
            return
        between = _BETWEEN if self._fresh and kind in self._shown else ""
        self._events.append(kind(between + text))
        self._shown.add(kind)
        self._fresh = False
