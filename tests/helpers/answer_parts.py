"""An answer's events put together: texts joined, each call whole."""

from __future__ import annotations

import json
from collections.abc import Iterable

from precedent.text.tool_formats import (
    CallArguments,
    CallBegin,
    CallEnd,
    Event,
    EventParser,
    InvalidCall,
    ReasoningPiece,
    TextPiece,
)
from precedent.text.tool_formats.calls import ParsedCall, joined

Part = TextPiece | ReasoningPiece | ParsedCall | InvalidCall


def events_in(parser: EventParser, pieces: Iterable[str]) -> list[Event]:
    """The joined events of an answer that comes in these pieces."""
    return joined([event for piece in pieces for event in parser.push(piece)] + parser.finish())


def whole_parts(events: Iterable[Event]) -> list[Part]:
    parts: list[Part] = []
    name, arguments = "", ""
    for event in joined(events):
        if isinstance(event, CallBegin):
            name, arguments = event.name, ""
        elif isinstance(event, CallArguments):
            arguments += event.json
        elif isinstance(event, CallEnd):
            parts.append(ParsedCall(name, json.loads(arguments)))
        else:
            parts.append(event)
    return parts
