"""Tool calls as templates: everything that is certain about a call before the model has written anything.

Calls are written in the model's own format, if its arguments are JSON. Arguments come in the schema's order: one
template has the required arguments, and a second one has all of them if there are more.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

from precedent.text.templates import Hole, Template
from precedent.text.tool_formats.builtin import HERMES
from precedent.text.tool_formats.description import ToolFormat
from precedent.text.tool_schema import referenced

_MAX_REFERENCES = 8


def tool_templates(tools: Sequence[Mapping[str, Any]], form: ToolFormat | None = HERMES) -> tuple[Template, ...]:
    """Templates for calls of these tools (checked OpenAI function dicts); none if `form` has no JSON arguments."""
    if form is None or form.arguments != "json":
        return ()
    return tuple(template for tool in tools for template in _templates_of(tool["function"], form))


def _templates_of(function: Mapping[str, Any], form: ToolFormat) -> list[Template]:
    schema = function.get("parameters") or {}
    properties = schema.get("properties") or {}
    required = [name for name in properties if name in (schema.get("required") or ())]
    variants = [required, list(properties)] if required != list(properties) else [required]
    around = form.around_arguments(function["name"])
    return [_template(around, {name: properties[name] for name in names}, schema) for names in variants]


def _template(around: tuple[str, str], arguments: Mapping[str, Any], root: Mapping[str, Any]) -> Template:
    before, after = around
    parts: list[str | Hole] = [f"{before}{{"]
    for number, (name, schema) in enumerate(arguments.items()):
        parts.append(f"{', ' if number else ''}{_json(name)}: ")
        parts += _value(name, schema, root)
    return Template(_joined([*parts, f"}}{after}"]), is_call=True)


def _value(name: str, schema: Any, root: Mapping[str, Any]) -> list[str | Hole]:
    """The parts of a value that its schema determines, with holes for the rest."""
    schema = _resolved(schema, root)
    choices = _choices(schema)
    kind = schema.get("type")
    if choices:
        return [Hole(name, "json", choices)]
    if kind == "string":
        return ['"', Hole(name, "string"), '"']
    if kind in ("integer", "number"):
        return [Hole(name, "number")]
    if kind == "array":
        return ["[", *_value(name, schema.get("items"), root), "]"]
    if kind == "object":
        return ["{", Hole(name, "json"), "}"]
    return [Hole(name, "json")]


def _choices(schema: Mapping[str, Any]) -> tuple[str, ...]:
    if "const" in schema:
        return (_json(schema["const"]),)
    if schema.get("enum"):
        return tuple(dict.fromkeys(map(_json, schema["enum"])))
    return ("true", "false") if schema.get("type") == "boolean" else ()


def _resolved(schema: Any, root: Mapping[str, Any]) -> Mapping[str, Any]:
    """Resolve references within the document and take the first alternative that is not null."""
    for _ in range(_MAX_REFERENCES):
        if not isinstance(schema, Mapping):
            return {}
        if isinstance(schema.get("$ref"), str):
            schema = referenced(schema["$ref"], root)
        elif alternatives := schema.get("anyOf") or schema.get("oneOf"):
            schema = next((one for one in alternatives if not _is_null(one)), {})
        else:
            return schema
    return {}


def _is_null(schema: Any) -> bool:
    return isinstance(schema, Mapping) and schema.get("type") == "null"


def _joined(parts: Sequence[str | Hole]) -> tuple[str | Hole, ...]:
    """Merge neighbouring texts."""
    joined: list[str | Hole] = []
    for part in parts:
        if isinstance(part, str) and joined and isinstance(joined[-1], str):
            joined[-1] += part
        else:
            joined.append(part)
    return tuple(joined)


def _json(value: Any) -> str:
    return json.dumps(value, ensure_ascii=False)
