"""Reads answers with the response template that a tokenizer ships, for models whose tool format we do not know.

A response template (transformers) describes the regions of an answer. It emits a call only when the region is closed,
so such calls are not streamed piece by piece.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import TYPE_CHECKING, Any

from precedent.text.tool_formats.calls import (
    CallArguments,
    CallBegin,
    CallEnd,
    InvalidCall,
    ReasoningPiece,
    TextPiece,
    Tools,
)
from precedent.text.tool_formats.json_text import dump_json
from precedent.text.tool_formats.parser import EventParser

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

CALLS = "tool_calls"
_KINDS: dict[str, type[TextPiece] | type[ReasoningPiece]] = {
    "content": TextPiece,
    "reasoning_content": ReasoningPiece,
    "reasoning": ReasoningPiece,
    "thinking": ReasoningPiece,
}


def reads_calls(tokenizer: PreTrainedTokenizerBase) -> bool:
    """Return whether the tokenizer ships a response template that parses tool calls."""
    template = getattr(tokenizer, "response_template", None)
    return isinstance(template, dict) and CALLS in template.get("fields", {})


class ResponseTemplateParser(EventParser):
    """Feeds transformers' parser one character at a time, because it raises on bad input without saying where.

    Text and reasoning are stripped at both ends, as the parser strips them.
    """

    def __init__(self, tokenizer: PreTrainedTokenizerBase, prompt: str, tools: Tools) -> None:
        super().__init__()
        self._tokenizer, self._prompt = tokenizer, prompt
        self._tools: Any = [dict(tool) for tool in tools] or None
        self._seen: list[str] = []
        self._region_start, self._blank, self._begun = 0, "", False

    def _read(self) -> Iterator[None]:
        parser = self._new_parser(self._prompt)
        self._follow(parser.initial_events)
        while self._buffer or not self._ended:
            if not self._buffer:
                yield
                continue
            self._seen.append(self._consume(1))
            try:
                self._follow(parser.feed(self._seen[-1]))
            except ValueError as error:  # the region cannot be parsed; the answer goes on after it
                self._fail(error)
                parser = self._new_parser("")
        try:
            self._follow(parser.finalize()[1])
        except ValueError as error:
            self._fail(error)

    def _new_parser(self, prompt: str) -> Any:
        return self._tokenizer.get_response_parser(prefix=prompt, tools=self._tools)

    def _fail(self, error: ValueError) -> None:
        self._events.append(InvalidCall("".join(self._seen), None, f"this is not a tool call: {error}"))
        self._seen.clear()

    def _follow(self, events: Iterable[dict[str, Any]]) -> None:
        for event in events:
            kind = _KINDS.get(event["field"])
            if event["type"] == "region_open":
                self._begun, self._blank = False, ""
            elif event["type"] == "region_chunk" and kind is not None:
                self._show(kind, event["text"])
            elif event["type"] == "region_close":
                self._close(event, kind)
                self._region_start = self._taken_length

    def _close(self, event: dict[str, Any], kind: type[TextPiece] | type[ReasoningPiece] | None) -> None:
        if kind is ReasoningPiece:
            self.reasoning_spans.append((self._region_start, self._taken_length))
        if event["field"] == CALLS:
            value = event["value"]
            for call in value if isinstance(value, list) else [value]:
                self._add_call(call)
        self._seen.clear()

    def _show(self, kind: type[TextPiece] | type[ReasoningPiece], text: str) -> None:
        text = self._blank + text
        shown = text.rstrip()
        self._blank = text[len(shown) :] if shown or self._begun else ""
        if shown:
            self._events.append(kind(shown))
            self._begun = True

    def _add_call(self, call: Any) -> None:
        raw = "".join(self._seen)
        try:
            function = call["function"]
            name, arguments = function["name"], function.get("arguments") or {}
            if not isinstance(name, str) or not isinstance(arguments, dict):
                raise ValueError("expected a name and an object of arguments")
            self._events += [CallBegin(name), CallArguments(dump_json(arguments)), CallEnd()]
        except (TypeError, KeyError, ValueError) as error:
            self._events.append(InvalidCall(raw, None, f"this is not a tool call: {error}"))
