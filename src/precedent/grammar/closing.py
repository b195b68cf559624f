"""Closes JSON Schemas that allow additional properties, so that an answer has only the properties they name."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

_COMPOSED = ("allOf", "anyOf", "oneOf", "$ref")
_OPEN = ("additionalProperties", "patternProperties", "unevaluatedProperties")
_MAPS = ("properties", "$defs", "definitions")
_LISTS = ("anyOf", "oneOf", "allOf", "prefixItems")
_SCHEMAS = ("items", "additionalProperties")


def closed(schema: Any) -> Any:
    """Add `additionalProperties: false` to every object that names properties and does not say otherwise.

    The result allows nothing that the schema forbids. A schema that composes objects (`allOf` of several, properties
    beside `anyOf`) is returned unchanged, because its parts must leave room for each other.
    """
    return schema if _composes(schema) else _closed(schema)


def _parts(schema: Mapping[str, Any]) -> list[tuple[str, Any]]:
    """The keywords that contain schemas, with those schemas."""
    found = [(key, list(schema[key].values())) for key in _MAPS if isinstance(schema.get(key), Mapping)]
    found += [(key, schema[key]) for key in _LISTS if isinstance(schema.get(key), list)]
    return found + [(key, [schema[key]]) for key in _SCHEMAS if isinstance(schema.get(key), Mapping)]


def _composes(schema: Any) -> bool:
    if not isinstance(schema, Mapping):
        return False
    mixed = "properties" in schema and any(key in schema for key in _COMPOSED)
    several = len(schema.get("allOf", ())) > 1
    return mixed or several or any(_composes(part) for _, parts in _parts(schema) for part in parts)


def _closed(schema: Any) -> Any:
    if not isinstance(schema, Mapping):
        return schema
    result = dict(schema)
    for key, parts in _parts(schema):
        values = [_closed(part) for part in parts]
        result[key] = dict(zip(schema[key], values, strict=True)) if key in _MAPS else values
        if key in _SCHEMAS:
            result[key] = values[0]
    if "properties" in schema and not any(key in schema for key in _OPEN):
        result["additionalProperties"] = False
    return result
