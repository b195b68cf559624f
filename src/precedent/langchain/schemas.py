"""Reads the schemas that callers give: classes, JSON Schemas, and JSON Schemas in OpenAI's wrappers."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from langchain_core.utils.function_calling import convert_to_json_schema
from langchain_core.utils.pydantic import is_basemodel_subclass

from precedent.errors import ConfigError
from precedent.runtime.plain_values import check_plain, first_line, shown
from precedent.text.tool_schema import check_schema, referenced

UNNAMED = "answer"
"""The title given to a JSON Schema without one."""

_OF_SCHEMAS = frozenset({"type", "properties", "$ref", "anyOf", "oneOf", "allOf", "enum", "const", "items", "title"})
_OF_TOOLS = frozenset({"name", "function", "toolSpec"})


def is_json_schema(schema: Any) -> bool:
    """True for a dict that is itself a JSON Schema, and not a tool or a wrapper that contains one."""
    return isinstance(schema, Mapping) and bool(schema.keys() & _OF_SCHEMAS) and not schema.keys() & _OF_TOOLS


def kind_of(described: Mapping[str, Any]) -> str:
    """The value of `type` if it is a text, else an empty text."""
    kind = described.get("type")
    return kind if isinstance(kind, str) else ""


def described_schema(schema: Any) -> tuple[Any, bool | None]:
    """The schema inside OpenAI's wrapper and the wrapper's `strict`; a JSON Schema without a title gets one.

    Reads `{"name", "strict", "schema"}`, also inside `{"type": "json_schema"}`, and returns anything else unchanged.
    Raises ConfigError for a wrapper without a schema, for lone surrogates, and for nesting that is too deep.
    """
    check_plain("the schema", schema)
    wrapping = _wrapping(schema)
    if wrapping is None:
        return ({"title": UNNAMED, **schema} if is_json_schema(schema) else schema), None
    found, name, strict = wrapping.get("schema"), wrapping.get("name", UNNAMED), wrapping.get("strict")
    if not isinstance(found, Mapping) or not isinstance(name, str) or not isinstance(strict, bool | None):
        raise ConfigError(f'{shown(schema)} is not a schema: give {{"name": "…", "schema": {{…}}, "strict": True}}')
    told = {key: wrapping[key] for key in ("description",) if isinstance(wrapping.get(key), str)}
    return {"title": name, **told, **{key: value for key, value in found.items() if key != "title"}}, strict


def _wrapping(schema: Any) -> Mapping[str, Any] | None:
    if not isinstance(schema, Mapping):
        return None
    if kind_of(schema) == "json_schema":
        inner = schema.get("json_schema", schema)
        return inner if isinstance(inner, Mapping) else {}
    return schema if "schema" in schema and "name" in schema else None


def asked_format(response_format: Any) -> tuple[str, Mapping[str, Any] | None, bool | None]:
    """The type, "text", "json_object" or "json_schema", with the schema of the last and its `strict`.

    Reads OpenAI's dicts of these types, and classes (pydantic, TypedDict); None is text. Raises ConfigError for
    anything else.
    """
    if response_format is None:
        return "text", None, None
    if isinstance(response_format, type):
        return "json_schema", json_schema_of(response_format), None
    if isinstance(response_format, Mapping) and kind_of(response_format) in ("text", "json_object"):
        return kind_of(response_format), None, None
    if _wrapping(response_format) is not None:
        schema, strict = described_schema(response_format)
        return "json_schema", json_schema_of(schema), strict
    raise ConfigError(
        f"response_format={shown(response_format)} is neither a class nor a dict of type 'text', 'json_object' or "
        '\'json_schema\' ({"type": "json_schema", "json_schema": {"name": …, "schema": {…}}})'
    )


def json_schema_of(schema: Any) -> dict[str, Any]:
    """The JSON Schema of a pydantic class (v2 or v1), a TypedDict, a function, or a dict that describes one.

    Raises ConfigError for anything else.
    """
    found = dict(schema) if is_json_schema(schema) else _converted(schema)
    try:
        check_schema(found, "it")
    except ValueError as error:
        raise ConfigError(f"{shown(schema)} is not a JSON Schema: {error}") from error
    return found


def _converted(schema: Any) -> dict[str, Any]:
    try:
        if not (isinstance(schema, type) and is_basemodel_subclass(schema)):
            return convert_to_json_schema(schema)
        describe: Any = getattr(schema, "model_json_schema", None) or schema.schema  # type: ignore[attr-defined]
        found = describe()
        # a recursive class's schema has only a reference at its top: title and properties belong there
        top = referenced(found["$ref"], found) if isinstance(found.get("$ref"), str) else None
        rest = {key: value for key, value in found.items() if key != "$ref"}
        return {"title": schema.__name__, **(top if isinstance(top, Mapping) else found), **(rest if top else {})}
    except Exception as error:  # whatever pydantic, LangChain or a class's own annotations raise
        raise ConfigError(
            f"{shown(schema)} is not a schema ({first_line(error)}): "
            "give a pydantic class, a TypedDict, or a JSON Schema"
        ) from error


def is_recursive(schema: Any, definitions: Mapping[str, Any], within: tuple[str, ...] = ()) -> bool:
    """True if following the references in a schema leads into one of its `definitions` again."""
    if isinstance(schema, list):
        return any(is_recursive(part, definitions, within) for part in schema)
    if not isinstance(schema, Mapping):
        return False
    name = str(schema.get("$ref", "")).rpartition("/")[2]
    if name in definitions and (name in within or is_recursive(definitions[name], definitions, (*within, name))):
        return True
    parts = [part for key, part in schema.items() if key not in ("$defs", "definitions")]
    return any(is_recursive(part, definitions, within) for part in parts)
