"""Converts tools and tool choices from LangChain's forms."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from langchain_core.tools import BaseTool
from langchain_core.utils.function_calling import convert_to_openai_tool
from langchain_core.utils.pydantic import is_basemodel_subclass

from precedent.errors import ConfigError, PromptError, UnsupportedError
from precedent.langchain.schemas import described_schema, is_json_schema, is_recursive, json_schema_of, kind_of
from precedent.runtime.plain_values import check_plain, first_line, shown
from precedent.text.tool_schema import check_tools

ToolLike = dict[str, Any] | type | Callable[..., Any] | BaseTool
ToolChoice = str | bool | dict[str, Any] | None

AUTO, NONE, ANY = "auto", "none", "any"
"""The choices that name no tool: the model decides, no tool is shown, or the model must call some tool."""

_SYNONYMS: dict[Any, str] = {None: AUTO, False: AUTO, True: ANY, AUTO: AUTO, NONE: NONE, ANY: ANY, "required": ANY}

_OF_FUNCTIONS = ("function", "json_schema", "object", "array", "string", "number", "integer", "boolean", "null")
"""The types of tools that are functions, and of JSON Schemas."""


def openai_tools(tools: Sequence[ToolLike]) -> list[dict[str, Any]]:
    """Tools, functions, pydantic classes and dicts as checked OpenAI function dicts. PromptError names a bad tool."""
    if not isinstance(tools, list | tuple):
        raise PromptError(f"tools={shown(tools)} must be a list of tools")
    distinct: dict[str, dict[str, Any]] = {}
    for position, tool in enumerate(tools, start=1):
        converted = _openai_tool(tool, position)
        check_plain(f"tool number {position}", converted, PromptError)
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


def _openai_tool(tool: ToolLike, position: int) -> dict[str, Any]:
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
    return _repaired(converted, tool)


def _check_not_a_providers(tool: Mapping[str, Any], position: int) -> None:
    """Raise UnsupportedError for a tool that its provider runs, which this model cannot call."""
    name = kind_of(tool)
    if name in _OF_FUNCTIONS or "input_schema" in tool:
        return
    if not name and len(tool) == 1:  # Google's have no type, but their settings under their name
        ((only, settings),) = tool.items()
        name = str(only) if isinstance(settings, Mapping) and only not in ("function", "toolSpec") else ""
    if name:
        raise UnsupportedError(
            f"tool number {position} is {name!r}, which only its provider runs: leave it out, or give a function of "
            "your own that does the same"
        )


def _repaired(converted: dict[str, Any], tool: ToolLike) -> dict[str, Any]:
    """The converted tool with what LangChain loses of a pydantic class: recursion, and a name without a title."""
    arguments = tool.tool_call_schema if isinstance(tool, BaseTool) else tool
    if not (isinstance(arguments, type) and is_basemodel_subclass(arguments)):
        return converted
    schema, function = json_schema_of(arguments), converted["function"]
    function = {**function, "name": function.get("name") or schema["title"]}
    if is_recursive(schema, {**schema.get("$defs", {}), **schema.get("definitions", {})}):
        function["parameters"] = {key: part for key, part in schema.items() if key not in ("title", "description")}
    return {**converted, "function": function}


def _openai_dict(tool: dict[str, Any]) -> dict[str, Any]:
    """The dict in OpenAI's form, where LangChain would lose its schema or pass it on unread."""
    if kind_of(tool) == "function" and "function" not in tool:
        return {"type": "function", "function": {key: value for key, value in tool.items() if key != "type"}}
    wrapped = "schema" in tool or kind_of(tool) == "json_schema"
    if not wrapped and not (is_json_schema(tool) and "title" in tool and "properties" not in tool):
        return tool
    schema, strict = described_schema(tool)
    function = {"name": schema["title"], **{key: schema[key] for key in ("description",) if key in schema}}
    function["parameters"] = {key: value for key, value in schema.items() if key not in ("title", "description")}
    return {"type": "function", "function": function if strict is None else {**function, "strict": strict}}


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
    if not isinstance(tool_choice, Mapping) or kind_of(tool_choice) != "allowed_tools":
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
    choice = _SYNONYMS.get(wanted) if isinstance(wanted, str | bool | None) else None
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
