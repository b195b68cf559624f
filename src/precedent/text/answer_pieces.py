"""An answer as it is written, in pieces: text, reasoning, and parts of tool calls with their numbers and ids."""

from __future__ import annotations

import secrets
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from precedent.text.tool_formats import CallArguments, CallBegin, CallEnd, Event, InvalidCall, Reasoning, Text

if TYPE_CHECKING:
    from precedent.text.answers import AnswerSyntax


@dataclass(frozen=True, slots=True)
class TextPiece:
    """Some of the answer's text."""

    text: str


@dataclass(frozen=True, slots=True)
class ReasoningPiece:
    """Some of the reasoning before or between the answer's parts."""

    text: str


@dataclass(frozen=True, slots=True)
class CallPiece:
    """Some of call number `index`: its first piece has a `call_id` (and a name, if it got so far), others arguments.

    `broken` marks the last piece of a call that cannot be parsed. Such a call that did not even get a name has its
    whole text as arguments (`whole`).
    """

    index: int
    call_id: str | None = None
    name: str | None = None
    arguments: str = ""
    broken: bool = False
    whole: bool = False


Piece = TextPiece | ReasoningPiece | CallPiece


class AnswerPieces:
    """Reads one answer. Each call gets a random id, which no other call of any answer has."""

    def __init__(self, syntax: AnswerSyntax) -> None:
        self._syntax, self._parser = syntax, syntax.parser()
        self.num_calls = 0
        self.problems: list[str] = []

    def push(self, text: str) -> Iterator[Piece]:
        """The pieces that more text completes; there may be none."""
        if text:
            yield from self._pieces(self._parser.push(text))

    def finish(self) -> Iterator[Piece]:
        """The rest that the parser held back."""
        yield from self._pieces(self._parser.finish())

    def reasoning_ranges(self, token_ids: Sequence[int]) -> list[range]:
        """The positions of the reasoning among the answer's tokens; call it after `finish`."""
        return self._syntax.token_ranges(token_ids, self._parser.reasoning_spans)

    def _pieces(self, events: Iterable[Event]) -> Iterator[Piece]:
        for event in events:
            if isinstance(event, Text):
                yield TextPiece(event.text)
            elif isinstance(event, Reasoning):
                yield ReasoningPiece(event.text)
            elif isinstance(event, CallBegin):
                yield self._beginning(event.name)
            elif isinstance(event, CallArguments):
                yield CallPiece(self.num_calls, arguments=event.json)
            elif isinstance(event, CallEnd):
                self.num_calls += 1
            else:
                yield from self._broken(event)

    def _beginning(self, name: str | None) -> CallPiece:
        return CallPiece(self.num_calls, call_id=f"call_{secrets.token_hex(12)}", name=name)

    def _broken(self, call: InvalidCall) -> Iterator[CallPiece]:
        self.problems.append(call.error)
        if call.rest is None:
            yield self._beginning(call.name)
        written = call.raw if call.rest is None else call.rest
        yield CallPiece(self.num_calls, arguments=written, broken=True, whole=call.rest is None)
        self.num_calls += 1
