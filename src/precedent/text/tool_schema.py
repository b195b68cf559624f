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
    """Raise ValueError, saying what is wrong, unless a function's description and parameters are valid."""
    try:
        json.dumps(function, allow_nan=False)
    except (TypeError, ValueError, RecursionError) as error:
        raise ValueError(f"it cannot be written as JSON ({error})") from error
    _require(isinstance(function.get("description", ""), str), "description must be a text")
    parameters = function.get("parameters") or {}
    whole = isinstance(parameters, Mapping) and parameters.get("type", "object") == "object"
    _require(whole, 'parameters must be a schema of type "object"')
    check_schema(parameters, "parameters")


def check_schema(schema: Any, where: str) -> None:
    """Raise ValueError, saying what is wrong, unless this is a JSON Schema; `where` is the path to it."""
    if isinstance(schema, bool):
        return
    _require(isinstance(schema, Mapping), f"{where} must be a schema (an object), not {_kind(schema)}")
    for keyword, value in schema.items():
        if check := _CHECKS.get(keyword):
            check(value, f"{where}.{keyword}")


def _require(holds: bool, problem: str) -> None:
    if not holds:
        raise ValueError(problem)


def _check_type(value: Any, where: str) -> None:
    for name in value if isinstance(value, list) and value else [value]:
        known = isinstance(name, str) and name in _TYPES
        _require(known, f"{where} is {json.dumps(name)}, not one of {', '.join(sorted(_TYPES))}")


def _check_map(value: Any, where: str) -> None:
    _require(isinstance(value, Mapping), f"{where} must map names to schemas, not be {_kind(value)}")
    for name, schema in value.items():
        check_schema(schema, f"{where}.{name}")


def _check_list(value: Any, where: str) -> None:
    _require(isinstance(value, list) and bool(value), f"{where} must be a list of schemas, not {_kind(value)}")
    for index, schema in enumerate(value):
        check_schema(schema, f"{where}[{index}]")


def _check_items(value: Any, where: str) -> None:
    (_check_list if isinstance(value, list) else check_schema)(value, where)


def _check_required(value: Any, where: str) -> None:
    names = isinstance(value, list) and all(isinstance(name, str) for name in value)
    _require(names, f"{where} must be a list of names, not {_kind(value)}")
    _require(len(set(value)) == len(value), f"{where} names a property twice")


def _check_enum(value: Any, where: str) -> None:
    _require(isinstance(value, list), f"{where} must be a list of values, not {_kind(value)}")


def _check_text(value: Any, where: str) -> None:
    _require(isinstance(value, str), f"{where} must be a text, not {_kind(value)}")


def _check_number(value: Any, where: str) -> None:
    number = isinstance(value, int | float) and not isinstance(value, bool)
    _require(number, f"{where} must be a number, not {_kind(value)}")


def _kind(value: Any) -> str:
    if isinstance(value, dict):
        return "an object"
    if isinstance(value, list):
        return "a list" if value else "an empty list"
    return json.dumps(value)


_SIZES = ("minimum", "maximum", "multipleOf", "minLength", "maxLength", "minItems", "maxItems")
_CHECKS: dict[str, Callable[[Any, str], None]] = {
    "type": _check_type,
    **dict.fromkeys(("properties", "patternProperties", "$defs", "definitions", "dependentSchemas"), _check_map),
    **dict.fromkeys(("anyOf", "oneOf", "allOf", "prefixItems"), _check_list),
    **dict.fromkeys(("additionalProperties", "not", "if", "then", "else", "contains", "propertyNames"), check_schema),
    "items": _check_items,
    "required": _check_required,
    "enum": _check_enum,
    **dict.fromkeys(("$ref", "title", "description", "pattern", "format"), _check_text),
    **dict.fromkeys(_SIZES, _check_number),
}
