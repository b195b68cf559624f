"""Reads what callers give as schemas, tools and tool choices, in LangChain's forms and in those of other libraries."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from langchain_core.tools import BaseTool
from langchain_core.utils.function_calling import convert_to_json_schema, convert_to_openai_tool
from langchain_core.utils.pydantic import is_basemodel_subclass

from precedent.errors import ConfigError, PromptError, UnsupportedError
from precedent.runtime.plain_values import check_plain, first_line, shown
from precedent.text.tool_schema import check_schema, check_tools, referenced

ToolLike = dict[str, Any] | type | Callable[..., Any] | BaseTool
ToolChoice = str | bool | dict[str, Any] | None

AUTO, NONE, ANY = "auto", "none", "any"
"""The choices that name no tool: the model decides, no tool is shown, or the model must call some tool."""

_CHOICES: dict[Any, str] = {None: AUTO, False: AUTO, True: ANY, AUTO: AUTO, NONE: NONE, ANY: ANY, "required": ANY}

_OF_FUNCTIONS = ("function", "json_schema", "object", "array", "string", "number", "integer", "boolean", "null", "")
"""The types of tools that are functions, and of JSON Schemas."""


def kind_of(described: Any) -> str:
    """The value of `type` if it is a text, else an empty text."""
    kind = described.get("type") if isinstance(described, Mapping) else None
    return kind if isinstance(kind, str) else ""


# Schemas

UNNAMED = "answer"
"""The title given to a JSON Schema without one."""

_OF_SCHEMAS = frozenset({"type", "properties", "$ref", "anyOf", "oneOf", "allOf", "enum", "const", "items", "title"})
_OF_TOOLS = frozenset({"name", "function", "toolSpec"})


def is_json_schema(schema: Any) -> bool:
    """True for a dict that is itself a JSON Schema, and not a tool or a wrapper that contains one."""
    return isinstance(schema, Mapping) and bool(schema.keys() & _OF_SCHEMAS) and not schema.keys() & _OF_TOOLS


def described_schema(schema: Any) -> tuple[Any, bool | None]:
    """The schema inside OpenAI's wrapper and the wrapper's `strict`; a JSON Schema without a title gets one.

    Reads `{"name", "strict", "schema"}`, also inside `{"type": "json_schema"}`, and returns anything else unchanged.
    Raises ConfigError for a wrapper without a schema, for lone surrogates, and for nesting that is too deep.
    """
    check_plain("the schema", schema)
    if not _is_wrapper(schema):
        return ({"title": UNNAMED, **schema} if is_json_schema(schema) else schema), None
    inner = schema.get("json_schema", schema) if kind_of(schema) == "json_schema" else schema
    inner = inner if isinstance(inner, Mapping) else {}
    found, name, strict = inner.get("schema"), inner.get("name", UNNAMED), inner.get("strict")
    if not isinstance(found, Mapping) or not isinstance(name, str) or not isinstance(strict, bool | None):
        raise ConfigError(f'{shown(schema)} is not a schema: give {{"name": "…", "schema": {{…}}, "strict": True}}')
    told = {key: inner[key] for key in ("description",) if isinstance(inner.get(key), str)}
    return {"title": name, **told, **{key: value for key, value in found.items() if key != "title"}}, strict


def _is_wrapper(schema: Any) -> bool:
    return kind_of(schema) == "json_schema" or (isinstance(schema, Mapping) and {"schema", "name"} <= schema.keys())


def asked_format(response_format: Any) -> tuple[str, Mapping[str, Any] | None, bool | None]:
    """The type, "text", "json_object" or "json_schema", with the schema of the last and its `strict`.

    Reads OpenAI's dicts of these types, and classes (pydantic, TypedDict); None is text. Raises ConfigError for
    anything else.
    """
    if response_format is None:
        return "text", None, None
    if kind_of(response_format) in ("text", "json_object"):
        return kind_of(response_format), None, None
    if isinstance(response_format, type) or _is_wrapper(response_format):
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
    try:
        found = dict(schema) if is_json_schema(schema) else _converted(schema)
    except Exception as error:  # whatever pydantic, LangChain or a class's own annotations raise
        raise ConfigError(
            f"{shown(schema)} is not a schema ({first_line(error)}): "
            "give a pydantic class, a TypedDict, or a JSON Schema"
        ) from error
    try:
        check_schema(found, "it")
    except ValueError as error:
        raise ConfigError(f"{shown(schema)} is not a JSON Schema: {error}") from error
    return found


def _converted(schema: Any) -> dict[str, Any]:
    if not _is_pydantic(schema):
        return convert_to_json_schema(schema)
    describe: Any = getattr(schema, "model_json_schema", None) or schema.schema
    found = describe()
    # a recursive class's schema has only a reference at its top: title and properties belong there
    top = referenced(found["$ref"], found) if isinstance(found.get("$ref"), str) else None
    rest = {key: value for key, value in found.items() if key != "$ref"}
    return {"title": schema.__name__, **(top if isinstance(top, Mapping) else found), **(rest if top else {})}


def _is_pydantic(schema: Any) -> bool:
    return isinstance(schema, type) and is_basemodel_subclass(schema)


def _is_recursive(schema: Any, definitions: Mapping[str, Any], within: tuple[str, ...] = ()) -> bool:
    """True if following the references in a schema leads into one of its `definitions` again."""
    if isinstance(schema, list):
        return any(_is_recursive(part, definitions, within) for part in schema)
    if not isinstance(schema, Mapping):
        return False
    name = str(schema.get("$ref", "")).rpartition("/")[2]
    if name in definitions and (name in within or _is_recursive(definitions[name], definitions, (*within, name))):
        return True
    parts = [part for key, part in schema.items() if key not in ("$defs", "definitions")]
    return any(_is_recursive(part, definitions, within) for part in parts)


# Tools


def openai_tools(tools: Sequence[ToolLike]) -> list[dict[str, Any]]:
    """Tools, functions, pydantic classes and dicts as checked OpenAI function dicts. PromptError names a bad tool."""
    if not isinstance(tools, list | tuple):
        raise PromptError(f"tools={shown(tools)} must be a list of tools")
    distinct: dict[str, dict[str, Any]] = {}
    for position, tool in enumerate(tools, start=1):
        converted = _openai_tool(tool, position)
        # LangChain's suite binds one tool as a class and as its schema, which differ only in titles
        distinct.setdefault(json.dumps(_untitled(converted), sort_keys=True, default=str), converted)
    check_tools(list(distinct.values()))
    return list(distinct.values())


def _untitled(schema: Any) -> Any:
    """A schema without its titles; a property called "title" stays."""
    if isinstance(schema, Mapping):
        kept = {key: value for key, value in schema.items() if key != "title" or not isinstance(value, str)}
        return {key: _untitled(value) for key, value in kept.items()}
    return [_untitled(part) for part in schema] if isinstance(schema, list) else schema


def _openai_tool(given: ToolLike, position: int) -> dict[str, Any]:
    tool = given
    if isinstance(tool, dict):
        check_plain(f"tool number {position}", tool, PromptError)
        _check_not_a_providers(tool, position)
        tool = _openai_dict(tool)
    try:
        converted = convert_to_openai_tool(tool)
    except Exception as error:  # pydantic, LangChain and a function's annotations may raise anything
        name = tool.get("name") or tool.get("title") if isinstance(tool, dict) else getattr(tool, "name", None)
        name = name or getattr(tool, "__name__", None)
        titled = 'a "title" for its name, or give ' if is_json_schema(tool) else ""
        raise PromptError(
            f"tool {repr(name) if name else f'number {position}'} cannot be shown to the model "
            f"({first_line(error)}): give {titled}a function, a LangChain tool, a pydantic class, "
            "or a dict in OpenAI's or JSON Schema form"
        ) from error
    _check_not_a_providers(converted, position)  # a tool of langchain-openai may become one
    arguments = tool.tool_call_schema if isinstance(tool, BaseTool) else tool
    if _is_pydantic(arguments):  # LangChain loses its recursion, and a name without a title
        schema, function = json_schema_of(arguments), converted["function"]
        function = {**function, "name": function.get("name") or schema["title"]}
        if _is_recursive(schema, {**schema.get("$defs", {}), **schema.get("definitions", {})}):
            function["parameters"] = {key: part for key, part in schema.items() if key not in ("title", "description")}
        converted = {**converted, "function": function}
    check_plain(f"tool number {position}", converted, PromptError)
    return converted


def _check_not_a_providers(tool: Mapping[str, Any], position: int) -> None:
    """Raise UnsupportedError for a tool that its provider runs, which this model cannot call."""
    name = kind_of(tool)
    if not name and len(tool) == 1:  # Google's have no type, but their settings under their name
        ((only, settings),) = tool.items()
        name = str(only) if isinstance(settings, Mapping) and only not in ("function", "toolSpec") else ""
    if name not in _OF_FUNCTIONS and "input_schema" not in tool:
        raise UnsupportedError(
            f"tool number {position} is {name!r}, which only its provider runs: leave it out, or give a function of "
            "your own that does the same"
        )


def _openai_dict(tool: dict[str, Any]) -> dict[str, Any]:
    """The dict in OpenAI's form, where LangChain would lose its schema or pass it on unread."""
    if kind_of(tool) == "function" and "function" not in tool:
        return {"type": "function", "function": {key: value for key, value in tool.items() if key != "type"}}
    if not ("schema" in tool or kind_of(tool) == "json_schema" or (is_json_schema(tool) and "title" in tool)):
        return tool
    schema, strict = described_schema(tool)
    function = {"name": schema["title"], **{key: schema[key] for key in ("description",) if key in schema}}
    function["parameters"] = {key: value for key, value in schema.items() if key not in ("title", "description")}
    return {"type": "function", "function": function if strict is None else {**function, "strict": strict}}


# Tool choices


def allowed_tools(tool_choice: Any, tools: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """The tools that are shown: those that OpenAI's choice of type "allowed_tools" names, or else all.

    Raises ConfigError for a name that no tool has, and for a choice that names none.
    """
    choice = _of_allowed(tool_choice)
    if choice is None:
        return list(tools)
    named = choice.get("tools")
    wanted = [_named(one) if isinstance(one, Mapping) else one for one in named] if isinstance(named, list) else []
    by_name = {str(tool["function"]["name"]): tool for tool in tools}
    if not wanted or not all(isinstance(name, str) and name in by_name for name in wanted):
        raise ConfigError(
            f"tool_choice={shown(tool_choice)} must name bound tools in `tools`; tools: {', '.join(by_name) or 'none'}"
        )
    return [tool for name, tool in by_name.items() if name in wanted]


def _of_allowed(tool_choice: Any) -> Mapping[str, Any] | None:
    """The part of a choice of type "allowed_tools" with `mode` and `tools`; None for any other choice."""
    if kind_of(tool_choice) != "allowed_tools":
        return None
    inner = tool_choice.get("allowed_tools")
    return inner if isinstance(inner, Mapping) else tool_choice


def tool_choice_of(tool_choice: Any, tools: Sequence[Mapping[str, Any]]) -> str:
    """`AUTO`, `NONE`, `ANY` or the name of a tool, from OpenAI's and Anthropic's forms of a tool choice.

    Raises ConfigError for a name that no tool has, a forced call without tools, and anything that is not a tool choice.
    """
    names = [str(tool["function"]["name"]) for tool in tools]
    wanted = _named(tool_choice) if isinstance(tool_choice, Mapping) else tool_choice
    if (allowed := _of_allowed(tool_choice)) is not None:
        wanted = allowed.get("mode", AUTO)
    if isinstance(wanted, str) and wanted in names:
        return wanted
    choice = _CHOICES.get(wanted) if isinstance(wanted, str | bool | None) else None
    if choice == ANY and not names:
        raise ConfigError(f"tool_choice={shown(tool_choice)} forces a call, but no tool is bound: call bind_tools([…])")
    if choice is None:
        raise ConfigError(
            f"tool_choice={shown(tool_choice)} names no bound tool, nor is it 'auto', 'any' or 'none'; tools: "
            f"{', '.join(names) or 'none'}"
        )
    return choice


def _named(choice: Mapping[str, Any]) -> Any:
    function = choice.get("function")
    return function.get("name") if isinstance(function, Mapping) else choice.get("name", choice.get("type"))
