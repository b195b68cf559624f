"""Tools and tool choice as LangChain gives them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from langchain_core.tools import BaseTool
from langchain_core.utils.function_calling import convert_to_openai_tool

from precedent.errors import PromptError, UnsupportedError
from precedent.text.tool_schema import check_tools

ToolLike = dict[str, Any] | type | Callable[..., Any] | BaseTool


def openai_tools(tools: Sequence[ToolLike]) -> list[dict[str, Any]]:
    """Tools, functions, pydantic classes and dicts as checked OpenAI function dicts. Raises PromptError by tool."""
    converted = [_openai_tool(tool, position) for position, tool in enumerate(tools, start=1)]
    check_tools(converted)
    return converted


def _openai_tool(tool: ToolLike, position: int) -> dict[str, Any]:
    try:
        return convert_to_openai_tool(tool)
    except (ValueError, TypeError, KeyError, AttributeError) as error:
        name = tool.get("name") or tool.get("title") if isinstance(tool, dict) else getattr(tool, "name", None)
        name = name or getattr(tool, "__name__", None)
        raise PromptError(
            f"tool {repr(name) if name else f'number {position}'} cannot be shown to the model "
            f"({str(error).splitlines()[0]}): give a function, a LangChain tool, a pydantic class, "
            "or a dict in OpenAI's or JSON Schema form"
        ) from error


def check_tool_choice(tool_choice: Any) -> None:
    """Raise UnsupportedError unless the choice is left to the model or tools are switched off."""
    if tool_choice not in (None, "auto", "none"):
        raise UnsupportedError(
            f"tool_choice={tool_choice!r} is not supported: no call can be forced, the model decides; "
            "use tool_choice='auto' or 'none'"
        )
