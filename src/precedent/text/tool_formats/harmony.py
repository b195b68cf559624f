"""gpt-oss (harmony): an answer is a sequence of messages, each with a channel, and a recipient if it is a call.

<|channel|>analysis<|message|>I need the order.<|end|>
<|start|>assistant<|channel|>commentary to=functions.look_up <|constrain|>json<|message|>{"number": "1042"}<|call|>
"""

from __future__ import annotations

import re

from precedent.text.tool_formats.buffered_parser import BufferedParser
from precedent.text.tool_formats.calls import CallReader, held_tail
from precedent.text.tool_formats.description import ToolFormat, Tools
from precedent.text.tool_formats.events import Event, Reasoning, Text
from precedent.text.tool_formats.json_calls import JsonCall

START, CHANNEL, MESSAGE, CONSTRAIN = "<|start|>", "<|channel|>", "<|message|>", "<|constrain|>"
END, CALL, RETURN = "<|end|>", "<|call|>", "<|return|>"
TAGS = (START, CHANNEL, MESSAGE, CONSTRAIN, END, CALL, RETURN)
_CHANNEL = re.compile(r"<\|channel\|>\s*(\w+)")
_RECIPIENT = re.compile(r"to=(?:functions\.)?([^\s<]+)")
_HEADER_STARTS = (START, CHANNEL, MESSAGE, " to=")
_BETWEEN = "\n\n"


class HarmonyParser(BufferedParser):
    """Sorts messages: the analysis channel is reasoning, a message with a recipient is a call, the rest is text.

    Texts of several messages are joined by an empty line, and so is reasoning. Without a `form` (no tool is bound)
    calls are text.
    """

    def __init__(self, form: ToolFormat | None, tools: Tools = ()) -> None:
        super().__init__()
        self._calls = form is not None
        self._kind: type[Text] | type[Reasoning] | None = None
        self._start = 0
        self._shown: set[type[Event]] = set()
        self._fresh = True

    def _advance_outside(self) -> bool:
        return self._advance_header() if self._kind is None else self._advance_message()

    def _finish_text(self) -> None:
        if self._kind is None and not self._buffer.startswith(_HEADER_STARTS):
            self._kind = Text
        if self._kind is not None:
            self._show(self._consume(len(self._buffer)))
            self._end_message()

    def _after(self, reader: CallReader) -> None:
        """Do nothing: the header of the next message says what follows."""

    def _advance_header(self) -> bool:
        """Read the header up to the message; an answer that begins with something else is text."""
        starts_alike = (start.startswith(self._buffer[: len(start)]) for start in _HEADER_STARTS)
        if not any(starts_alike):
            self._kind, self._fresh = Text, True
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
            self._kind = Reasoning if channel is not None and channel.group(1) == "analysis" else Text

    def _advance_message(self) -> bool:
        found = [(start, tag) for tag in (END, CALL, RETURN, START) if (start := self._buffer.find(tag)) >= 0]
        if not found:
            self._show(self._consume(len(self._buffer) - held_tail(self._buffer, TAGS)))
            return False
        start, tag = min(found)
        self._show(self._consume(start))
        self._consume(0 if tag == START else len(tag))
        self._end_message()
        return True

    def _end_message(self) -> None:
        if self._kind is Reasoning:
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
