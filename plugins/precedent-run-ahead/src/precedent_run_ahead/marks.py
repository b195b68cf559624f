"""The list of tools that may run ahead, and the checks that a tool's result depends on its arguments alone."""

from __future__ import annotations

import inspect
import typing
import weakref
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from types import MethodType
from typing import Any, TypeVar, overload

from langchain_core.tools import BaseTool, InjectedToolArg, StructuredTool, Tool
from langgraph.prebuilt.tool_node import ToolRuntime
from langgraph.types import Command

from precedent.errors import ConfigError, UnsupportedError

Marked = TypeVar("Marked")
Tools = Sequence[BaseTool | str | Callable[..., Any]]


class Declarations:
    """Tools, functions and classes that were declared to read only, each by its identity.

    Nothing is written on them, so that no copy, wrapper, heir or other instance inherits a declaration. One holds as
    long as what it was made about stays the same: a tool that is given another function is no longer declared.
    """

    def __init__(self) -> None:
        self._by_id: dict[tuple[int, ...], tuple[list[weakref.ref[Any]], list[weakref.ref[Any] | None], bool]] = {}

    def add(self, declared: Any, arguments_from_tools: bool) -> None:
        """Declare an object. Raises ConfigError if Python cannot refer to it weakly."""
        key = _identity(declared)
        try:
            refs = [weakref.ref(one, lambda _: self._by_id.pop(key, None)) for one in _anchors(declared)]
            parts = [None if part is None else weakref.ref(part) for part in _parts_of(declared)]
        except TypeError as error:
            raise ConfigError(f"{declared!r} cannot be declared ({error}): give the tool that is made of it") from error
        self._by_id[key] = refs, parts, arguments_from_tools

    def of(self, tool: BaseTool) -> bool | None:
        """Return what was declared of a tool, or of everything that it runs; None if it was not declared."""
        said = self._of_object(tool)
        if said is not None or _hidden(tool):
            return said
        own = [type(tool)] if type(tool) not in (StructuredTool, Tool) else []
        declared = [self._of_object(one) for one in (*own, *_functions_of(tool))]
        return all(declared) if declared and None not in declared else None

    def covers_a_part_of(self, tool: BaseTool) -> bool:
        """Whether a class or function that the tool uses is declared, though not the tool as it is."""
        used = [*type(tool).__mro__, *_functions_of(tool)]
        return any(self._of_object(inner) is not None for one in used for inner in _within(one))

    def _of_object(self, declared: Any) -> bool | None:
        found = self._by_id.get(_identity(declared))
        if found is None:
            return None
        refs, parts, said = found
        now = _parts_of(declared)
        same = all(ref() is one for ref, one in zip(refs, _anchors(declared), strict=True)) and len(parts) == len(now)
        same = same and all((ref and ref()) is part for ref, part in zip(parts, now, strict=True))
        return said if same else None


def _anchors(declared: Any) -> tuple[Any, ...]:
    """The objects whose identity is that of the declared one: a bound method is made anew at each access."""
    return (declared.__self__, declared.__func__) if isinstance(declared, MethodType) else (declared,)


def _identity(declared: Any) -> tuple[int, ...]:
    return tuple(map(id, _anchors(declared)))


def _parts_of(declared: Any) -> list[Any]:
    """Everything that decides what the declared object does and that could be exchanged later."""
    if isinstance(declared, BaseTool):
        functions = _functions_of(declared)
        code = [part for function in functions for part in (function, *_parts_of(function))]
        return [type(declared), *_parts_of(type(declared)), *_hidden(declared), *code]
    if isinstance(declared, type):
        return [inspect.getattr_static(declared, name, None) for name in ("_run", "_arun")]
    return [getattr(declared, "__code__", None)]


def _functions_of(tool: BaseTool) -> list[Any]:
    return [one for one in (getattr(tool, "func", None), getattr(tool, "coroutine", None)) if one is not None]


def _hidden(tool: BaseTool) -> list[Any]:
    """Attributes of a tool object that hide a method of its class."""
    held = vars(tool).copy()  # a run ahead, on another thread, may add what pydantic caches there
    return [value for name, value in held.items() if callable(getattr(type(tool), name, None))]


def _within(used: Any) -> Iterator[Any]:
    """A callable and those that it calls in the end, as far as Python shows them."""
    yield used
    for name in ("__func__", "__wrapped__", "func"):
        inner = None if isinstance(used, type) else getattr(used, name, None)
        if callable(inner):
            yield from _within(inner)


_MARKED = Declarations()


@overload
def read_only(tool: Marked) -> Marked: ...


@overload
def read_only(*, arguments_from_tools: bool = False) -> Callable[[Marked], Marked]: ...


def read_only(tool: Any = None, *, arguments_from_tools: bool = False) -> Any:
    """Declare that a tool only reads, so that it may run ahead; above or below `@tool`, or on a tool's class.

    The declaration covers exactly this tool object, this function or bound method, or this class: no copy, wrapper,
    partial, subclass or other instance of it. With `arguments_from_tools` its arguments may come from another tool's
    output. Raises ConfigError for anything else.
    """
    if tool is None:
        return partial(read_only, arguments_from_tools=arguments_from_tools)
    if isinstance(tool, staticmethod | classmethod):
        raise ConfigError(f"expected a function, got {tool!r}: put @read_only below @{type(tool).__name__}")
    if any(tool is kind for kind in (BaseTool, StructuredTool, Tool)):
        raise ConfigError(f"{tool.__name__} is every tool's class: mark a tool, a function or a class of your own")
    if not callable(tool) and not isinstance(tool, BaseTool):
        raise ConfigError(f"expected a tool, a function or a class, got {tool!r}")
    _MARKED.add(tool, arguments_from_tools)
    return tool


def mark_of(tool: BaseTool) -> bool | None:
    """Return whether `read_only` allowed arguments from tool output; None if the tool is not marked."""
    return _MARKED.of(tool)


def lost_mark(tool: BaseTool) -> str | None:
    """Return why a tool is not covered by a mark that stands on a part of it; None if none does."""
    if _MARKED.of(tool) is not None or not _MARKED.covers_a_part_of(tool):
        return None
    return (
        "read_only marks a function or class that it uses, but not this very tool (methods, wrappers, partials and "
        "subclasses are not covered): mark the tool itself, read_only(tool)"
    )


_INJECTED = "it is given state, store, runtime or its call's id"


def unfit(tool: BaseTool) -> str | None:
    """Why a tool cannot run ahead; None if it can."""
    if tool.return_direct:
        return "it returns directly, which ends the run"
    try:
        hints = list(_annotations(tool))
    except Exception as error:  # whatever resolving a user's annotations raises
        return f"its annotations cannot be read ({type(error).__name__}: {error})"
    for name, hint in hints:
        refused = (Command,) if name == "return" else (InjectedToolArg, ToolRuntime)
        kinds = [part if isinstance(part, type) else type(part) for part in _parts(hint)]
        if any(issubclass(kind, refused) for kind in kinds):
            return "it returns a Command" if name == "return" else f"{_INJECTED} (argument {name!r})"
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


class ReadOnlyList:
    """The tools that may run ahead. `trust_hints` adds those of which an MCP server says that they only read."""

    def __init__(self, allow: Tools, arguments_from_tools: Tools, *, trust_hints: bool) -> None:
        self._allowed, self._open = _Given(allow), _Given(arguments_from_tools)
        self._hints = ("readOnlyHint", "read_only_hint") if trust_hints else ()

    def holds(self, tool: BaseTool) -> bool:
        """Whether a tool is on the list."""
        hinted = any((tool.metadata or {}).get(key) is True for key in self._hints)
        return hinted or self._allowed.holds(tool) or mark_of(tool) is not None

    def takes_tool_output(self, tool: BaseTool) -> bool:
        """Whether the tool's arguments may come from another tool's output."""
        return self._open.holds(tool) or bool(mark_of(tool))


class _Given:
    """Tools that were given as objects, functions or names. An object or function counts only as itself."""

    def __init__(self, given: Tools) -> None:
        self._names, self._declared = {one for one in given if isinstance(one, str)}, Declarations()
        for one in given:
            if isinstance(one, BaseTool) and (reason := unfit(one)):
                raise UnsupportedError(f"the tool {one.name!r} cannot run ahead: {reason}; take it off the list")
            if isinstance(one, type) or not (callable(one) or isinstance(one, BaseTool | str)):
                raise ConfigError(f"expected tools, functions or names of tools, got {one!r}")
            if not isinstance(one, str):
                self._declared.add(one, True)

    def holds(self, tool: BaseTool) -> bool:
        return tool.name in self._names or self._declared.of(tool) is not None
