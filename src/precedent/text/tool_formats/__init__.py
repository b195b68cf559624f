"""Tool formats: how model families write reasoning and tool calls, parsed while the answer streams in."""

from precedent.text.tool_formats.description import ToolFormat
from precedent.text.tool_formats.events import (
    CallArguments,
    CallBegin,
    CallEnd,
    Event,
    InvalidCall,
    ParsedCall,
    Part,
    Reasoning,
    Text,
    whole_parts,
)
from precedent.text.tool_formats.parser import AnswerParser
from precedent.text.tool_formats.registry import format_of_template, known_formats

__all__ = [
    "AnswerParser",
    "CallArguments",
    "CallBegin",
    "CallEnd",
    "Event",
    "InvalidCall",
    "ParsedCall",
    "Part",
    "Reasoning",
    "Text",
    "ToolFormat",
    "format_of_template",
    "known_formats",
    "whole_parts",
]
