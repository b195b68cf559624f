"""Reads arguments that a model writes without quotes, by the type that the tool's schema gives them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from precedent.text.tool_formats.json_scanner import load_json
from precedent.text.tool_schema import referenced

_MAX_NESTING = 8
_WORDS = {"true": True, "false": False}
_KINDS = ((bool, "boolean"), (str, "string"), (int, "integer"), (float, "number"), (type(None), "null"))


class ArgumentTypes:
    """The types that the bound tools' schemas allow for their arguments."""

    def __init__(self, tools: Sequence[Mapping[str, Any]]) -> None:
        self._schemas = {tool["function"]["name"]: tool["function"].get("parameters") or {} for tool in tools}

    def of(self, tool: str, argument: str) -> frozenset[str]:
        """The argument's types by their JSON Schema names; an argument that no schema describes is a string."""
        root = self._schemas.get(tool) or {}
        schema = (root.get("properties") or {}).get(argument)
        return frozenset(_types(schema, root, _MAX_NESTING)) or frozenset({"string"})


def typed_value(text: str, types: frozenset[str]) -> Any:
    """Read `text` as a value of one of these types; return the text itself if it is none of them."""
    word = text.strip()
    if "null" in types and word in ("null", "None"):
        return None
    if "boolean" in types and word.lower() in _WORDS:
        return _WORDS[word.lower()]
    if types & {"integer", "number", "object", "array"}:
        value = _json_or_none(word)
        if isinstance(value, float) and value.is_integer() and "number" not in types:
            value = int(value)
        if _kind(value) in types or (_kind(value) == "integer" and "number" in types):
            return value
    return text


def _json_or_none(text: str) -> Any:
    try:
        value = load_json(text)
    except (ValueError, RecursionError):
        return None
    return value


def _kind(value: Any) -> str:
    if isinstance(value, dict | list):
        return "object" if isinstance(value, dict) else "array"
    return next(name for kind, name in _KINDS if isinstance(value, kind))


def _types(schema: Any, root: Mapping[str, Any], nesting: int) -> set[str]:
    if not isinstance(schema, Mapping) or nesting == 0:
        return set()
    if isinstance(schema.get("$ref"), str):
        return _types(referenced(schema["$ref"], root), root, nesting - 1)
    declared = schema.get("type")
    types = {declared} if isinstance(declared, str) else set(declared or ())
    for keyword in ("anyOf", "oneOf", "allOf"):
        for choice in schema.get(keyword) or ():
            types |= _types(choice, root, nesting - 1)
    if not types:
        choices = [schema["const"]] if "const" in schema else schema.get("enum") or []
        types = {_kind(choice) for choice in choices}
    return types
