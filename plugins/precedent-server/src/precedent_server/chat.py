"""`POST /v1/chat/completions`: reads a body, asks the model, and writes the answers whole or as a stream of chunks."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from types import MappingProxyType
from typing import Any

from openai.types.chat import ChatCompletion, ChatCompletionChunk, ChatCompletionStreamOptionsParam
from openai.types.chat.completion_create_params import CompletionCreateParamsBase
from pydantic import ConfigDict, with_config

from precedent.config import SpeculationConfig
from precedent.engine.engine import Engine
from precedent.langchain.profile import profile_of_engine
from precedent.runtime.plain_values import shown
from precedent.text.answers import CallPiece, Piece
from precedent.text.template_settings import EFFORT, SWITCHES
from precedent.text.tool_formats import ReasoningPiece
from precedent_server.answers import Answer, Asked, ChunkWriter, answering, logprobs_of
from precedent_server.bodies import OWN_SAMPLING, SAMPLING, Keys, Messages, biases, check_most, checked, unsupported
from precedent_server.errors import ApiError
from precedent_server.history import read_messages
from precedent_server.serving import Served
from precedent_server.settings import ServerLimits

MOST_TOOLS = 1024
"""Tools of a request; a call that is forced among more could not be held to a grammar."""


@with_config(ConfigDict(extra="forbid"))
class StreamOptions(ChatCompletionStreamOptionsParam, total=False):
    """OpenAI's options of a stream, and ours."""

    include_sources: bool


_OPENAI = (
    *("top_logprobs", "tools", "tool_choice", "parallel_tool_calls", "response_format"),
    *("reasoning_effort", "prediction", *SAMPLING),
)
_OWN: Mapping[str, Any] = {
    "chat_template_kwargs": dict[str, Any],
    "reasoning": bool,
    "workflow_step": str,
    "templates": list[str],
    "speculation": bool | dict[str, Any],
    **OWN_SAMPLING,
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


def chat_request(
    body: Mapping[str, Any],
    limits: ServerLimits,
    names: Mapping[str, str] = MappingProxyType({}),
    of_model: Callable[[Served], Mapping[str, Any]] = lambda served: {},
) -> Asked:
    """Read a parsed body. Raises ApiError that names the key, or a PrecedentError.

    `names` are what the request itself calls keys that were made of its own; `of_model` gives settings that depend on
    the model.
    """
    check_tools(body.get("tools"))
    said = checked(body, KEYS)
    if said.get("modalities", ["text"]) != ["text"]:
        raise unsupported("only text is written", "modalities")
    check_bounds(said, limits)
    messages, num_ignored = read_messages(said["messages"])
    said |= _allowed_tools(said)
    _check_choice(said)
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
    stream = said.get("stream", False)
    renamed = {"prompt": "messages"} | (
        {"max_tokens": "max_completion_tokens"} if given and "max_tokens" not in said else {}
    )

    def settings_on(served: Served) -> dict[str, Any]:
        asked = served.settings_of({**settings, **of_model(served)}, limits.default_max_tokens)
        if asked.get("reasoning") is False and never_thinks(served.engine):
            del asked["reasoning"]
        return asked

    def begin(served: Served, tenant: str, index: int) -> Answer:
        """Answer number i of several uses `seed + i`."""
        asked = {**settings_on(served), "tenant": tenant}
        if asked.get("seed") is not None:
            asked["seed"] += index
        begun = served.chat.begin(messages, asked)
        prompt = begun.prompt
        return Answer(index, begun.engine, begun.generation, len(prompt.token_ids), prompt.syntax, whole=not stream)

    return Asked(
        model=said["model"],
        number=said.get("n", 1),
        stream=stream,
        begin=begin,
        write=partial(ChatWriter, said),
        keys=tuple(said),
        renamed={name: names.get(key, key) for name, key in renamed.items()},
        num_ignored=num_ignored,
        num_prompt_tokens=lambda served: served.chat.num_prompt_tokens(messages, settings_on(served)),
    )


def never_thinks(engine: Engine) -> bool:
    """Whether the model's chat template knows no thoughts, so that there is nothing to switch off."""
    template = str(engine.tokenizer.chat_template)
    known = any(name in template for name in (*SWITCHES, EFFORT))
    return not known and not profile_of_engine(engine).get("reasoning_output", False)


def check_tools(tools: Any) -> None:
    """Raise ApiError for too many tools, and for one that the client does not run itself."""
    if not isinstance(tools, list):
        return
    check_most("tools", tools, MOST_TOOLS, "tools")
    for tool in tools:
        if isinstance(tool, dict) and tool.get("type", "function") != "function":
            message = f"a tool of type {tool['type']!r} is not supported: only functions that the client runs are"
            raise unsupported(message, "tools")


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


def _check_choice(said: Mapping[str, Any]) -> None:
    """Raise ApiError for a call that is forced without a tool, or to a tool that is not there."""
    choice, names = said.get("tool_choice"), [_name_of(tool) for tool in said.get("tools", ())]
    if choice == "required" and not names:
        raise ApiError("tool_choice forces a call, but there are no tools: send some", param="tool_choice")
    if isinstance(choice, dict) and choice["type"] == "function" and (name := _name_of(choice)) not in names:
        raise ApiError(
            f"tool_choice names {shown(name)}, which is not among tools: {', '.join(map(str, names)) or 'none'}",
            param="tool_choice",
        )


def _name_of(tool: Mapping[str, Any]) -> Any:
    function = tool.get("function")
    return function.get("name") if isinstance(function, dict) else None


def check_bounds(said: Mapping[str, Any], limits: ServerLimits) -> None:
    """Raise ApiError for a request that asks for more than the server allows."""
    number, stops = said.get("n", 1), said.get("stop", ())
    if not 1 <= number <= limits.max_choices:
        raise ApiError(f"n={shown(number)} must be between 1 and {limits.max_choices}", param="n")
    check_most("stop", [stops] if isinstance(stops, str) else stops, limits.max_stops, "texts")
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


class ChatWriter(ChunkWriter):
    """Writes answers as OpenAI's chat completions."""

    prefix, kinds = "chatcmpl", ("chat.completion", "chat.completion.chunk")
    whole_body, chunk_body = ChatCompletion, ChatCompletionChunk

    def choice(self, answer: Answer) -> dict[str, Any]:
        """A whole answer."""
        message: dict[str, Any] = {"role": "assistant", "content": answer.text or (None if answer.calls else "")}
        message["refusal"] = None
        if answer.reasoning:
            message["reasoning_content"] = answer.reasoning
        if answer.calls:
            message["tool_calls"] = answer.calls
        logprobs = logprobs_of(answer, answer.result.logprobs)
        return {
            "index": answer.index, "message": message, "finish_reason": answer.finish_reason, "logprobs": logprobs,
        }  # fmt: skip

    def beginning(self, answer: Answer) -> dict[str, Any]:
        """Who speaks."""
        return {"delta": {"role": "assistant", "content": ""}}

    def part(self, piece: Piece | None) -> dict[str, Any]:
        """A piece of a text, of thoughts, or of a call."""
        if piece is None:
            return {"delta": {}}
        if isinstance(piece, ReasoningPiece):
            return {"delta": {"reasoning_content": piece.text}}
        if not isinstance(piece, CallPiece):
            return {"delta": {"content": piece.text}}
        call: dict[str, Any] = {"index": piece.index, "function": {"arguments": piece.arguments}}
        if piece.call_id is not None:
            function = {"name": piece.name, "arguments": ""}
            call |= {"id": piece.call_id, "type": "function", "function": function}
        return {"delta": {"tool_calls": [call]}}


chat_completions = answering(chat_request, "messages")
