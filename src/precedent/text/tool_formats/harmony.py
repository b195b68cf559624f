"""gpt-oss (harmony): an answer is a row of messages, each with a channel, and a recipient if it is a call.

<|channel|>analysis<|message|>I need the order.<|end|>
<|start|>assistant<|channel|>commentary to=functions.look_up <|constrain|>json<|message|>{"number": "1042"}<|call|>
"""

from __future__ import annotations

import re

from precedent.text.tool_formats.calls import CallReader, held_tail
from precedent.text.tool_formats.description import ToolFormat, Tools
from precedent.text.tool_formats.events import Event, Reasoning, Text, joined
from precedent.text.tool_formats.json_calls import JsonCall

START, CHANNEL, MESSAGE, CONSTRAIN = "<|start|>", "<|channel|>", "<|message|>", "<|constrain|>"
END, CALL, RETURN = "<|end|>", "<|call|>", "<|return|>"
TAGS = (START, CHANNEL, MESSAGE, CONSTRAIN, END, CALL, RETURN)
_CHANNEL = re.compile(r"<\|channel\|>\s*(\w+)")
_RECIPIENT = re.compile(r"to=(?:functions\.)?([^\s<]+)")
_HEADER_STARTS = (START, CHANNEL, MESSAGE, " to=")
_BETWEEN = "\n\n"


class HarmonyParser:
    """Sorts messages: the analysis channel is reasoning, what has a recipient is a call, the rest is text.

    Texts of several messages are joined by an empty line, and so are thoughts. Without a `form` (no tool is bound)
    calls are text.
    """

    def __init__(self, form: ToolFormat | None, tools: Tools = ()) -> None:
        self._calls = form is not None
        self.reasoning_spans: list[tuple[int, int]] = []
        self._events: list[Event] = []
        self._buffer = ""
        self._taken_length = 0
        self._kind: type[Text] | type[Reasoning] | None = None
        self._reader: CallReader | None = None
        self._start = 0
        self._shown: set[type[Event]] = set()
        self._fresh = True

    def push(self, text: str) -> list[Event]:
        """The events that `text` completes."""
        self._buffer += text
        while self._advance():
            pass
        return self._take()

    def finish(self) -> list[Event]:
        """The events of what was held back; call it once, at the end of the answer."""
        while self._reader is not None:
            self._end_call(self._reader, self._reader.finish())
            while self._advance():
                pass
        if self._kind is None and not self._buffer.startswith(_HEADER_STARTS):
            self._kind = Text
        if self._kind is not None:
            self._show(self._consume(len(self._buffer)))
            self._end_message()
        return self._take()

    def _take(self) -> list[Event]:
        events, self._events = joined(self._events), []
        return events

    def _consume(self, length: int) -> str:
        head, self._buffer = self._buffer[:length], self._buffer[length:]
        self._taken_length += length
        return head

    def _advance(self) -> bool:
        if self._reader is not None:
            return self._advance_call(self._reader)
        return self._advance_header() if self._kind is None else self._advance_message()

    def _advance_header(self) -> bool:
        """Read up to the message; an answer that begins with something else is text."""
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
        self._events += reader.take()
        self._buffer = (leftover or "") + self._buffer
        self._taken_length -= len(leftover or "")
        self._reader = None

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
