"""`with_structured_output`: the model bound to a schema, and the parser that reads its answers."""

from __future__ import annotations

from operator import itemgetter
from typing import TYPE_CHECKING, Any

from langchain_core.language_models.base import LanguageModelInput
from langchain_core.output_parsers import BaseOutputParser, JsonOutputParser, PydanticOutputParser
from langchain_core.output_parsers.openai_tools import JsonOutputKeyToolsParser, PydanticToolsParser
from langchain_core.runnables import Runnable, RunnableMap, RunnablePassthrough
from langchain_core.utils.pydantic import is_basemodel_subclass

from precedent.errors import ConfigError
from precedent.langchain.structured import json_schema_of
from precedent.langchain.tools import openai_tools

if TYPE_CHECKING:
    from precedent.langchain.chat_model import ChatPrecedent

METHODS = ("json_schema", "function_calling", "json_mode")

Parser = BaseOutputParser[Any]


def structured(
    model: ChatPrecedent, schema: Any, method: str, strict: bool | None, include_raw: bool, kwargs: dict[str, Any]
) -> Runnable[LanguageModelInput, Any]:
    """A runnable whose answers are of `schema`: objects of a pydantic class, dicts for everything else.

    Raises ConfigError on an unknown method, or without a schema where the method needs one.
    """
    if method not in METHODS:
        raise ConfigError(f"method={method!r} is not one of {', '.join(METHODS)}")
    if schema is None and method != "json_mode":
        raise ConfigError(f"method={method!r} needs a schema: give a pydantic class, a TypedDict, or a JSON Schema")
    told = {"ls_structured_output_format": {"kwargs": {"method": method, "strict": strict}, "schema": schema}}
    bind = {"json_schema": _by_grammar, "function_calling": _by_call, "json_mode": _by_json_mode}[method]
    bound, parser = bind(model, schema, strict, {**kwargs, **(told if schema is not None else {})})
    return _with_raw(bound, parser) if include_raw else bound | parser


Bound = tuple[Runnable[LanguageModelInput, Any], Parser]


def _by_grammar(model: ChatPrecedent, schema: Any, strict: bool | None, kwargs: dict[str, Any]) -> Bound:
    described = {"schema": json_schema_of(schema), "name": _name_of(schema)}
    if strict is not None:
        kwargs["strict"] = strict
    bound = model.bind(response_format={"type": "json_schema", "json_schema": described}, **kwargs)
    return bound, _text_parser(schema)


def _by_json_mode(model: ChatPrecedent, schema: Any, strict: bool | None, kwargs: dict[str, Any]) -> Bound:
    return model.bind(response_format={"type": "json_object"}, **kwargs), _text_parser(schema)


def _by_call(model: ChatPrecedent, schema: Any, strict: bool | None, kwargs: dict[str, Any]) -> Bound:
    name = _name_of(schema)
    bound = model.bind_tools([schema], tool_choice=name, parallel_tool_calls=False, strict=strict, **kwargs)
    if _is_pydantic(schema):
        return bound, PydanticToolsParser(tools=[schema], first_tool_only=True)
    return bound, JsonOutputKeyToolsParser(key_name=name, first_tool_only=True)


def _text_parser(schema: Any) -> Parser:
    return PydanticOutputParser(pydantic_object=schema) if _is_pydantic(schema) else JsonOutputParser()


def _with_raw(bound: Runnable[LanguageModelInput, Any], parser: Parser) -> Runnable[LanguageModelInput, Any]:
    """`{"raw": message, "parsed": …, "parsing_error": …}`; an answer that cannot be parsed raises nothing."""
    parsed = RunnablePassthrough.assign(parsed=itemgetter("raw") | parser, parsing_error=lambda _: None)
    failed = RunnablePassthrough.assign(parsed=lambda _: None)
    return RunnableMap(raw=bound) | parsed.with_fallbacks([failed], exception_key="parsing_error")


def _is_pydantic(schema: Any) -> bool:
    return isinstance(schema, type) and is_basemodel_subclass(schema)


def _name_of(schema: Any) -> str:
    return str(openai_tools([schema])[0]["function"]["name"])
