"""An answer as it is written, in pieces: text, reasoning, and parts of tool calls with their numbers and ids."""

from __future__ import annotations

import hashlib
import json
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
    """Reads one answer. A call's id follows from the prompt and all that was written before it, so it never varies."""

    def __init__(self, syntax: AnswerSyntax) -> None:
        self._syntax, self._parser = syntax, syntax.parser()
        self._seen = hashlib.sha256(json.dumps(list(syntax.prompt_ids)).encode())
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
                self._seen.update(event.text.encode())
                yield TextPiece(event.text)
            elif isinstance(event, Reasoning):
                yield ReasoningPiece(event.text)
            elif isinstance(event, CallBegin):
                yield self._beginning(event.name)
            elif isinstance(event, CallArguments):
                yield self._more(event.json)
            elif isinstance(event, CallEnd):
                self.num_calls += 1
            else:
                yield from self._broken(event)

    def _beginning(self, name: str | None) -> CallPiece:
        self._seen.update(f"\0{name}\0".encode())
        return CallPiece(self.num_calls, call_id=f"call_{self._seen.hexdigest()[:24]}", name=name)

    def _more(self, arguments: str) -> CallPiece:
        self._seen.update(arguments.encode())
        return CallPiece(self.num_calls, arguments=arguments)

    def _broken(self, call: InvalidCall) -> Iterator[CallPiece]:
        self.problems.append(call.error)
        if call.rest is None:
            yield self._beginning(call.name)
        written = call.raw if call.rest is None else call.rest
        self._seen.update(written.encode())
        yield CallPiece(self.num_calls, arguments=written, broken=True, whole=call.rest is None)
        self.num_calls += 1
