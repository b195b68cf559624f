"""Splits an answer into text, reasoning and tool calls while it streams in.

Parsing never raises, whatever the model writes. Once neighbouring pieces are joined, the events do not depend on how
the text is split.
"""

from __future__ import annotations

import re
from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence

from precedent.text.tool_formats.calls import CallReader, Event, ReasoningPiece, TextPiece, Tools, held_tail, joined
from precedent.text.tool_formats.formats import HARMONY, ReasoningTags, ToolFormat
from precedent.text.tool_formats.json_calls import JsonCall

START, CHANNEL, MESSAGE = "<|start|>", "<|channel|>", "<|message|>"
END, CALL, RETURN = "<|end|>", "<|call|>", "<|return|>"
_CHANNEL = re.compile(r"<\|channel\|>\s*(\w+)")
_RECIPIENT = re.compile(r"to=(?:functions\.)?([^\s<]+)")
_HEADER_STARTS = (START, CHANNEL, MESSAGE, " to=")
_BETWEEN = "\n\n"


class EventParser(ABC):
    """A parser for one answer: buffers unread text, which a subclass reads until it waits for more with a `yield`.

    `reasoning_spans` are spans of reasoning in the answer's text, tags included: first character, last character + 1.
    """

    def __init__(self) -> None:
        self.reasoning_spans: list[tuple[int, int]] = []
        self._events: list[Event] = []
        self._buffer, self._taken_length, self._ended = "", 0, False
        self._reading = self._read()

    def push(self, text: str) -> list[Event]:
        """Take more text; return the events that it completes."""
        self._buffer += text
        next(self._reading)
        return self._take()

    def finish(self) -> list[Event]:
        """Return the events of the held-back text; call it once, at the end of the answer."""
        self._ended = True
        for _ in self._reading:
            raise AssertionError("a parser waits for more after the end of its answer")
        return self._take()

    @abstractmethod
    def _read(self) -> Iterator[None]:
        """Read the whole answer."""

    def _call(self, reader: CallReader) -> Iterator[None]:
        """Read a region of calls to its end; text that it did not need is read again, as text or as the next call."""
        leftover = None
        while leftover is None:
            for position, char in enumerate(self._buffer, start=1):
                leftover = reader.feed(char)
                if leftover is not None:
                    self._consume(position)
                    break
            else:
                self._consume(len(self._buffer))
                self._events += reader.take()
                if self._ended:
                    leftover = reader.finish()
                else:
                    yield
        self._events += reader.take()
        self._buffer = leftover + self._buffer
        self._taken_length -= len(leftover)

    def _first(self, tags: Sequence[str]) -> tuple[int, str] | None:
        return min(((at, tag) for tag in tags if (at := self._buffer.find(tag)) >= 0), default=None)

    def _take(self) -> list[Event]:
        events, self._events = joined(self._events), []
        return events

    def _consume(self, length: int) -> str:
        head, self._buffer = self._buffer[:length], self._buffer[length:]
        self._taken_length += length
        return head


class TaggedParser(EventParser):
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
        self._form, self._tools, self._reasoning, self._in_reasoning = form, tools, reasoning, in_reasoning
        self._separator = form.separator if form else ""
        self._openers = tuple(tag for tag in (form and form.tag, reasoning and reasoning.open) if tag)
        self._may_be_bare = bool(form and form.bare_start)
        self._after_call = self._text_shown = False
        self._blank = True

    def _read(self) -> Iterator[None]:
        if self._in_reasoning:
            yield from self._thoughts(0)
        while self._buffer or not self._ended:
            if self._may_be_bare:
                yield from self._bare_call()
            elif found := self._first(self._openers):
                start, tag = found
                before = self._consume(start)
                if not self._blank or before.strip():
                    self._show(before.removesuffix(self._separator))
                self._consume(len(tag))
                self._after_call, self._blank = True, True
                if self._form and self._form.reader and tag == self._form.tag:
                    yield from self._calls(self._form.reader(self._form, self._tools))
                else:
                    yield from self._thoughts(self._taken_length - len(tag))
            elif self._ended:
                if not (self._blank and self._after_call and not self._buffer.strip()):
                    self._show(self._buffer)
                self._consume(len(self._buffer))
            else:
                self._show_safe_text()
                yield

    def _calls(self, reader: CallReader) -> Iterator[None]:
        yield from self._call(reader)
        if reader.rejected:
            self._may_be_bare = False
        else:
            self._after_call, self._blank = True, True
            self._may_be_bare = bool(self._form and self._form.bare_start)

    def _bare_call(self) -> Iterator[None]:
        """Read on at a place where a call without a tag may begin."""
        form, body = self._form, self._buffer.lstrip(" \t\r\n;" if self._after_call else None)
        if not body and not self._ended:
            yield
        elif body and form and form.bare_reader and body.startswith(form.bare_start):
            self._consume(len(self._buffer) - len(body))
            yield from self._calls(form.bare_reader(form, self._tools))
        else:
            self._may_be_bare = False

    def _show_safe_text(self) -> None:
        """Show what cannot belong to a later tag: all but a partial tag, one separator, and leading blanks."""
        end = len(self._buffer) - held_tail(self._buffer, self._openers)
        if self._separator and self._buffer[:end].endswith(self._separator):
            end -= len(self._separator)
        if not self._blank or self._buffer[:end].strip():
            self._show(self._consume(end))

    def _show(self, text: str) -> None:
        if self._after_call and not self._text_shown:
            text = text.lstrip()
        if text:
            self._events.append(TextPiece(text))
            self._blank, self._text_shown = False, True

    def _thoughts(self, start: int) -> Iterator[None]:
        """Hand out reasoning; blank text around it belongs to the format."""
        close, thought = self._reasoning.close if self._reasoning else "", False
        while (end := self._buffer.find(close)) < 0 and not self._ended:
            safe = self._buffer[: len(self._buffer) - held_tail(self._buffer, (close,))].rstrip()
            thought = self._think(self._consume(len(safe)), thought) or thought
            yield
        self._think(self._buffer[: end if end >= 0 else None].rstrip(), thought)
        self._consume(end + len(close) if end >= 0 else len(self._buffer))
        self.reasoning_spans.append((start, self._taken_length))
        self._after_call = True
        self._may_be_bare = bool(self._form and self._form.bare_start)

    def _think(self, text: str, thought: bool) -> bool:
        text = text if thought else text.lstrip()
        if text:
            self._events.append(ReasoningPiece(text))
        return bool(text)


class HarmonyParser(EventParser):
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
        self._shown: set[type[Event]] = set()
        self._fresh = True

    def _read(self) -> Iterator[None]:
        while self._buffer or not self._ended:
            start, end = self._taken_length, self._buffer.find(MESSAGE)
            if not any(head.startswith(self._buffer[: len(head)]) for head in _HEADER_STARTS):
                self._fresh = True
                yield from self._message(TextPiece, start)  # an answer that begins with something else is text
            elif end >= 0:
                self._fresh = True
                yield from self._after_header(self._consume(end + len(MESSAGE)), start)
            elif not self._ended:
                yield
            elif self._buffer.startswith(_HEADER_STARTS):
                return
            else:
                yield from self._message(TextPiece, start)

    def _after_header(self, header: str, start: int) -> Iterator[None]:
        channel, recipient = _CHANNEL.search(header), _RECIPIENT.search(header)
        if recipient is not None and self._calls:
            call = JsonCall(header, open_tag=START, close_tags=(CALL, END, RETURN), name=recipient.group(1))
            return self._call(call)
        return self._message(ReasoningPiece if channel and channel.group(1) == "analysis" else TextPiece, start)

    def _message(self, kind: type[TextPiece] | type[ReasoningPiece], start: int) -> Iterator[None]:
        while (found := self._first((END, CALL, RETURN, START))) is None:
            held = 0 if self._ended else held_tail(self._buffer, HARMONY.tags)
            self._show(kind, self._consume(len(self._buffer) - held))
            if self._ended:
                break
            yield
        if found is not None:
            self._show(kind, self._consume(found[0]))
            self._consume(0 if found[1] == START else len(found[1]))
        if kind is ReasoningPiece:
            self.reasoning_spans.append((start, self._taken_length))

    def _show(self, kind: type[TextPiece] | type[ReasoningPiece], text: str) -> None:
        if text:
            between = _BETWEEN if self._fresh and kind in self._shown else ""
            self._events.append(kind(between + text))
            self._shown.add(kind)
            self._fresh = False
