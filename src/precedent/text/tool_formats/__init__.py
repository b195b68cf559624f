"""Tool formats: how model families write reasoning and tool calls, parsed while the answer streams in."""

from precedent.text.tool_formats.calls import (
    CallArguments,
    CallBegin,
    CallEnd,
    Event,
    InvalidCall,
    ReasoningPiece,
    TextPiece,
)
from precedent.text.tool_formats.formats import ToolFormat, format_of_template, known_formats
from precedent.text.tool_formats.parser import EventParser

__all__ = [
    "CallArguments",
    "CallBegin",
    "CallEnd",
    "Event",
    "EventParser",
    "InvalidCall",
    "ReasoningPiece",
    "TextPiece",
    "ToolFormat",
    "format_of_template",
    "known_formats",
]
