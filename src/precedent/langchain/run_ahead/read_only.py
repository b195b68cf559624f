"""Which tools may run ahead: those on the list, and of those only the ones whose result depends on their arguments."""

from __future__ import annotations

import inspect
import typing
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any, TypeVar, overload

from langchain_core.tools import BaseTool, InjectedToolArg
from langgraph.prebuilt.tool_node import ToolRuntime
from langgraph.types import Command

from precedent.errors import ConfigError, UnsupportedError

MARK = "__precedent_read_only__"
"""Attribute of a function or class that `read_only` sets: True if arguments may come from tool output, else False."""

Marked = TypeVar("Marked")


@overload
def read_only(tool: Marked) -> Marked: ...


@overload
def read_only(*, arguments_from_tools: bool = False) -> Callable[[Marked], Marked]: ...


def read_only(tool: Any = None, *, arguments_from_tools: bool = False) -> Any:
    """Declare that a tool only reads, so that it may run ahead; above or below `@tool`, or on a tool's class.

    With `arguments_from_tools` its arguments may come from another tool's output. Raises ConfigError for a tool object
    without a function of its own: name it in `allow=`.
    """
    if tool is None:
        return partial(read_only, arguments_from_tools=arguments_from_tools)
    marked = _functions_of(tool) if isinstance(tool, BaseTool) else [tool]
    if not marked or not all(callable(one) for one in marked):
        raise ConfigError(f"{tool!r} has no function to mark as read-only: name the tool in allow=[…]")
    for one in marked:
        setattr(getattr(one, "__func__", one), MARK, arguments_from_tools)
    return tool


def mark_of(tool: BaseTool) -> bool | None:
    """What `read_only` said of a tool: None if it is not marked."""
    marked = [getattr(one, MARK) for one in (type(tool), *_functions_of(tool)) if hasattr(one, MARK)]
    return any(marked) if marked else None


def _functions_of(tool: BaseTool) -> list[Any]:
    return [one for one in (getattr(tool, "func", None), getattr(tool, "coroutine", None)) if one is not None]


def hinted(tool: BaseTool) -> bool:
    """Whether an MCP server says of its tool that it only reads: nothing but the server's word."""
    hints = tool.metadata or {}
    return any(hints.get(key) is True for key in ("readOnlyHint", "read_only_hint"))


def check_fit(tool: BaseTool) -> None:
    """Raise UnsupportedError, naming the tool, if its result depends on more than its arguments."""
    reason = unfit(tool)
    if reason:
        raise UnsupportedError(f"the tool {tool.name!r} cannot run ahead: {reason}; take it off the list")


def unfit(tool: BaseTool) -> str | None:
    """Why a tool cannot run ahead; None if it can."""
    if tool.return_direct:
        return "it returns directly, which ends the run"
    try:
        hints = list(_annotations(tool))
    except Exception as error:  # whatever resolving a user's annotations raises
        return f"its annotations cannot be read ({type(error).__name__}: {error})"
    for name, hint in hints:
        if name != "return" and any(map(_injects, _parts(hint))):
            return f"it is given state, store, runtime or its call's id (argument {name!r})"
        if name == "return" and any(_is_command(part) for part in _parts(hint)):
            return "it returns a Command"
    return None


def _annotations(tool: BaseTool) -> Iterator[tuple[str, Any]]:
    """The types of all arguments and of the result, from the tool's schema and from its functions."""
    schemas = [tool.args_schema, tool.get_input_schema()]
    owners = [schema for schema in schemas if isinstance(schema, type)]
    functions = [getattr(type(tool), name, None) for name in ("_run", "_arun")]
    for owner in [*owners, *(_innermost(one) for one in (*_functions_of(tool), *functions) if one is not None)]:
        yield from typing.get_type_hints(owner, include_extras=True).items()


def _innermost(function: Any) -> Any:
    """The function that a partial or a wrapper calls in the end."""
    return _innermost(function.func) if isinstance(function, partial) else inspect.unwrap(function)


def _parts(hint: Any) -> Iterator[Any]:
    """A type and everything that it is made of, however deep."""
    yield hint
    yield from ([typing.get_origin(hint)] if typing.get_origin(hint) is not None else [])
    for part in (*typing.get_args(hint), *getattr(hint, "__metadata__", ())):
        yield from _parts(part)


def _injects(part: Any) -> bool:
    kinds = (InjectedToolArg, ToolRuntime)
    return isinstance(part, kinds) or (isinstance(part, type) and issubclass(part, kinds))


def _is_command(part: Any) -> bool:
    return isinstance(part, type) and issubclass(part, Command)


class ReadOnlyList:
    """The tools that may run ahead. `trust_hints` adds those of which an MCP server says that they only read."""

    def __init__(
        self,
        allow: Sequence[BaseTool | str | Callable[..., Any]],
        arguments_from_tools: Sequence[BaseTool | str | Callable[..., Any]],
        *,
        trust_hints: bool,
    ) -> None:
        for tool in (*allow, *arguments_from_tools):
            if isinstance(tool, BaseTool):
                check_fit(tool)
        self._tools = [tool for tool in allow if isinstance(tool, BaseTool)]
        self._names = {name_of(tool) for tool in allow}
        self._open = {name_of(tool) for tool in arguments_from_tools}
        self._trust_hints = trust_hints

    def holds(self, tool: BaseTool) -> bool:
        """Whether a tool is on the list. One that was given as an object counts only as that object."""
        given = [one for one in self._tools if one.name == tool.name]
        if given:
            return any(one is tool for one in given)
        return tool.name in self._names or mark_of(tool) is not None or (self._trust_hints and hinted(tool))

    def takes_tool_output(self, tool: BaseTool) -> bool:
        """Whether the tool's arguments may come from another tool's output."""
        return tool.name in self._open or bool(mark_of(tool))


def name_of(tool: BaseTool | str | Callable[..., Any]) -> str:
    """The name of a tool, which may be given as an object, a function or its name. Raises ConfigError."""
    name = tool if isinstance(tool, str) else getattr(tool, "name", None) or getattr(tool, "__name__", None)
    if not isinstance(name, str) or not name:
        raise ConfigError(f"{tool!r} is no tool: give tools, or their names")
    return name
