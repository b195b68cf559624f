"""`POST /v1/chat/completions`: reads a body, asks the model, and writes the answers whole or as a stream of chunks."""

from __future__ import annotations

import json
import secrets
import time
from collections.abc import AsyncGenerator, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

from langchain_core.messages import BaseMessage
from openai.types.chat import ChatCompletion, ChatCompletionChunk, ChatCompletionStreamOptionsParam
from openai.types.chat.completion_create_params import CompletionCreateParamsBase
from pydantic import ConfigDict, with_config
from starlette.requests import Request
from starlette.responses import Response

from precedent.config import SpeculationConfig
from precedent.errors import PrecedentError
from precedent.runtime.plain_values import shown
from precedent.sampling.logprobs import TokenLogprob
from precedent.text.answers import CallPiece, Piece
from precedent.text.tool_formats import ReasoningPiece
from precedent_server.answers import Answer, reply, speculation_of, steps_of, usage_of
from precedent_server.bodies import SAMPLING, Keys, Messages, biases, checked, parsed
from precedent_server.errors import ApiError, api_error
from precedent_server.history import read_messages
from precedent_server.keys import Caller
from precedent_server.serving import Served, Serving
from precedent_server.settings import ServerLimits
from precedent_server.sources import Sources, SourceTexts
from precedent_server.transport import DONE, error_event, event, read_body

MOST_TOOLS = 1024
"""Tools of a request; a call that is forced among more could not be held to a grammar."""


@with_config(ConfigDict(extra="forbid"))
class StreamOptions(ChatCompletionStreamOptionsParam, total=False):
    """OpenAI's options of a stream, and ours."""

    include_sources: bool


_OPENAI = (
    *("top_logprobs", "tools", "tool_choice", "parallel_tool_calls", "response_format"),
    *("reasoning_effort", "prediction", *SAMPLING.openai),
)
_OWN: Mapping[str, Any] = {
    "chat_template_kwargs": dict[str, Any],
    "reasoning": bool,
    "workflow_step": str,
    "templates": list[str],
    "speculation": bool | dict[str, Any],
    **SAMPLING.own,
}
"""Keys that mean to the model what they mean here, of OpenAI's and of ours."""

KEYS = Keys(
    CompletionCreateParamsBase,
    required=("model", "messages"),
    supported=(
        *("messages", "model", "stream", "stream_options", "n", "max_tokens", "max_completion_tokens", "logit_bias"),
        *("modalities", *_OPENAI),
    ),
    own={"messages": Messages, "stream": bool, "stream_options": StreamOptions, **_OWN},
    instead={
        "functions": "write tools",
        "function_call": "write tool_choice",
        "audio": "only text is read and written",
        "web_search_options": "there is no search: give the model a tool",
        "verbosity": "say in the prompt how long the answer should be, and bound it with max_completion_tokens",
        "tenant": "the API key says whose request it is",
    },
)


@dataclass(frozen=True, slots=True)
class ChatRequest:
    """One request. `settings` are a chat model's call's; answer number i of several uses `seed + i`.

    `keys` are those of its body, `renamed` says what it calls settings that have another name here. `num_ignored` parts
    of its messages were not read.
    """

    model: str
    messages: list[BaseMessage]
    settings: Mapping[str, Any]
    num_choices: int
    stream: bool
    include_usage: bool
    include_sources: bool
    keys: tuple[str, ...]
    renamed: Mapping[str, str]
    num_ignored: int = 0


def chat_request(body: Mapping[str, Any], limits: ServerLimits) -> ChatRequest:
    """Read a parsed body. Raises ApiError that names the key, or a PrecedentError."""
    _check_tools(body.get("tools"))
    said = checked(body, KEYS)
    if said.get("modalities", ["text"]) != ["text"]:
        raise ApiError("only text is written", param="modalities", code="unsupported_value")
    _check_bounds(said, limits)
    messages, num_ignored = read_messages(said["messages"])
    said |= _allowed_tools(said)
    settings = {name: said[name] for name in (*_OPENAI, *_OWN) if name in said}
    given = [said[name] for name in ("max_tokens", "max_completion_tokens") if name in said]
    if len(set(given)) > 1:
        raise ApiError("max_tokens and max_completion_tokens differ: give one of the two", param="max_tokens")
    if given:
        settings["max_tokens"] = given[0]
    if "logit_bias" in said:
        settings["logit_bias"] = biases(said["logit_bias"])
    if isinstance(settings.get("speculation"), dict):
        settings["speculation"] = SpeculationConfig.from_dict(settings["speculation"])
    options = said.get("stream_options", {})
    renamed = {"max_tokens": "max_completion_tokens"} if "max_completion_tokens" in said else {}
    return ChatRequest(
        model=said["model"],
        messages=messages,
        settings=settings,
        num_choices=said.get("n", 1),
        stream=said.get("stream", False),
        include_usage=options.get("include_usage") is True,
        include_sources=options.get("include_sources") is True,
        keys=tuple(said),
        renamed={"prompt": "messages", **renamed},
        num_ignored=num_ignored,
    )


def _check_tools(tools: Any) -> None:
    """Raise ApiError for too many tools, and for one that the client does not run itself."""
    if isinstance(tools, list) and len(tools) > MOST_TOOLS:
        raise ApiError(f"tools has {len(tools):,} tools: at most {MOST_TOOLS:,} are allowed", param="tools")
    for tool in tools if isinstance(tools, list) else ():
        if isinstance(tool, dict) and tool.get("type", "function") != "function":
            raise ApiError(
                f"a tool of type {tool['type']!r} is not supported: only functions that the client runs are",
                param="tools", code="unsupported_value",
            )  # fmt: skip


def _allowed_tools(said: Mapping[str, Any]) -> dict[str, Any]:
    """A choice among some of the tools as a choice of mode, with these tools alone."""
    choice = said.get("tool_choice")
    if not isinstance(choice, dict) or choice["type"] != "allowed_tools":
        return {}
    allowed = [_name_of(tool) for tool in choice["allowed_tools"]["tools"]]
    known = {_name_of(tool): tool for tool in said.get("tools", ())}
    if not allowed:
        raise ApiError("tool_choice allows no tool: name some, or choose 'none'", param="tool_choice")
    if unknown := [name for name in allowed if name not in known]:
        raise ApiError(
            f"tool_choice allows {unknown[0]!r}, which is not among tools: {', '.join(map(str, known)) or 'none'}",
            param="tool_choice",
        )
    return {"tools": [known[name] for name in known if name in allowed], "tool_choice": choice["allowed_tools"]["mode"]}


def _name_of(tool: Mapping[str, Any]) -> Any:
    function = tool.get("function")
    return function.get("name") if isinstance(function, dict) else None


def _check_bounds(said: Mapping[str, Any], limits: ServerLimits) -> None:
    """Raise ApiError for a request that asks for more than the server allows."""
    number, stops = said.get("n", 1), said.get("stop", ())
    if not 1 <= number <= limits.max_choices:
        raise ApiError(f"n={shown(number)} must be between 1 and {limits.max_choices}", param="n")
    if not isinstance(stops, str) and len(stops) > limits.max_stops:
        raise ApiError(f"stop has {len(stops)} texts: at most {limits.max_stops} are allowed", param="stop")
    for name in ("tools", "response_format", "chat_template_kwargs"):
        size = len(json.dumps(said.get(name)))
        if size > limits.max_schema_bytes:
            raise ApiError(f"{name} is longer than {limits.max_schema_bytes} bytes", param=name)
        if any(len(pattern) > limits.max_pattern_length for pattern in _patterns(said.get(name))):
            raise ApiError(f"a pattern is longer than {limits.max_pattern_length} characters", param=name)


def _patterns(schema: Any) -> Iterator[str]:
    """Texts under `pattern`, at any depth."""
    if isinstance(schema, Mapping):
        if isinstance(schema.get("pattern"), str):
            yield schema["pattern"]
        for part in schema.values():
            yield from _patterns(part)
    elif isinstance(schema, list):
        for part in schema:
            yield from _patterns(part)


async def chat_completions(serving: Serving, caller: Caller, request: Request) -> Response:
    """Answer one request, whole or as a stream."""

    def read(raw: bytes) -> ChatRequest:
        body = parsed(raw)
        try:
            return chat_request(body, serving.limits)
        except PrecedentError as error:
            raise api_error(error, body, {"prompt": "messages"}) from error

    asked = await read_body(request, serving, read)
    return await reply_to_chat(serving, caller, request, asked, partial(ChatWriter, asked))


async def reply_to_chat(serving: Serving, caller: Caller, request: Request, asked: ChatRequest, write: Any) -> Response:
    """Ask the model, and answer with what the writer that `write` makes says. Raises ApiError."""
    serving.num_ignored += asked.num_ignored
    begin = partial(_begin, serving.model(asked.model), asked, caller.tenant, serving.limits.default_max_tokens)
    return await reply(
        serving, caller, request, number=asked.num_choices, begin=begin, write=write, stream=asked.stream
    )


def _begin(served: Served, asked: ChatRequest, tenant: str, most_tokens: int, index: int) -> Answer:
    settings = {**served.settings_of(asked.settings, most_tokens), "tenant": tenant}
    if settings.get("seed") is not None:
        settings["seed"] += index
    try:
        begun = served.chat.begin(asked.messages, settings)
    except PrecedentError as error:
        raise api_error(error, asked.keys, asked.renamed) from error
    return Answer(index, begun.engine, begun.generation, begun.syntax, whole=not asked.stream)


class ChatWriter:
    """Writes answers as OpenAI's chat completions, whole or as a stream of chunks.

    With `include_sources` each chunk has `sources`: the answer's tokens so far that no chunk before it told.
    """

    def __init__(self, asked: ChatRequest, answers: Sequence[Answer]) -> None:
        self._answers, self._include_usage = answers, asked.include_usage
        self._head = {"id": f"chatcmpl-{secrets.token_hex(12)}", "created": int(time.time()), "model": asked.model}
        self._untold: dict[int, list[TokenLogprob]] = {answer.index: [] for answer in answers}
        shown = {answer.index: answer.syntax for answer in answers if asked.include_sources}
        self._sources = {index: SourceTexts(syntax) for index, syntax in shown.items() if syntax is not None}
        self._untold_sources: dict[int, Sources] = {answer.index: [] for answer in answers}

    def whole(self) -> dict[str, Any]:
        """The completion of answers that were read to their ends."""
        told = {
            **self._head,
            "object": "chat.completion",
            "choices": [_choice(answer) for answer in self._answers],
            "usage": usage_of(self._answers),
            "speculation": speculation_of(self._answers),
        }
        return ChatCompletion.model_validate(told).model_dump(mode="json", exclude_unset=True)

    async def events(self) -> AsyncGenerator[str, None]:
        """The chunks of a stream: those that say who speaks, the pieces, the ends, and the usage.

        The first chunk of a step tells its log-probabilities and sources, and those of steps without a piece before.
        """
        yield "".join(self._chunk(answer, {"role": "assistant", "content": ""}) for answer in self._answers)
        async for answer, emission, pieces in steps_of(self._answers):
            self._untold[answer.index] += emission.logprobs
            if self._sources:
                self._untold_sources[answer.index] += self._sources[answer.index].push(emission)
            written = [self._chunk(answer, _delta(piece)) for piece in pieces if not _ends(piece)]
            if written:
                yield "".join(written)
        for index, sources in self._sources.items():
            self._untold_sources[index] += sources.finish()
        ends = "".join(
            self._chunk(answer, {}, finish_reason=answer.finish_reason, speculation=speculation_of([answer]))
            for answer in self._answers
        )
        if self._include_usage:
            ends += self._written([], [], usage=usage_of(self._answers), speculation=speculation_of(self._answers))
        yield ends + DONE

    def failed(self, error: ApiError) -> str:
        """The event that ends a stream which failed."""
        return error_event(error)

    def _chunk(self, answer: Answer, delta: dict[str, Any], finish_reason: str | None = None, **told: Any) -> str:
        index = answer.index
        logprobs, self._untold[index] = answer.logprobs(self._untold[index]), []
        sources, self._untold_sources[index] = self._untold_sources[index], []
        choice = {"index": index, "delta": delta, "logprobs": logprobs, "finish_reason": finish_reason}
        return self._written([choice], sources, **({"usage": None} if self._include_usage else {}), **told)

    def _written(self, choices: list[Any], sources: Sources, **told: Any) -> str:
        told |= {"sources": sources} if self._sources else {}
        chunk = {**self._head, "object": "chat.completion.chunk", "choices": choices, **told}
        return event(ChatCompletionChunk.model_validate(chunk).model_dump_json(exclude_unset=True))


def _choice(answer: Answer) -> dict[str, Any]:
    content = answer.text or (None if answer.calls else "")
    message: dict[str, Any] = {"role": "assistant", "content": content, "refusal": None}
    if answer.reasoning:
        message["reasoning_content"] = answer.reasoning
    if answer.calls:
        message["tool_calls"] = answer.calls
    return {
        "index": answer.index,
        "message": message,
        "finish_reason": answer.finish_reason,
        "logprobs": answer.logprobs(answer.result.logprobs),
    }


def _delta(piece: Piece) -> dict[str, Any]:
    if isinstance(piece, ReasoningPiece):
        return {"reasoning_content": piece.text}
    if not isinstance(piece, CallPiece):
        return {"content": piece.text}
    if piece.call_id is None:
        return {"tool_calls": [{"index": piece.index, "function": {"arguments": piece.arguments}}]}
    function = {"name": piece.name, "arguments": ""}
    return {"tool_calls": [{"index": piece.index, "id": piece.call_id, "type": "function", "function": function}]}


def _ends(piece: Piece) -> bool:
    """Whether a piece only says that the answer's end cut its call."""
    return isinstance(piece, CallPiece) and piece.cut
