"""Parses answers into data: a complete answer strictly, a streamed one as far as it has arrived."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator, Iterator
from typing import Any, NoReturn

from langchain_core.messages import AIMessage, AIMessageChunk, BaseMessage
from langchain_core.output_parsers.transform import BaseTransformOutputParser
from langchain_core.outputs import ChatGeneration, Generation
from langchain_core.utils.json import parse_partial_json
from pydantic import ValidationError
from pydantic.v1 import BaseModel as BaseModelV1
from pydantic.v1 import ValidationError as ValidationErrorV1

from precedent.errors import PrecedentError
from precedent.langchain.exceptions import AnswerParsingError
from precedent.langchain.wording import in_our_words
from precedent.runtime.plain_values import shown

NOTHING = object()
"""The result while too little of an answer has arrived to parse."""


class AnswerParser(BaseTransformOutputParser[Any]):
    """Parses an answer's JSON, or the arguments of its call of `tool`, into a `schema_class` object or a dict.

    Raises AnswerParsingError if `max_tokens` cut the answer, if it is not JSON, if it lacks the call, or if it does not
    fit the class. A stream yields the data parsed so far each time it grows, and finally all of it, or raises.
    """

    schema_class: Any = None
    tool: str | None = None

    def parse_result(self, result: list[Generation], *, partial: bool = False) -> Any:
        """The data of a complete answer; with `partial` the data so far, None if there is too little."""
        generation = result[0]
        whole = generation.message if isinstance(generation, ChatGeneration) else AIMessage(generation.text)
        if not partial:
            return self._whole(whole)
        found = self._so_far(whole)
        return None if found is NOTHING else found

    def parse(self, text: str) -> Any:
        """The data of a complete text."""
        return self._whole(AIMessage(text))

    def _whole(self, message: BaseMessage) -> Any:
        if message.response_metadata.get("finish_reason") == "length":
            raise _refused(message, f"the answer was cut {_where(message)}: allow more with max_tokens=")
        found = self._json(message) if self.tool is None else self._arguments(message, self.tool)
        try:
            return self._as_class(found)
        except (ValidationError, ValidationErrorV1) as error:
            raise _refused(
                message, f"the answer does not fit {self.schema_class.__name__}: {in_our_words(error)}"
            ) from error

    def _json(self, message: BaseMessage) -> Any:
        try:
            return json.loads(message.text, parse_constant=_no_json)
        except (ValueError, RecursionError) as error:
            raise _refused(message, f"the answer is not JSON ({error})") from error

    def _arguments(self, message: BaseMessage, tool: str) -> Any:
        for call in getattr(message, "tool_calls", ()):
            if call["name"] == tool:
                return call["args"]
        broken = getattr(message, "invalid_tool_calls", ())
        raise _refused(message, f"the answer holds {'a broken' if broken else 'no'} call of {tool!r}")

    def _so_far(self, message: BaseMessage) -> Any:
        try:
            if self.tool is None:
                return self._as_class(parse_partial_json(message.text))
            return self._as_class(self._arguments(message, self.tool))
        except (ValueError, RecursionError, PrecedentError):  # errors of pydantic and of json are ValueErrors
            return NOTHING

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
        self._parser, self._last = parser, NOTHING
        self._message: Any = None

    def more(self, chunk: str | BaseMessage) -> Iterator[Any]:
        """The data if this chunk changes it; the last chunk is left to `end`."""
        new = AIMessageChunk(content=chunk) if isinstance(chunk, str) else chunk
        self._message = new if self._message is None else self._message + new
        if "finish_reason" not in self._message.response_metadata:
            yield from self._unless_known(self._parser._so_far(self._message))

    def end(self) -> Iterator[Any]:
        """The data of the complete answer. Raises AnswerParsingError."""
        if self._message is not None:
            yield from self._unless_known(self._parser._whole(self._message))

    def _unless_known(self, found: Any) -> Iterator[Any]:
        if found is not NOTHING and (self._last is NOTHING or found != self._last):
            self._last = found
            yield found


def _refused(message: BaseMessage, why: str) -> AnswerParsingError:
    broken = [call["args"] for call in getattr(message, "invalid_tool_calls", ())]
    calls = [json.dumps(call["args"]) for call in getattr(message, "tool_calls", ())]
    text = next(filter(None, [str(message.text), *calls, *broken]), "")
    return AnswerParsingError(f"{why}; the answer: {shown(text)}", llm_output=text)


def _where(message: BaseMessage) -> str:
    usage = getattr(message, "usage_metadata", None)
    return f"after {usage['output_tokens']} tokens" if usage else "by max_tokens"


def _no_json(constant: str) -> NoReturn:
    raise ValueError(f"{constant} is not a JSON number")
