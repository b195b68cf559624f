"""`with_structured_output`: binds a model to a schema and adds the parser for its answers."""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterator
from typing import Any

from langchain_core.language_models.base import LanguageModelInput
from langchain_core.language_models.chat_models import BaseChatModel
from langchain_core.runnables import AddableDict, Runnable, RunnableGenerator
from langchain_core.utils.pydantic import is_basemodel_subclass

from precedent.errors import ConfigError
from precedent.langchain.answer_parser import AnswerParser
from precedent.langchain.schemas import described_schema, json_schema_of
from precedent.langchain.tools import openai_tools
from precedent.runtime.plain_values import shown

METHODS = {
    "json_schema": ("response_format",),
    "function_calling": ("tools", "tool_choice", "parallel_tool_calls"),
    "json_mode": ("response_format",),
}
"""The methods that make answers fit a schema, each with the call's arguments that it sets."""


def structured(
    model: BaseChatModel, schema: Any, method: str, strict: bool | None, include_raw: bool, kwargs: dict[str, Any]
) -> Runnable[LanguageModelInput, Any]:
    """A runnable that answers with objects of a pydantic class, or with dicts for any other `schema`.

    Raises ConfigError for an unknown method, and without a schema if the method needs one.
    """
    if not isinstance(method, str) or method not in METHODS:
        raise ConfigError(f"method={shown(method)} is not one of {', '.join(METHODS)}")
    if not isinstance(include_raw, bool):
        raise ConfigError(f"include_raw={shown(include_raw)} must be True or False")
    kwargs = {name: value for name, value in kwargs.items() if value is not None}
    for name in METHODS[method]:
        if name in kwargs:
            raise ConfigError(f"method={method!r} sets {name}= itself: leave it out")
    if schema is None and method != "json_mode":
        raise ConfigError(f"method={method!r} needs a schema: give a pydantic class, a TypedDict, or a JSON Schema")
    if schema is not None:
        schema, own_strict = described_schema(schema)
        strict = own_strict if strict is None else strict
        asked = {"kwargs": {"method": method, "strict": strict}, "schema": schema}
        kwargs = {**kwargs, "ls_structured_output_format": asked}
    bind = {"json_schema": _by_grammar, "function_calling": _by_call, "json_mode": _by_json_mode}[method]
    bound, parser = bind(model, schema, strict, kwargs)
    return bound | (_with_raw(parser) if include_raw else parser)


Bound = tuple[Runnable[LanguageModelInput, Any], AnswerParser]


def _by_grammar(model: BaseChatModel, schema: Any, strict: bool | None, kwargs: dict[str, Any]) -> Bound:
    described = json_schema_of(schema)
    if strict is not None:
        kwargs["strict"] = strict
    response_format = {"type": "json_schema", "json_schema": {"schema": described, "name": described["title"]}}
    return model.bind(response_format=response_format, **kwargs), AnswerParser(schema_class=_class(schema))


def _by_json_mode(model: BaseChatModel, schema: Any, strict: bool | None, kwargs: dict[str, Any]) -> Bound:
    return model.bind(response_format={"type": "json_object"}, **kwargs), AnswerParser(schema_class=_class(schema))


def _by_call(model: BaseChatModel, schema: Any, strict: bool | None, kwargs: dict[str, Any]) -> Bound:
    (tool,) = openai_tools([schema])
    name = tool["function"]["name"]
    bound = model.bind_tools([tool], tool_choice=name, parallel_tool_calls=False, strict=strict, **kwargs)
    return bound, AnswerParser(schema_class=_class(schema), tool=name)


def _with_raw(parser: AnswerParser) -> Runnable[Any, dict[str, Any]]:
    """`{"raw": message, "parsed": …, "parsing_error": …}`; it does not raise if the answer cannot be parsed."""

    def read(chunks: Iterator[Any]) -> Iterator[Any]:
        whole: Any = None
        for chunk in chunks:
            whole = chunk if whole is None else whole + chunk
            yield AddableDict(raw=chunk)
        yield parsed(whole)

    async def aread(chunks: AsyncIterator[Any]) -> AsyncIterator[Any]:
        whole: Any = None
        async for chunk in chunks:
            whole = chunk if whole is None else whole + chunk
            yield AddableDict(raw=chunk)
        yield parsed(whole)

    def parsed(message: Any) -> AddableDict:
        try:
            return AddableDict(parsed=parser.invoke(message), parsing_error=None)
        except Exception as error:  # a class's validators may raise anything
            return AddableDict(parsed=None, parsing_error=error)

    return RunnableGenerator(read, aread, name="with_raw")


def _class(schema: Any) -> Any:
    """The pydantic class of the answers; None if they are dicts."""
    return schema if isinstance(schema, type) and is_basemodel_subclass(schema) else None
