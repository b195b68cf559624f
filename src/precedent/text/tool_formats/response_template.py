"""Reads answers with the response template that a tokenizer ships, for models whose tool format we do not know.

A response template (transformers) describes the regions of an answer. It emits a call only when the region is closed,
so such calls are not streamed piece by piece.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from precedent.text.tool_formats.calls import Tools
from precedent.text.tool_formats.events import (
    CallArguments,
    CallBegin,
    CallEnd,
    Event,
    InvalidCall,
    ReasoningPiece,
    TextPiece,
    joined,
)
from precedent.text.tool_formats.json_text import dump_json

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


class ResponseTemplateParser:
    """Feeds transformers' parser one character at a time, because it raises on bad input without saying where.

    Text and reasoning are stripped at both ends, as the parser strips them.
    """

    def __init__(self, tokenizer: PreTrainedTokenizerBase, prompt: str, tools: Tools) -> None:
        self._tokenizer = tokenizer
        self._tools: Any = [dict(tool) for tool in tools] or None
        self.reasoning_spans: list[tuple[int, int]] = []
        self._events: list[Event] = []
        self._seen: list[str] = []
        self._region_start = self._num_seen = 0
        self._blank = ""
        self._begun = False
        self._parser: Any = self._new_parser(prompt)
        for event in self._parser.initial_events:
            self._follow(event)

    def push(self, text: str) -> list[Event]:
        """Take more text; return the events that it completes."""
        for char in text:
            self._seen.append(char)
            self._num_seen += 1
            try:
                events = self._parser.feed(char)
            except ValueError as error:
                self._fail(error)
            else:
                for event in events:
                    self._follow(event)
        return self._take()

    def finish(self) -> list[Event]:
        """Return the events of the held-back text; call it once, at the end of the answer."""
        try:
            for event in self._parser.finalize()[1]:
                self._follow(event)
        except ValueError as error:
            self._fail(error)
        return self._take()

    def _new_parser(self, prompt: str) -> Any:
        return self._tokenizer.get_response_parser(prefix=prompt, tools=self._tools)

    def _take(self) -> list[Event]:
        events, self._events = joined(self._events), []
        return events

    def _fail(self, error: ValueError) -> None:
        """Report a region that cannot be parsed, and continue after it."""
        self._events.append(InvalidCall("".join(self._seen), None, f"this is not a tool call: {error}"))
        self._parser = self._new_parser("")
        self._seen.clear()

    def _follow(self, event: dict[str, Any]) -> None:
        kind = _KINDS.get(event["field"])
        if event["type"] == "region_open":
            self._begun, self._blank = False, ""
        elif event["type"] == "region_chunk" and kind is not None:
            self._show(kind, event["text"])
        elif event["type"] == "region_close":
            self._close(event, kind)
            self._region_start = self._num_seen

    def _close(self, event: dict[str, Any], kind: type[TextPiece] | type[ReasoningPiece] | None) -> None:
        if kind is ReasoningPiece:
            self.reasoning_spans.append((self._region_start, self._num_seen))
        if event["field"] == CALLS:
            value = event["value"]
            for call in value if isinstance(value, list) else [value]:
                self._call(call)
        self._seen.clear()

    def _show(self, kind: type[TextPiece] | type[ReasoningPiece], text: str) -> None:
        text = self._blank + text
        shown = text.rstrip()
        self._blank = text[len(shown) :] if shown or self._begun else ""
        if shown:
            self._events.append(kind(shown))
            self._begun = True

    def _call(self, call: Any) -> None:
        raw = "".join(self._seen)
        try:
            function = call["function"]
            name, arguments = function["name"], function.get("arguments") or {}
            if not isinstance(name, str) or not isinstance(arguments, dict):
                raise ValueError("expected a name and an object of arguments")
            self._events += [CallBegin(name), CallArguments(dump_json(arguments)), CallEnd()]
        except (TypeError, KeyError, ValueError) as error:
            self._events.append(InvalidCall(raw, None, f"this is not a tool call: {error}"))
