"""`with_structured_output`: binds a model to a schema and parses its answers.

A complete answer is parsed strictly, a streamed one as far as it has arrived.
"""

from __future__ import annotations

import json
from collections.abc import AsyncIterator, Iterator
from itertools import chain
from typing import Any, NoReturn

from langchain_core.language_models.base import LanguageModelInput
from langchain_core.language_models.chat_models import BaseChatModel
from langchain_core.messages import AIMessage, AIMessageChunk, BaseMessage
from langchain_core.output_parsers import BaseCumulativeTransformOutputParser
from langchain_core.outputs import ChatGeneration, Generation
from langchain_core.runnables import Runnable, RunnableLambda, RunnableParallel, RunnablePassthrough
from langchain_core.utils.json import parse_partial_json
from langchain_core.utils.pydantic import is_basemodel_subclass
from pydantic import ValidationError
from pydantic.v1 import BaseModel as BaseModelV1
from pydantic.v1 import ValidationError as ValidationErrorV1

from precedent.errors import ConfigError, PrecedentError
from precedent.langchain.exceptions import AnswerParsingError, in_our_words
from precedent.langchain.tools import described_schema, json_schema_of, openai_tools
from precedent.runtime.plain_values import shown

METHODS = {
    "json_schema": ("response_format",),
    "function_calling": ("tools", "tool_choice", "parallel_tool_calls"),
    "json_mode": ("response_format",),
}
"""The methods that make answers fit a schema, each with the call's arguments that it sets."""


def structured(
    model: BaseChatModel, schema: Any, method: str, strict: bool | None, include_raw: bool, settings: dict[str, Any]
) -> Runnable[LanguageModelInput, Any]:
    """A runnable that answers with objects of a pydantic class, or with dicts for any other `schema`.

    Raises ConfigError for an unknown method, and without a schema if the method needs one.
    """
    if not isinstance(method, str) or method not in METHODS:
        raise ConfigError(f"method={shown(method)} is not one of {', '.join(METHODS)}")
    if not isinstance(include_raw, bool):
        raise ConfigError(f"include_raw={shown(include_raw)} must be True or False")
    for name in METHODS[method]:
        if name in settings:
            raise ConfigError(f"method={method!r} sets {name}= itself: leave it out")
    if schema is None and method != "json_mode":
        raise ConfigError(f"method={method!r} needs a schema: give a pydantic class, a TypedDict, or a JSON Schema")
    if schema is not None:
        schema, own_strict = described_schema(schema)
        strict = own_strict if strict is None else strict
        asked = {"kwargs": {"method": method, "strict": strict}, "schema": schema}
        settings = {**settings, "ls_structured_output_format": asked}
    parser = AnswerParser(schema_class=schema if isinstance(schema, type) and is_basemodel_subclass(schema) else None)
    bound: Runnable[LanguageModelInput, Any]
    if method == "function_calling":
        (tool,) = openai_tools([schema])
        parser.tool = tool["function"]["name"]
        settings |= {"tool_choice": parser.tool, "parallel_tool_calls": False, "strict": strict}
        bound = model.bind_tools([tool], **settings)
    elif method == "json_mode":
        bound = model.bind(response_format={"type": "json_object"}, **settings)
    else:
        described = json_schema_of(schema)
        response_format = {"type": "json_schema", "json_schema": {"schema": described, "name": described["title"]}}
        settings = settings if strict is None else {**settings, "strict": strict}
        bound = model.bind(response_format=response_format, **settings)
    if not include_raw:
        return bound | parser
    parsed, failed = RunnableLambda(parser.data), RunnableLambda(parser.failure)
    return bound | RunnableParallel(raw=RunnablePassthrough(), parsed=parsed, parsing_error=failed)


class AnswerParser(BaseCumulativeTransformOutputParser[Any]):
    """Parses an answer's JSON, or the arguments of its call of `tool`, into a `schema_class` object or a dict.

    Raises AnswerParsingError if `max_tokens` cut the answer, if it is not JSON, if it lacks the call, or if it does not
    fit the class. A stream yields the data parsed so far each time it grows, and finally all of it, or raises.
    """

    schema_class: Any = None
    tool: str | None = None

    def parse(self, text: str) -> Any:
        """The data of a complete text."""
        return self.whole(AIMessage(text))

    def parse_result(self, result: list[Generation], *, partial: bool = False) -> Any:
        """The data of a complete answer; with `partial` the data so far, None if there is too little."""
        generation = result[0]
        message = generation.message if isinstance(generation, ChatGeneration) else AIMessage(generation.text)
        if not partial or getattr(message, "chunk_position", None) == "last":
            return self.whole(message)
        try:
            return self._as_class(parse_partial_json(message.text) if self.tool is None else self._arguments(message))
        except (ValueError, RecursionError, PrecedentError):  # errors of pydantic and of json are ValueErrors
            return None

    async def aparse_result(self, result: list[Generation], *, partial: bool = False) -> Any:
        """The same; LangChain would start a thread for every chunk."""
        return self.parse_result(result, partial=partial)

    def whole(self, message: BaseMessage) -> Any:
        """The data of a complete answer."""
        if message.response_metadata.get("finish_reason") == "length":
            usage = getattr(message, "usage_metadata", None)
            where = f"after {usage['output_tokens']} tokens" if usage else "by max_tokens"
            raise _refused(message, f"the answer was cut {where}: allow more with max_tokens=")
        found = _json(message) if self.tool is None else self._arguments(message)
        try:
            return self._as_class(found)
        except (ValidationError, ValidationErrorV1) as error:
            name = self.schema_class.__name__
            raise _refused(message, f"the answer does not fit {name}: {in_our_words(error)}") from error

    def data(self, message: BaseMessage) -> Any:
        """The data of a complete answer, None if there is none."""
        return None if self.failure(message) else self.whole(message)

    def failure(self, message: BaseMessage) -> Exception | None:
        """The reason why a complete answer holds no data."""
        try:
            self.whole(message)
        except Exception as error:  # a class's validators may raise anything
            return error
        return None

    def _arguments(self, message: BaseMessage) -> Any:
        for call in getattr(message, "tool_calls", ()):
            if call["name"] == self.tool:
                return call["args"]
        broken = getattr(message, "invalid_tool_calls", ())
        raise _refused(message, f"the answer holds {'a broken' if broken else 'no'} call of {self.tool!r}")

    def _as_class(self, found: Any) -> Any:
        if self.schema_class is None:
            return found
        if issubclass(self.schema_class, BaseModelV1):
            return self.schema_class.parse_obj(found)
        return self.schema_class.model_validate(found)

    def _transform(self, input: Iterator[str | BaseMessage]) -> Iterator[Any]:
        yield from super()._transform(chain(map(_chunk, input), [_END]))

    async def _atransform(self, input: AsyncIterator[str | BaseMessage]) -> AsyncIterator[Any]:
        async def chunks() -> AsyncIterator[str | BaseMessage]:
            async for one in input:
                yield _chunk(one)
            yield _END

        async for found in super()._atransform(chunks()):
            yield found


_END = AIMessageChunk(content="", chunk_position="last")
"""Ends every stream, so that one which broke off is parsed strictly, too."""


def _chunk(streamed: str | BaseMessage) -> AIMessageChunk:
    if isinstance(streamed, AIMessageChunk):
        return streamed
    return (
        AIMessageChunk(content=streamed)
        if isinstance(streamed, str)
        else AIMessageChunk(**streamed.model_dump(exclude={"type"}))
    )


def _refused(message: BaseMessage, why: str) -> AnswerParsingError:
    calls = [json.dumps(call["args"]) for call in getattr(message, "tool_calls", ())]
    broken = [call["args"] for call in getattr(message, "invalid_tool_calls", ())]
    text = next(filter(None, [str(message.text), *calls, *broken]), "")
    return AnswerParsingError(f"{why}; the answer: {shown(text)}", llm_output=text)


def _json(message: BaseMessage) -> Any:
    def no_number(constant: str) -> NoReturn:
        raise ValueError(f"{constant} is not a JSON number")

    try:
        return json.loads(message.text, parse_constant=no_number)
    except (ValueError, RecursionError) as error:
        raise _refused(message, f"the answer is not JSON ({error})") from error
