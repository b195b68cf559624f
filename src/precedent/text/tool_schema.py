"""Tools as the model sees them: OpenAI function dicts, checked before they reach a prompt."""

from __future__ import annotations

import hashlib
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
        problem = _problem_of(tool["function"])
        if problem:
            raise PromptError(f"tool {name!r} has no valid JSON Schema: {problem}")


def tools_fingerprint(tools: Sequence[Mapping[str, Any]]) -> str:
    """A short hash of the tool schemas, independent of the order of keys; "" without tools."""
    if not tools:
        return ""
    return hashlib.sha256(json.dumps(list(tools), sort_keys=True).encode()).hexdigest()[:32]


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


def _problem_of(function: Mapping[str, Any]) -> str | None:
    try:
        json.dumps(function, allow_nan=False)
    except (TypeError, ValueError, RecursionError) as error:
        return f"it cannot be written as JSON ({error})"
    if not isinstance(function.get("description", ""), str):
        return "description must be a text"
    parameters = function.get("parameters")
    if parameters is None or parameters == {}:
        return None
    if not isinstance(parameters, Mapping) or parameters.get("type", "object") != "object":
        return 'parameters must be a schema of type "object"'
    return schema_problem(parameters, "parameters")


def schema_problem(schema: Any, where: str) -> str | None:
    """Describe what is wrong with a JSON Schema, or return None; `where` is the path to it."""
    if isinstance(schema, bool):
        return None
    if not isinstance(schema, Mapping):
        return f"{where} must be a schema (an object), not {_kind(schema)}"
    for keyword, value in schema.items():
        check = _CHECKS.get(keyword)
        problem = check(value, f"{where}.{keyword}") if check else None
        if problem:
            return problem
    return None


def _type_problem(value: Any, where: str) -> str | None:
    wanted = value if isinstance(value, list) and value else [value]
    for name in wanted:
        if not isinstance(name, str) or name not in _TYPES:
            return f"{where} is {json.dumps(name)}, not one of {', '.join(sorted(_TYPES))}"
    return None


def _map_problem(value: Any, where: str) -> str | None:
    if not isinstance(value, Mapping):
        return f"{where} must map names to schemas, not be {_kind(value)}"
    problems = (schema_problem(schema, f"{where}.{name}") for name, schema in value.items())
    return next((problem for problem in problems if problem), None)


def _list_problem(value: Any, where: str) -> str | None:
    if not isinstance(value, list) or not value:
        return f"{where} must be a list of schemas, not {_kind(value)}"
    problems = (schema_problem(schema, f"{where}[{index}]") for index, schema in enumerate(value))
    return next((problem for problem in problems if problem), None)


def _items_problem(value: Any, where: str) -> str | None:
    return _list_problem(value, where) if isinstance(value, list) else schema_problem(value, where)


def _required_problem(value: Any, where: str) -> str | None:
    if not isinstance(value, list) or not all(isinstance(name, str) for name in value):
        return f"{where} must be a list of names, not {_kind(value)}"
    return f"{where} names a property twice" if len(set(value)) < len(value) else None


def _enum_problem(value: Any, where: str) -> str | None:
    return None if isinstance(value, list) else f"{where} must be a list of values, not {_kind(value)}"


def _text_problem(value: Any, where: str) -> str | None:
    return None if isinstance(value, str) else f"{where} must be a text, not {_kind(value)}"


def _number_problem(value: Any, where: str) -> str | None:
    number = isinstance(value, int | float) and not isinstance(value, bool)
    return None if number else f"{where} must be a number, not {_kind(value)}"


def _kind(value: Any) -> str:
    if isinstance(value, dict):
        return "an object"
    if isinstance(value, list):
        return "a list" if value else "an empty list"
    return json.dumps(value)


_CHECKS: dict[str, Callable[[Any, str], str | None]] = {
    "type": _type_problem,
    **dict.fromkeys(("properties", "patternProperties", "$defs", "definitions", "dependentSchemas"), _map_problem),
    **dict.fromkeys(("anyOf", "oneOf", "allOf", "prefixItems"), _list_problem),
    **dict.fromkeys(("additionalProperties", "not", "if", "then", "else", "contains", "propertyNames"), schema_problem),
    "items": _items_problem,
    "required": _required_problem,
    "enum": _enum_problem,
    **dict.fromkeys(("$ref", "title", "description", "pattern", "format"), _text_problem),
    **dict.fromkeys(
        ("minimum", "maximum", "multipleOf", "minLength", "maxLength", "minItems", "maxItems"), _number_problem
    ),
}
