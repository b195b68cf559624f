"""Rewrites JSON Schemas before they become grammars: closed objects, and keys that are named one by one."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from precedent.text.tool_schema import referenced

_COMPOSED = ("allOf", "anyOf", "oneOf", "$ref")
_OPEN = ("additionalProperties", "patternProperties", "unevaluatedProperties")
_MAPS = ("properties", "$defs", "definitions")
_LISTS = ("anyOf", "oneOf", "allOf", "prefixItems")
_SCHEMAS = ("items", "additionalProperties")
_OF_ANY_KEY = frozenset({"type", "title", "description"})
_OF_PATTERNS = _OF_ANY_KEY | {"pattern"}
_OF_KEYS = ("properties", "patternProperties")


def closed(schema: Any) -> Any:
    """Add `additionalProperties: false` to every object that names properties and does not say otherwise.

    The result allows nothing that the schema forbids. Objects whose keys are listed in `propertyNames`, as a dict by an
    enum's members is, get a property for each key, since llguidance does not know `propertyNames`. A schema that
    composes objects (`allOf` of several, properties beside `anyOf`) is not closed, because its parts must leave room
    for each other.
    """
    named = _with_named_keys(schema, schema)
    return named if _composes(named) else _closed(named)


def _with_named_keys(schema: Any, root: Any) -> Any:
    if not isinstance(schema, Mapping):
        return schema
    result = _with_parts(schema, lambda part: _with_named_keys(part, root))
    names = result.get("propertyNames")
    if isinstance(names, Mapping) and isinstance(names.get("$ref"), str):
        names = referenced(names["$ref"], root)
    if not isinstance(names, Mapping) or any(key in result for key in _OF_KEYS):
        return result
    keys = names.get("enum", [names["const"]] if "const" in names else None)
    value = result.get("additionalProperties", True)
    del result["propertyNames"]
    if isinstance(keys, list) and all(isinstance(key, str) for key in keys):
        return {**result, "properties": dict.fromkeys(keys, value), "additionalProperties": False}
    if isinstance(names.get("pattern"), str) and not names.keys() - _OF_PATTERNS:
        return {**result, "patternProperties": {names["pattern"]: value}, "additionalProperties": False}
    return result if not names.keys() - _OF_ANY_KEY else {**result, "propertyNames": names}


def _parts(schema: Mapping[str, Any]) -> list[tuple[str, Any]]:
    found = [(key, list(schema[key].values())) for key in _MAPS if isinstance(schema.get(key), Mapping)]
    found += [(key, schema[key]) for key in _LISTS if isinstance(schema.get(key), list)]
    return found + [(key, [schema[key]]) for key in _SCHEMAS if isinstance(schema.get(key), Mapping)]


def _with_parts(schema: Mapping[str, Any], change: Callable[[Any], Any]) -> dict[str, Any]:
    result = dict(schema)
    for key, parts in _parts(schema):
        values = [change(part) for part in parts]
        result[key] = dict(zip(schema[key], values, strict=True)) if key in _MAPS else values
        if key in _SCHEMAS:
            result[key] = values[0]
    return result


def _composes(schema: Any) -> bool:
    if not isinstance(schema, Mapping):
        return False
    mixed = "properties" in schema and any(key in schema for key in _COMPOSED)
    several = len(schema.get("allOf", ())) > 1
    return mixed or several or any(_composes(part) for _, parts in _parts(schema) for part in parts)


def _closed(schema: Any) -> Any:
    if not isinstance(schema, Mapping):
        return schema
    result = _with_parts(schema, _closed)
    if "properties" in schema and not any(key in schema for key in _OPEN):
        result["additionalProperties"] = False
    return result
