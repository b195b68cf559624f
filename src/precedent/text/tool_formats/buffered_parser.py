"""What all answer parsers share: a buffer of unread text, and the call being read from it."""

from __future__ import annotations

from abc import ABC, abstractmethod

from precedent.text.tool_formats.calls import CallReader
from precedent.text.tool_formats.events import Event, joined


class BufferedParser(ABC):
    """Reads an answer piece by piece; a subclass parses what is outside calls."""

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
