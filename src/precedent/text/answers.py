"""One model's answers: how to read them, and what is in them, piece by piece as they are written."""

from __future__ import annotations

import secrets
from bisect import bisect_left
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from precedent.text.assembly import decoded, hidden_tokens, special_token_ids
from precedent.text.history import Message
from precedent.text.prompt import template_for
from precedent.text.tool_formats import (
    CallArguments,
    CallBegin,
    CallEnd,
    Event,
    EventParser,
    InvalidCall,
    ReasoningPiece,
    TextPiece,
    ToolFormat,
    format_of_template,
)
from precedent.text.tool_formats.formats import ReasoningTags, reasoning_tags
from precedent.text.tool_formats.parser import HarmonyParser, TaggedParser
from precedent.text.tool_formats.response_template import ResponseTemplateParser, reads_calls

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

TAIL_TOKENS = 32
"""Number of tokens at the end of a prompt that are searched for an open reasoning tag."""


@dataclass(frozen=True, slots=True)
class AnswerSyntax:
    """The syntax of the answers to one prompt.

    `form` is the tool format, None if no tool is bound or if the tokenizer's own response template reads the calls.
    `shown_tokens` are the ids of special tokens that stay in the answer's text because they mark calls or reasoning.
    """

    tokenizer: PreTrainedTokenizerBase
    prompt_ids: tuple[int, ...]
    tools: tuple[Mapping[str, Any], ...]
    form: ToolFormat | None
    reasoning: ReasoningTags | None
    shown_tokens: frozenset[int]
    channels: bool = False
    by_response_template: bool = False

    def parser(self) -> EventParser:
        """Create a parser for one answer; feed it the text from the first character on."""
        if self.by_response_template:
            return ResponseTemplateParser(self.tokenizer, str(self.tokenizer.decode(list(self.prompt_ids))), self.tools)
        if self.channels:
            return HarmonyParser(self.form, self.tools)
        return TaggedParser(self.form, self.reasoning, self.tools, in_reasoning=self.opened_by_prompt)

    def token_ranges(self, token_ids: Sequence[int], spans: Sequence[tuple[int, int]]) -> list[range]:
        """Map spans of the answer's text (first character, last character + 1) to ranges of token positions."""
        hidden = hidden_tokens(self.tokenizer, self.shown_tokens) if spans else None

        def tokens_up_to(length: int) -> int:
            """The smallest number of leading tokens whose text has `length` characters."""
            return bisect_left(
                range(len(token_ids)), length, key=lambda count: len(decoded(self.tokenizer, token_ids[:count], hidden))
            )

        return [range(tokens_up_to(start), tokens_up_to(end)) for start, end in spans]

    @property
    def opened_by_prompt(self) -> bool:
        """True if the prompt ends inside the reasoning."""
        if self.reasoning is None:
            return False
        tail = self.tokenizer.decode(list(self.prompt_ids[-TAIL_TOKENS:]), skip_special_tokens=False)
        return str(tail).rstrip().endswith(self.reasoning.open.rstrip())


def answer_syntax(
    tokenizer: PreTrainedTokenizerBase,
    messages: Sequence[Message],
    tools: Sequence[Mapping[str, Any]],
    prompt_ids: Sequence[int],
) -> AnswerSyntax:
    """Work out how to read the answer to a rendered prompt. Raises UnsupportedError if the tool format is unknown."""
    template = template_for(tokenizer, messages, bool(tools))
    form = format_of_template(template)
    own = bool(tools) and form is None and reads_calls(tokenizer)
    channels = form is not None and form.channels
    reasoning = None if channels or own else reasoning_tags(tokenizer, template)
    special = special_token_ids(tokenizer)
    tags = [
        *(form.tags if form and (tools or channels) else ()),
        *((reasoning.open, reasoning.close) if reasoning else ()),
    ]
    shown = frozenset(token for token, text in special.items() if own or any(text in tag for tag in tags))
    return AnswerSyntax(
        tokenizer=tokenizer,
        prompt_ids=tuple(prompt_ids),
        tools=tuple(tools),
        form=form if tools else None,
        reasoning=reasoning,
        shown_tokens=shown,
        channels=channels,
        by_response_template=own,
    )


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
            if isinstance(event, TextPiece):
                self._after_text = True
                yield event
                continue
            if isinstance(event, ReasoningPiece):
                yield event
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
