"""`with_structured_output`: binds a model to a schema and parses its answers.

A complete answer is parsed strictly, a streamed one as far as it has arrived.
"""

from __future__ import annotations

import json
from collections.abc import AsyncIterator, Iterator
from typing import Any, NoReturn

from langchain_core.language_models.base import LanguageModelInput
from langchain_core.language_models.chat_models import BaseChatModel
from langchain_core.messages import AIMessage, AIMessageChunk, BaseMessage
from langchain_core.output_parsers.transform import BaseTransformOutputParser
from langchain_core.outputs import ChatGeneration, Generation
from langchain_core.runnables import AddableDict, Runnable
from langchain_core.utils.json import parse_partial_json
from langchain_core.utils.pydantic import is_basemodel_subclass
from pydantic import ValidationError
from pydantic.v1 import BaseModel as BaseModelV1
from pydantic.v1 import ValidationError as ValidationErrorV1

from precedent.errors import ConfigError, PrecedentError
from precedent.langchain.exceptions import AnswerParsingError, in_our_words
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
    schema_class = schema if isinstance(schema, type) and is_basemodel_subclass(schema) else None
    parser = AnswerParser(schema_class=schema_class, include_raw=include_raw)
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
    return bound | parser


class AnswerParser(BaseTransformOutputParser[Any]):
    """Parses an answer's JSON, or the arguments of its call of `tool`, into a `schema_class` object or a dict.

    Raises AnswerParsingError if `max_tokens` cut the answer, if it is not JSON, if it lacks the call, or if it does not
    fit the class. A stream yields the data parsed so far each time it grows, and finally all of it, or raises. With
    `include_raw` an answer is a dict of `raw`, `parsed` and `parsing_error`, and nothing is raised.
    """

    schema_class: Any = None
    tool: str | None = None
    include_raw: bool = False

    def parse_result(self, result: list[Generation], *, partial: bool = False) -> Any:
        """The data of a complete answer; with `partial` the data so far, None if there is too little."""
        generation = result[0]
        message = generation.message if isinstance(generation, ChatGeneration) else AIMessage(generation.text)
        if self.include_raw:
            return {"raw": message, **self.outcome(message)}
        return self.so_far(message) if partial else self.whole(message)

    def parse(self, text: str) -> Any:
        """The data of a complete text."""
        return self.whole(AIMessage(text))

    def whole(self, message: BaseMessage) -> Any:
        """The data of a complete answer."""
        if message.response_metadata.get("finish_reason") == "length":
            usage = getattr(message, "usage_metadata", None)
            where = f"after {usage['output_tokens']} tokens" if usage else "by max_tokens"
            raise _refused(message, f"the answer was cut {where}: allow more with max_tokens=")
        if self.tool is not None:
            found = self._arguments(message, self.tool)
        else:
            try:
                found = json.loads(message.text, parse_constant=_no_json)
            except (ValueError, RecursionError) as error:
                raise _refused(message, f"the answer is not JSON ({error})") from error
        try:
            return self._as_class(found)
        except (ValidationError, ValidationErrorV1) as error:
            name = self.schema_class.__name__
            raise _refused(message, f"the answer does not fit {name}: {in_our_words(error)}") from error

    def outcome(self, message: BaseMessage) -> AddableDict:
        """The data of a complete answer, or why there is none."""
        try:
            return AddableDict(parsed=self.whole(message), parsing_error=None)
        except Exception as error:  # a class's validators may raise anything
            return AddableDict(parsed=None, parsing_error=error)

    def so_far(self, message: BaseMessage) -> Any:
        """The data of the beginning of an answer; None if there is too little."""
        try:
            found = parse_partial_json(message.text) if self.tool is None else self._arguments(message, self.tool)
            return self._as_class(found)
        except (ValueError, RecursionError, PrecedentError):  # errors of pydantic and of json are ValueErrors
            return None

    def _arguments(self, message: BaseMessage, tool: str) -> Any:
        for call in getattr(message, "tool_calls", ()):
            if call["name"] == tool:
                return call["args"]
        broken = getattr(message, "invalid_tool_calls", ())
        raise _refused(message, f"the answer holds {'a broken' if broken else 'no'} call of {tool!r}")

    def _as_class(self, found: Any) -> Any:
        if self.schema_class is None:
            return found
        if issubclass(self.schema_class, BaseModelV1):
            return self.schema_class.parse_obj(found)
        return self.schema_class.model_validate(found)

    def _transform(self, input: Iterator[str | BaseMessage]) -> Iterator[Any]:
        seen = _Seen(self)
        for chunk in input:
            yield from seen.more(chunk)
        yield from seen.end()

    async def _atransform(self, input: AsyncIterator[str | BaseMessage]) -> AsyncIterator[Any]:
        seen = _Seen(self)
        async for chunk in input:
            for found in seen.more(chunk):
                yield found
        for found in seen.end():
            yield found

    @property
    def OutputType(self) -> Any:
        """The pydantic class, or a dict."""
        return self.schema_class or dict[str, Any]

    @property
    def _type(self) -> str:
        return "precedent-answer"


class _Seen:
    """The part of one answer that was streamed, and the data last parsed from it."""

    def __init__(self, parser: AnswerParser) -> None:
        self._parser, self._last = parser, None
        self._message: Any = None

    def more(self, chunk: str | BaseMessage) -> Iterator[Any]:
        """The data if this chunk changes it; the last chunk is left to `end`."""
        new: Any = AIMessageChunk(content=chunk) if isinstance(chunk, str) else chunk
        self._message = new if self._message is None else self._message + new
        if self._parser.include_raw:
            yield AddableDict(raw=chunk)
        elif "finish_reason" not in self._message.response_metadata:
            yield from self._unless_known(self._parser.so_far(self._message))

    def end(self) -> Iterator[Any]:
        """The data of the complete answer. Raises AnswerParsingError."""
        if self._message is not None and self._parser.include_raw:
            yield self._parser.outcome(self._message)
        elif self._message is not None:
            yield from self._unless_known(self._parser.whole(self._message))

    def _unless_known(self, found: Any) -> Iterator[Any]:
        if found is not None and found != self._last:
            self._last = found
            yield found


def _refused(message: BaseMessage, why: str) -> AnswerParsingError:
    calls = [json.dumps(call["args"]) for call in getattr(message, "tool_calls", ())]
    broken = [call["args"] for call in getattr(message, "invalid_tool_calls", ())]
    text = next(filter(None, [str(message.text), *calls, *broken]), "")
    return AnswerParsingError(f"{why}; the answer: {shown(text)}", llm_output=text)


def _no_json(constant: str) -> NoReturn:
    raise ValueError(f"{constant} is not a JSON number")
