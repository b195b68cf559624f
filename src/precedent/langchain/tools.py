"""Converts tools and tool choices from LangChain's forms."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from langchain_core.tools import BaseTool
from langchain_core.utils.function_calling import convert_to_openai_tool

from precedent.errors import ConfigError, PromptError
from precedent.langchain.schemas import described_schema, is_json_schema, kind_of
from precedent.runtime.plain_values import check_plain, first_line, shown
from precedent.text.tool_schema import check_tools

ToolLike = dict[str, Any] | type | Callable[..., Any] | BaseTool
ToolChoice = str | bool | dict[str, Any] | None

AUTO, NONE, ANY = "auto", "none", "any"
"""The choices that name no tool: the model decides, no tool is shown, or the model must call some tool."""

_SYNONYMS: dict[Any, str] = {None: AUTO, False: AUTO, True: ANY, AUTO: AUTO, NONE: NONE, ANY: ANY, "required": ANY}


def openai_tools(tools: Sequence[ToolLike]) -> list[dict[str, Any]]:
    """Tools, functions, pydantic classes and dicts as checked OpenAI function dicts. PromptError names a bad tool."""
    if not isinstance(tools, list | tuple):
        raise PromptError(f"tools={shown(tools)} must be a list of tools")
    converted = [_openai_tool(tool, position) for position, tool in enumerate(tools, start=1)]
    for position, tool in enumerate(converted, start=1):
        check_plain(f"tool number {position}", tool, PromptError)
    distinct: dict[str, dict[str, Any]] = {}
    for tool in converted:  # the same schema as a class and as a dict differs only in titles
        distinct.setdefault(json.dumps(_untitled(tool), sort_keys=True, default=str), tool)
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
        tool = _openai_dict(tool)
    try:
        return convert_to_openai_tool(tool)
    except Exception as error:  # pydantic, LangChain and a function's annotations may raise anything
        name = tool.get("name") or tool.get("title") if isinstance(tool, dict) else getattr(tool, "name", None)
        name = name or getattr(tool, "__name__", None)
        titled = 'a "title" for its name, or give ' if is_json_schema(tool) else ""
        raise PromptError(
            f"tool {repr(name) if name else f'number {position}'} cannot be shown to the model "
            f"({first_line(error)}): give {titled}a function, a LangChain tool, a pydantic class, "
            "or a dict in OpenAI's or JSON Schema form"
        ) from error


def _openai_dict(tool: dict[str, Any]) -> dict[str, Any]:
    """The dict in OpenAI's form, where LangChain would lose its schema or pass it on unread."""
    if kind_of(tool) == "function" and "function" not in tool:
        return {"type": "function", "function": {key: value for key, value in tool.items() if key != "type"}}
    wrapped = "schema" in tool or kind_of(tool) == "json_schema"
    if not wrapped and not (is_json_schema(tool) and "title" in tool and "properties" not in tool):
        return tool
    schema, strict = described_schema(tool)
    described = {key: schema[key] for key in ("description",) if key in schema}
    parameters = {key: value for key, value in schema.items() if key not in ("title", "description")}
    said = {} if strict is None else {"strict": strict}
    return {"type": "function", "function": {"name": schema["title"], **described, "parameters": parameters, **said}}


def tool_choice_of(tool_choice: Any, tools: Sequence[Mapping[str, Any]]) -> str:
    """`AUTO`, `NONE`, `ANY` or the name of a tool, from OpenAI's and Anthropic's forms of a tool choice.

    Raises ConfigError for a name that no tool has, a forced call without tools, and anything that is not a tool choice.
    """
    names = [str(tool["function"]["name"]) for tool in tools]
    wanted = _named(tool_choice) if isinstance(tool_choice, Mapping) else tool_choice
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
    """The choice in a dict: OpenAI's `{"type": "function", "function": {"name": …}}` or Anthropic's `{"type": …}`."""
    function = choice.get("function")
    if isinstance(function, Mapping):
        return function.get("name")
    return choice.get("name", choice.get("type"))
