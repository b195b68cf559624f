"""Tools as the model sees them: OpenAI function dicts, checked before they reach a prompt."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from precedent.errors import PromptError
from precedent.runtime.plain_values import check_plain

_TYPES = frozenset({"array", "boolean", "integer", "null", "number", "object", "string"})


def check_tools(tools: Sequence[Mapping[str, Any]]) -> None:
    """Raise PromptError, naming the tool and the problem, unless every tool is a function with a JSON Schema.

    This is a structural check of the JSON Schema (2020-12) keywords that describe arguments; unknown keywords are
    allowed, as in the standard.
    """
    names: set[str] = set()
    for position, tool in enumerate(tools):
        check_plain(f"tool number {position + 1}", tool, PromptError)
        name = _name_of(tool, position)
        if name in names:
            raise PromptError(f"tool {name!r} is bound twice: rename or remove one of them")
        names.add(name)
        try:
            _check_function(tool["function"])
        except ValueError as error:
            raise PromptError(f"tool {name!r} has no valid JSON Schema: {error}") from error


def referenced(reference: str, root: Mapping[str, Any]) -> Any:
    """Resolve a `$ref` within a schema document; None if its target does not exist."""
    found: Any = root
    for key in reference.removeprefix("#/").split("/"):
        found = found.get(key) if isinstance(found, Mapping) else None
    return found


def _name_of(tool: Mapping[str, Any], position: int) -> str:
    function = tool.get("function") if isinstance(tool, Mapping) else None
    name = function.get("name") if isinstance(function, Mapping) else None
    if not isinstance(name, str) or not name.strip():
        raise PromptError(
            f'tool number {position + 1} has no name: give {{"type": "function", "function": {{"name": …}}}}'
        )
    return name


def _check_function(function: Mapping[str, Any]) -> None:
    try:
        json.dumps(function, allow_nan=False)
    except (TypeError, ValueError, RecursionError) as error:
        raise ValueError(f"it cannot be written as JSON ({error})") from error
    _require(isinstance(function.get("description", ""), str), "description must be a text")
    parameters = function.get("parameters") or {}
    whole = isinstance(parameters, Mapping) and parameters.get("type", "object") == "object"
    _require(whole, 'parameters must be a schema of type "object"')
    check_schema(parameters, "parameters")


_MAPS = {"properties", "patternProperties", "$defs", "definitions", "dependentSchemas"}
_LISTS = {"anyOf", "oneOf", "allOf", "prefixItems"}
_SCHEMAS = {"items", "additionalProperties", "not", "if", "then", "else", "contains", "propertyNames"}
_TEXTS = {"$ref", "title", "description", "pattern", "format"}
_SIZES = {"minimum", "maximum", "multipleOf", "minLength", "maxLength", "minItems", "maxItems"}
_PLAIN: dict[str, tuple[str, Callable[[Any], bool]]] = {
    **dict.fromkeys(_TEXTS, ("a text", lambda value: isinstance(value, str))),
    **dict.fromkeys(_SIZES, ("a number", lambda value: isinstance(value, int | float) and not isinstance(value, bool))),
    "enum": ("a list of values", lambda value: isinstance(value, list)),
    "required": ("a list of names", lambda value: isinstance(value, list) and all(isinstance(n, str) for n in value)),
}


def check_schema(schema: Any, where: str) -> None:
    """Raise ValueError, saying what is wrong, unless this is a JSON Schema; `where` is the path to it."""
    if isinstance(schema, bool):
        return
    _require(isinstance(schema, Mapping), f"{where} must be a schema (an object), not {_kind(schema)}")
    for keyword, value in schema.items():
        place = f"{where}.{keyword}"
        if keyword in _MAPS:
            _require(isinstance(value, Mapping), f"{place} must map names to schemas, not be {_kind(value)}")
            for name, inner in value.items():
                check_schema(inner, f"{place}.{name}")
        elif keyword in _LISTS or (keyword == "items" and isinstance(value, list)):
            _require(isinstance(value, list) and bool(value), f"{place} must be a list of schemas, not {_kind(value)}")
            for index, inner in enumerate(value):
                check_schema(inner, f"{place}[{index}]")
        elif keyword in _SCHEMAS:
            check_schema(value, place)
        elif keyword in _PLAIN:
            wanted, holds = _PLAIN[keyword]
            _require(holds(value), f"{place} must be {wanted}, not {_kind(value)}")
            _require(keyword != "required" or len(set(value)) == len(value), f"{place} names a property twice")
        elif keyword == "type":
            for name in value if isinstance(value, list) and value else [value]:
                known = isinstance(name, str) and name in _TYPES
                _require(known, f"{place} is {json.dumps(name)}, not one of {', '.join(sorted(_TYPES))}")


def _require(holds: bool, problem: str) -> None:
    if not holds:
        raise ValueError(problem)


def _kind(value: Any) -> str:
    if isinstance(value, dict):
        return "an object"
    if isinstance(value, list):
        return "a list" if value else "an empty list"
    return json.dumps(value)
