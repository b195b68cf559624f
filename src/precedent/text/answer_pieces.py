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
    whole text as arguments (`whole`). `cut` marks the last piece of a call that the answer's end cut off.
    """

    index: int
    call_id: str | None = None
    name: str | None = None
    arguments: str = ""
    broken: bool = False
    whole: bool = False
    cut: bool = False


Piece = TextPiece | ReasoningPiece | CallPiece


class AnswerPieces:
    """Reads one answer. Each call gets a random id, which no other call of any answer has.

    With `whole` the pieces of a call come when it has ended, so that a call which `max_tokens` cut can be text.
    """

    def __init__(self, syntax: AnswerSyntax, *, whole: bool = False) -> None:
        self._syntax, self._parser = syntax, syntax.parser()
        self._held: list[CallPiece] | None = [] if whole else None
        self._after_text = False
        self.num_calls = 0
        self.problems: list[str] = []

    def push(self, text: str) -> Iterator[Piece]:
        """The pieces that more text completes; there may be none."""
        if text:
            yield from self._pieces(self._parser.push(text))

    def finish(self, *, cut: bool = False) -> Iterator[Piece]:
        """The rest that the parser held back; `cut` says that `max_tokens` ended the answer.

        A cut call is text, as the model wrote it. If pieces of it were handed out already, it stays a call whose
        arguments end where the answer does.
        """
        yield from self._pieces(self._parser.finish(), cut=cut)

    def reasoning_ranges(self, token_ids: Sequence[int]) -> list[range]:
        """The positions of the reasoning among the answer's tokens; call it after `finish`."""
        return self._syntax.token_ranges(token_ids, self._parser.reasoning_spans)

    def _pieces(self, events: Iterable[Event], *, cut: bool = False) -> Iterator[Piece]:
        for event in events:
            if isinstance(event, Text):
                self._after_text = True
                yield TextPiece(event.text)
                continue
            if isinstance(event, Reasoning):
                yield ReasoningPiece(event.text)
            elif isinstance(event, CallBegin):
                yield from self._call(self._beginning(event.name))
            elif isinstance(event, CallArguments):
                yield from self._call(CallPiece(self.num_calls, arguments=event.json))
            elif isinstance(event, CallEnd):
                yield from self._call()
                self.num_calls += 1
            else:
                yield from self._cut(event) if cut else self._broken(event)
            self._after_text = False

    def _beginning(self, name: str | None) -> CallPiece:
        return CallPiece(self.num_calls, call_id=f"call_{secrets.token_hex(12)}", name=name)

    def _call(self, *pieces: CallPiece) -> Iterator[CallPiece]:
        """Hand out pieces of a call, held back until its end (no more pieces) if only whole ones are wanted."""
        if self._held is None:
            yield from pieces
        elif pieces:
            self._held += pieces
        else:
            yield from self._held
            self._held.clear()

    def _broken(self, call: InvalidCall) -> Iterator[CallPiece]:
        self.problems.append(call.error)
        if call.rest is None:
            yield from self._call(self._beginning(call.name))
        written = call.raw if call.rest is None else call.rest
        yield from self._call(CallPiece(self.num_calls, arguments=written, broken=True, whole=call.rest is None))
        yield from self._call()
        self.num_calls += 1

    def _cut(self, call: InvalidCall) -> Iterator[Piece]:
        if self._held is None and call.rest is not None:
            self.problems.append(call.error)
            yield CallPiece(self.num_calls, broken=True, cut=True)
            self.num_calls += 1
            return
        if self._held is not None:
            self._held.clear()
        form = self._syntax.form
        yield TextPiece(f"{form.separator if form and self._after_text else ''}{call.raw}")
