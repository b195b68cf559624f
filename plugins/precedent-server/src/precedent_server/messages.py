"""`POST /v1/messages` and `/v1/messages/count_tokens`: Anthropic's interface, stateless as theirs is.

A body is read by writing it as one of `/v1/chat/completions`.
"""

from __future__ import annotations

import json
import secrets
from collections.abc import AsyncGenerator, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from datetime import UTC, datetime
from functools import partial
from itertools import groupby
from typing import Annotated, Any, Literal, NotRequired

from pydantic import ConfigDict, Field, with_config
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from typing_extensions import TypedDict

from precedent.errors import PrecedentError
from precedent.langchain.messages import result_text
from precedent.runtime.plain_values import shown
from precedent.text.answers import CallPiece, Piece
from precedent.text.assembly import decoded, hidden_tokens
from precedent.text.tool_formats import ReasoningPiece
from precedent.text.tool_formats.json_text import load_object
from precedent_server.answers import Answer, Asked, answering, speculation_of, steps_of
from precedent_server.bodies import MOST_MESSAGES, Keys, check_most, checked, fits, parsed, unsupported
from precedent_server.chat import chat_request
from precedent_server.errors import ApiError, api_error
from precedent_server.keys import Caller
from precedent_server.serving import Serving
from precedent_server.settings import ServerLimits
from precedent_server.transport import model_of, read_body, unless_gone

VERSION_HEADER = "anthropic-version"
"""The header by which a client says that it speaks Anthropic's dialect. Any version is answered alike."""

SIGNATURE = "precedent"
"""The signature of every thought; clients send no thought back that has none."""

BROKEN = "INVALID_JSON"
"""The only key of a call's input if the model's arguments are no JSON object, as Anthropic recommends to wrap them."""

Effort = Literal["low", "medium", "high", "xhigh", "max"]
_FORBIDS = with_config(ConfigDict(extra="forbid"))


class Turn(TypedDict):
    """A message of the conversation. Blocks of content are checked when they are read."""

    role: Literal["user", "assistant", "system"]
    content: str | list[dict[str, Any]]


class TextBlock(TypedDict):
    """A text."""

    type: Literal["text"]
    text: str


class ThinkingBlock(TypedDict):
    """Reasoning of the model."""

    type: Literal["thinking"]
    thinking: str
    signature: NotRequired[str]


class ToolUseBlock(TypedDict):
    """A call."""

    type: Literal["tool_use"]
    id: str
    name: str
    input: dict[str, Any]


class ToolResultBlock(TypedDict):
    """The result of a call."""

    type: Literal["tool_result"]
    tool_use_id: str
    content: NotRequired[str | list[dict[str, Any]]]
    is_error: NotRequired[bool]


class Tool(TypedDict):
    """A tool that the client runs. The last two keys cannot change an answer of this server."""

    name: str
    input_schema: dict[str, Any]
    type: NotRequired[Literal["custom"]]
    description: NotRequired[str]
    strict: NotRequired[bool]
    defer_loading: NotRequired[Literal[False]]
    allowed_callers: NotRequired[list[Literal["direct"]]]
    eager_input_streaming: NotRequired[bool]
    cache_control: NotRequired[dict[str, Any]]


@_FORBIDS
class ToolChoice(TypedDict):
    """Whether and how tools are called."""

    type: Literal["auto", "any", "tool", "none"]
    name: NotRequired[str]
    disable_parallel_tool_use: NotRequired[bool]


@_FORBIDS
class Thinking(TypedDict):
    """Whether the model thinks first. `budget_tokens` is checked; what bounds an answer is `max_tokens`."""

    type: Literal["enabled", "disabled", "adaptive"]
    budget_tokens: NotRequired[Annotated[int, Field(ge=1024)]]
    display: NotRequired[Literal["summarized", "omitted"]]


@_FORBIDS
class OutputFormat(TypedDict):
    """A schema for the answer."""

    type: Literal["json_schema"]
    schema: dict[str, Any]


@_FORBIDS
class OutputConfig(TypedDict, total=False):
    """How much effort the model makes, and the form of its answer."""

    effort: Effort
    format: OutputFormat


class Unsupported(TypedDict, total=False):
    """Keys of Anthropic's that are accepted as null alone."""

    container: Any
    context_management: Any
    diagnostics: Any
    inference_geo: Any
    mcp_servers: Any
    speed: Any
    thread: Any


_PROMPT: Mapping[str, Any] = {
    "model": str,
    "messages": Annotated[list[Turn], Field(min_length=1)],
    "system": str | list[TextBlock],
    "tools": list[dict[str, Any]],
    "tool_choice": ToolChoice,
    "thinking": Thinking,
    "output_config": OutputConfig,
}
_HABITS: Mapping[str, Any] = {
    "metadata": dict[str, Any],
    "service_tier": Literal["auto", "standard_only"],
    "cache_control": dict[str, Any],
    "user_profile_id": str,
}
"""Keys that cannot change an answer; prefixes are reused without being marked."""

_NEUTRAL: Mapping[str, tuple[Any, ...]] = {
    "context_management": ({"edits": []}, {"edits": [{"type": "clear_thinking_20251015", "keep": "all"}]}),
    "inference_geo": ("global",),
    "mcp_servers": ([],),
    "speed": ("standard",),
}

COUNT_KEYS = Keys(
    Unsupported, required=("model", "messages"), supported=(), own=_PROMPT, habits=_HABITS, neutral=_NEUTRAL
)
KEYS = replace(
    COUNT_KEYS,
    required=("model", "max_tokens", "messages"),
    own={
        **_PROMPT,
        "max_tokens": Annotated[int, Field(ge=1)],
        "stop_sequences": list[str],
        "stream": bool,
        "temperature": Annotated[float, Field(ge=0, le=1)],
        "top_k": Annotated[int, Field(ge=0)],
        "top_p": Annotated[float, Field(ge=0, le=1)],
        "speculation": bool | dict[str, Any],
    },
    instead={
        "container": "tools run at the client",
        "mcp_servers": "tools run at the client: connect it to the MCP server, and send its tools",
        "context_management": "nothing is removed from a conversation: send what the model should read",
        "thread": "no conversation is kept here: send all of its messages",
    },
)


# What routes answer


class Usage(TypedDict):
    """Numbers of tokens; `input_tokens` does not count those that were read from the cache."""

    input_tokens: int
    cache_creation_input_tokens: int
    cache_read_input_tokens: int
    output_tokens: int
    output_tokens_details: dict[str, int]


class Message(TypedDict):
    """A whole answer."""

    id: str
    type: Literal["message"]
    role: Literal["assistant"]
    model: str
    content: list[TextBlock | ThinkingBlock | ToolUseBlock]
    stop_reason: Literal["end_turn", "max_tokens", "stop_sequence", "tool_use"]
    stop_sequence: str | None
    usage: Usage
    speculation: Any


class TokensCount(TypedDict):
    """The tokens of a prompt."""

    input_tokens: int


class ErrorDetail(TypedDict):
    """The kind of an error in Anthropic's words, and what was wrong. Clients read `details` to do without a thread."""

    type: str
    message: str
    details: NotRequired[dict[str, str]]


class ErrorBody(TypedDict):
    """The body of every answer with an HTTP status other than 200."""

    type: Literal["error"]
    error: ErrorDetail
    request_id: str | None


_ERROR_TYPES = {
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    413: "request_too_large",
    429: "rate_limit_error",
    503: "overloaded_error",
    504: "timeout_error",
}


def error_body(error: ApiError) -> dict[str, Any]:
    """An error in Anthropic's form. Its message begins with the name of the key that is to blame."""
    usual = "invalid_request_error" if error.status < 500 else "api_error"
    param, message = error.error.param, error.error.message
    if param and not message.lstrip("'").startswith(param):
        message = f"{param}: {message}"
    detail: dict[str, Any] = {"type": _ERROR_TYPES.get(error.status, usual), "message": message}
    if param == "thread":
        detail["details"] = {"error_code": "thread_unsupported_request"}
    return {"type": "error", "error": detail, "request_id": error.request_id}


def model_info(name: str, length: int | None, created: float) -> dict[str, Any]:
    """Anthropic's description of a model; the context's length is not known before it is loaded."""
    return {
        "type": "model",
        "id": name,
        "display_name": name,
        "created_at": datetime.fromtimestamp(created, UTC).isoformat(),
        "lifecycle": "active",
        "max_input_tokens": length,
        "max_tokens": length,
    }


# Requests

_CHAT_NAMES = {
    "stop": "stop_sequences",
    "response_format": "output_config",
    "reasoning": "thinking",
    "reasoning_effort": "output_config",
    "parallel_tool_calls": "tool_choice",
}
"""Keys of a chat completion, each with the one of this route that it was made of."""

_CHOICES = {"auto": "auto", "any": "required", "none": "none"}

_BLOCKS: Mapping[str, Mapping[str, Any]] = {
    "system": {"text": TextBlock},
    "user": {"text": TextBlock, "tool_result": ToolResultBlock},
    "assistant": {"text": TextBlock, "thinking": ThinkingBlock, "tool_use": ToolUseBlock},
    "tool_result": {"text": TextBlock},
}
"""The blocks that are read, by who speaks."""

_SILENT_KEYS = ("cache_control", "citations", "caller", "toolset_name")
"""Keys of blocks that no prompt shows, and that are no loss."""

_RUN_BY_ANTHROPIC = ("redacted_thinking", "server_tool_use", "mcp_tool_use")
"""Blocks of an assistant that only Anthropic can read or has run, as are results of tools in its turns."""

BETWEEN_BLOCKS = "\n\n"
"""What separates the texts of several blocks that a client wrote."""


def messages_request(body: Mapping[str, Any], limits: ServerLimits) -> Asked:
    """Read a parsed body. Raises ApiError that names the key of this route."""
    said = checked(body, KEYS)
    thinking = said.get("thinking", {})
    if thinking.get("budget_tokens", 0) >= said["max_tokens"]:
        raise ApiError("thinking.budget_tokens must be less than max_tokens", param="thinking")
    same = ("max_tokens", "stream", "temperature", "top_k", "top_p", "speculation")
    chat = {name: said[name] for name in same if name in said}
    if "stop_sequences" in said:
        chat["stop"] = said["stop_sequences"]
    asked = _asked(said, chat, limits)
    write = partial(MessageWriter, said)
    return replace(asked, write=lambda answers: write(answers[0]))


def _asked(said: Mapping[str, Any], chat: dict[str, Any], limits: ServerLimits) -> Asked:
    """The request that `chat` becomes with all that makes the prompt."""
    chat |= {"model": said["model"], **_thinking(said), **_tools(said)}
    if wanted := said.get("output_config", {}).get("format"):
        form = {"name": "answer", "schema": wanted["schema"], "strict": True}
        chat["response_format"] = {"type": "json_schema", "json_schema": form}
    conversation = Conversation(said.get("system"), said["messages"])
    chat["messages"] = conversation.messages
    try:
        asked = chat_request(chat, limits, _CHAT_NAMES)
    except ApiError as error:
        error.error.param = _CHAT_NAMES.get(error.error.param or "", error.error.param)
        raise
    renamed = {**asked.renamed, **_CHAT_NAMES}
    if "reasoning_effort" in chat:
        renamed["reasoning"] = "output_config"
    return replace(asked, num_ignored=asked.num_ignored + conversation.num_ignored, renamed=renamed)


def _thinking(said: Mapping[str, Any]) -> dict[str, Any]:
    """Whether and how much to think in a chat completion's words.

    "adaptive" leaves it to the model, and so does the effort "high", which Anthropic's clients send for the default.
    """
    kind, effort = said.get("thinking", {}).get("type"), said.get("output_config", {}).get("effort")
    if kind == "disabled":
        return {"reasoning": False}
    if effort not in (None, "high"):
        return {"reasoning_effort": effort}
    return {"reasoning": True} if kind == "enabled" else {}


def _tools(said: Mapping[str, Any]) -> dict[str, Any]:
    chosen, chat = said.get("tool_choice"), dict[str, Any]()
    if said.get("tools"):
        chat["tools"] = [_tool(tool, f"tools.{number}") for number, tool in enumerate(said["tools"])]
    if chosen is None:
        return chat
    if chosen.get("disable_parallel_tool_use"):
        chat["parallel_tool_calls"] = False
    if chosen["type"] != "tool":
        return chat | {"tool_choice": _CHOICES[chosen["type"]]}
    if "name" not in chosen:
        raise ApiError("tool_choice.name is missing", param="tool_choice")
    return chat | {"tool_choice": {"type": "function", "function": {"name": chosen["name"]}}}


def _tool(tool: Mapping[str, Any], place: str) -> dict[str, Any]:
    kind = tool.get("type", "custom")
    if kind != "custom":
        raise unsupported(f"a tool of type {shown(kind)} is not supported: send one with an input_schema", place)
    if unknown := tool.keys() - Tool.__annotations__:
        raise unsupported(f"{shown(min(unknown))} is not supported", place)
    fits(tool, Tool, place)
    function = {name: tool[name] for name in ("name", "description", "strict") if name in tool}
    return {"type": "function", "function": {**function, "parameters": tool["input_schema"]}}


class Conversation:
    """Anthropic's turns as messages of a chat; `num_ignored` blocks and keys of blocks were not read.

    Turns of one role that follow each other are one. Raises ApiError that names the block.
    """

    def __init__(self, system: Any, turns: Any) -> None:
        if isinstance(turns, list):
            check_most("messages", turns, MOST_MESSAGES, "messages")
        fits(turns, list[Turn], "messages")
        if not turns:
            raise ApiError("messages must be a list of at least one message", param="messages")
        if turns[-1]["role"] == "assistant":
            raise unsupported(
                "the last message is the assistant's, and an answer that was begun (prefill) is not continued: "
                "end with a message of the user", "messages",
            )  # fmt: skip
        self.num_ignored = 0
        self.messages: list[dict[str, Any]] = []
        if system:
            self.messages += self._plain("system", self._read("system", system, "system"))
        for role, group in groupby(enumerate(turns), key=lambda turn: turn[1]["role"]):
            blocks = [
                block
                for number, turn in group
                for block in self._read(role, turn["content"], f"messages.{number}.content")
            ]
            self.messages += self._turn(role, blocks)

    def _turn(self, role: str, blocks: Sequence[Mapping[str, Any]]) -> Iterable[dict[str, Any]]:
        if role == "assistant":
            return [_assistant(blocks)]
        results = [self._result(block) for block in blocks if block["type"] == "tool_result"]
        texts = [block for block in blocks if block["type"] == "text"]
        return [*results, *(self._plain(role, texts) if texts or not results else ())]

    def _plain(self, role: str, blocks: Iterable[Mapping[str, Any]]) -> list[dict[str, Any]]:
        return [{"role": role, "content": _joined(blocks)}]

    def _result(self, block: Mapping[str, Any]) -> dict[str, Any]:
        text = _joined(self._read("tool_result", block.get("content", ""), "content of a tool_result"))
        return {
            "role": "tool",
            "tool_call_id": block["tool_use_id"],
            "content": result_text(text, block.get("is_error", False)),
        }

    def _read(self, role: str, content: Any, place: str) -> list[Mapping[str, Any]]:
        """The blocks of a content that are read, without their nulls."""
        if isinstance(content, str):
            return [{"type": "text", "text": content}]
        found = list[Mapping[str, Any]]()
        for number, given in enumerate(content):
            block = {key: part for key, part in given.items() if part is not None}
            kind, known = block.get("type"), _BLOCKS[role]
            if role == "assistant" and (kind in _RUN_BY_ANTHROPIC or str(kind).endswith("_tool_result")):
                self.num_ignored += 1
                continue
            if not isinstance(kind, str) or kind not in known:
                raise unsupported(
                    f"a block of type {shown(kind)} is not supported: only {', '.join(known)} are read here",
                    f"{place}.{number}",
                )
            fits(block, known[kind], f"{place}.{number}")
            self.num_ignored += len(block.keys() - known[kind].__annotations__.keys() - set(_SILENT_KEYS))
            found.append(block)
        return found


def _joined(blocks: Iterable[Mapping[str, Any]]) -> str:
    return BETWEEN_BLOCKS.join(block["text"] for block in blocks)


def _assistant(blocks: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """An assistant's turn. The model wrote its texts one after the other."""
    said: dict[str, Any] = {
        "role": "assistant",
        "content": "".join(block["text"] for block in blocks if block["type"] == "text"),
    }
    if thoughts := "".join(block["thinking"] for block in blocks if block["type"] == "thinking"):
        said["reasoning_content"] = thoughts
    if calls := [_call(block) for block in blocks if block["type"] == "tool_use"]:
        said["tool_calls"] = calls
    return said


def _call(block: Mapping[str, Any]) -> dict[str, Any]:
    given = block["input"]
    broken = given.keys() == {BROKEN} and isinstance(given[BROKEN], str)
    function = {"name": block["name"], "arguments": given[BROKEN] if broken else given}
    return {"id": block["id"], "type": "function", "function": function}


# Answers

_REASONS = {"stop": "end_turn", "length": "max_tokens", "tool_calls": "tool_use"}
"""Anthropic's word for why an answer ended, by OpenAI's."""


class MessageWriter:
    """Writes an answer as Anthropic's message: its blocks, whole or as the events of a stream."""

    def __init__(self, said: Mapping[str, Any], answer: Answer) -> None:
        self._said, self._answer = said, answer
        self._id = f"msg_{secrets.token_hex(12)}"
        self._shows_thoughts = said.get("thinking", {}).get("display") != "omitted"
        self._number, self._open = -1, ""
        self._arguments = ""

    def whole(self) -> dict[str, Any]:
        """The message of an answer that was read to its end."""
        answer, content = self._answer, list[dict[str, Any]]()
        if answer.reasoning:
            thoughts = answer.reasoning if self._shows_thoughts else ""
            content.append({"type": "thinking", "thinking": thoughts, "signature": SIGNATURE})
        if answer.text:
            content.append({"type": "text", "text": answer.text})
        for call in answer.calls:
            function = call["function"]
            content.append({**_tool_use(call["id"], function["name"]), "input": _input(function["arguments"])})
        return self._message(content, **self._ended(), usage=self._usage(), speculation=speculation_of([answer]))

    async def events(self) -> AsyncGenerator[str, None]:
        """The events of a stream. Those at the beginning do not know yet how much of the prompt is cached."""
        syntax = self._answer.syntax
        usage = _usage(len(syntax.prompt_ids) if syntax is not None else 0)
        begun = self._message([], stop_reason=None, stop_sequence=None, usage=usage)
        yield _event("message_start", message=begun) + _event("ping")
        async for _, _, pieces in steps_of([self._answer]):
            if written := "".join(event for piece in pieces for event in self._piece(piece)):
                yield written
        told = {"usage": self._usage(), "speculation": speculation_of([self._answer])}
        end = _event("message_delta", delta=self._ended(), **told) + _event("message_stop")
        yield "".join(self._close()) + end

    def failed(self, error: ApiError) -> str:
        """The event that ends a stream which failed."""
        return _event(**error_body(error))

    def _piece(self, piece: Piece) -> Iterator[str]:
        if isinstance(piece, CallPiece):
            yield from self._call(piece)
            return
        kind = "thinking" if isinstance(piece, ReasoningPiece) else "text"
        if self._open != kind:
            begun = {"type": kind, kind: ""}
            yield from self._begin(begun | {"signature": ""} if kind == "thinking" else begun)
        if kind == "text" or self._shows_thoughts:
            yield self._delta(f"{kind}_delta", **{kind: piece.text})

    def _call(self, piece: CallPiece) -> Iterator[str]:
        if piece.call_id is not None:
            self._arguments = ""
            yield from self._begin(_tool_use(piece.call_id, piece.name))
            return
        if piece.cut or not piece.arguments:
            return
        written = piece.arguments
        if piece.broken and not self._arguments:
            written = json.dumps({BROKEN: written}, ensure_ascii=False)
        self._arguments += written
        yield self._delta("input_json_delta", partial_json=written)

    def _begin(self, block: dict[str, Any]) -> Iterator[str]:
        yield from self._close()
        self._number += 1
        self._open = block["type"]
        yield _event("content_block_start", index=self._number, content_block=block)

    def _close(self) -> Iterator[str]:
        """End the block that is open."""
        if self._open == "thinking":
            yield self._delta("signature_delta", signature=SIGNATURE)
        if self._open:
            yield _event("content_block_stop", index=self._number)
        self._open = ""

    def _delta(self, kind: str, **told: str) -> str:
        return _event("content_block_delta", index=self._number, delta={"type": kind, **told})

    def _message(self, content: list[dict[str, Any]], **told: Any) -> dict[str, Any]:
        head = {"id": self._id, "type": "message", "role": "assistant", "model": self._said["model"]}
        return {**head, "content": content, **told}

    def _ended(self) -> dict[str, Any]:
        """Why the answer ended."""
        stop = self._stop()
        if stop is not None:
            return {"stop_reason": "stop_sequence", "stop_sequence": stop}
        return {"stop_reason": _REASONS[self._answer.finish_reason], "stop_sequence": None}

    def _stop(self) -> str | None:
        """The stop sequence that ended the answer: it follows the text in the answer's tokens."""
        result, syntax, stops = self._answer.result, self._answer.syntax, self._said.get("stop_sequences")
        if not stops or syntax is None or result.finish_reason != "stop":
            return None
        hidden = hidden_tokens(syntax.tokenizer, syntax.shown_tokens)
        rest = decoded(syntax.tokenizer, result.token_ids, hidden)[len(result.text) :]
        return min((stop for stop in stops if rest.startswith(stop)), key=len, default=None)

    def _usage(self) -> dict[str, Any]:
        result = self._answer.result
        return _usage(
            result.prompt_tokens, result.cached_prompt_tokens, len(result.token_ids), self._answer.num_reasoning_tokens
        )


def _usage(prompt: int, cached: int = 0, written: int = 0, thought: int = 0) -> dict[str, Any]:
    return {
        "input_tokens": prompt - cached,
        "cache_creation_input_tokens": 0,
        "cache_read_input_tokens": cached,
        "output_tokens": written,
        "output_tokens_details": {"thinking_tokens": thought},
    }


def _tool_use(call_id: str, name: Any) -> dict[str, Any]:
    return {"type": "tool_use", "id": f"toolu_{call_id.removeprefix('call_')}", "name": name, "input": {}}


def _input(arguments: str) -> dict[str, Any]:
    """The arguments of a call that is complete; as a text if they are no JSON object."""
    try:
        return load_object(arguments or "{}")
    except (ValueError, RecursionError):
        return {BROKEN: arguments}


def _event(type: str, **told: Any) -> str:
    return f"event: {type}\ndata: {json.dumps({'type': type, **told}, ensure_ascii=False)}\n\n"


messages = answering(messages_request, "messages")


async def count_tokens(serving: Serving, caller: Caller, request: Request) -> Response:
    """The number of tokens in the prompt of a request."""

    def asked_in(raw: bytes) -> Asked:
        body = parsed(raw)
        try:
            return _asked(checked(body, COUNT_KEYS), {}, serving.limits)
        except PrecedentError as error:
            raise api_error(error, body, {"prompt": "messages"}) from error

    def counted() -> int:
        assert asked.num_prompt_tokens is not None
        try:
            return asked.num_prompt_tokens(served)
        except PrecedentError as error:
            raise api_error(error, asked.keys, asked.renamed) from error

    serving.rates.take_request(caller)
    asked = await read_body(request, serving, asked_in)
    with serving.taken(caller.name), serving.models.lease(asked.model) as lease:
        served = await model_of(request, serving, lease)
        number = await unless_gone(request, serving.limits, serving.prepared(counted))
        return JSONResponse({"input_tokens": number})
