"""Splits an answer into text, reasoning and tool calls while it streams in.

Parsing never raises, whatever the model writes. Once neighbouring pieces are joined, the events do not depend on how
the text is split.
"""

from __future__ import annotations

from typing import Protocol

from precedent.text.tool_formats.buffered_parser import BufferedParser
from precedent.text.tool_formats.calls import CallReader, held_tail
from precedent.text.tool_formats.description import ToolFormat, Tools
from precedent.text.tool_formats.events import Event, Reasoning, Text
from precedent.text.tool_formats.reasoning import ReasoningTags


class AnswerParser(Protocol):
    """A parser for one answer."""

    reasoning_spans: list[tuple[int, int]]
    """Spans of reasoning in the answer's text, tags included: first character, last character + 1."""

    def push(self, text: str) -> list[Event]:
        """Take more text; return the events that it completes."""

    def finish(self) -> list[Event]:
        """Return the events of the held-back text; call it once, at the end of the answer."""


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
            self._events.append(Text(text))
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
            self._events.append(Reasoning(text))
            self._thought = True
