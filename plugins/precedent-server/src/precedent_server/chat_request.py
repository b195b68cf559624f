"""Reads a body of `/v1/chat/completions`: what to ask the model, and how to answer."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from langchain_core.messages import BaseMessage
from openai.types.chat import ChatCompletionStreamOptionsParam
from openai.types.chat.completion_create_params import CompletionCreateParamsBase
from pydantic import ConfigDict, with_config

from precedent.config import SpeculationConfig
from precedent.runtime.plain_values import shown
from precedent_server.bodies import MESSAGES, Keys, biases, checked
from precedent_server.errors import ApiError
from precedent_server.history import read_messages
from precedent_server.settings import ServerLimits

MOST_TOOLS = 1024
"""Tools of a request; a call that is forced among more could not be held to a grammar."""


@with_config(ConfigDict(extra="forbid"))
class StreamOptions(ChatCompletionStreamOptionsParam, total=False):
    """OpenAI's options of a stream, and ours."""

    include_sources: bool


_SAME = (
    *("temperature", "top_p", "frequency_penalty", "presence_penalty", "seed", "logprobs", "top_logprobs"),
    *("tools", "tool_choice", "parallel_tool_calls", "response_format", "reasoning_effort", "prediction", "stop"),
    *("top_k", "min_p", "repetition_penalty", "stop_token_ids", "chat_template_kwargs", "workflow_step", "templates"),
    *("speculation", "reasoning"),
)
"""Keys that mean to the model what they mean here."""

KEYS = Keys(
    CompletionCreateParamsBase,
    required=("model", "messages"),
    supported=(
        *("messages", "model", "stream", "stream_options", "n", "max_tokens", "max_completion_tokens", "logit_bias"),
        *("temperature", "top_p", "frequency_penalty", "presence_penalty", "seed", "logprobs", "top_logprobs"),
        *("tools", "tool_choice", "parallel_tool_calls", "response_format", "reasoning_effort", "prediction", "stop"),
        "modalities",
    ),
    own={
        "messages": MESSAGES,
        "stream": bool,
        "stream_options": StreamOptions,
        "top_k": int,
        "min_p": float,
        "repetition_penalty": float,
        "stop_token_ids": list[int],
        "chat_template_kwargs": dict[str, Any],
        "reasoning": bool,
        "workflow_step": str,
        "templates": list[str],
        "speculation": bool | dict[str, Any],
    },
    instead={
        "functions": "write tools",
        "function_call": "write tool_choice",
        "audio": "only text is read and written",
        "web_search_options": "there is no search: give the model a tool",
        "verbosity": "say in the prompt how long the answer should be, and bound it with max_completion_tokens",
        "tenant": "the API key says whose request it is",
    },
)


_RENAMED = {"prompt": "messages", "max_tokens": "max_completion_tokens"}
"""Settings that a request may give under another name."""


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

    def settings_of(self, index: int) -> dict[str, Any]:
        """The settings of answer number `index`."""
        seed = self.settings.get("seed")
        return {**self.settings, **({} if seed is None else {"seed": seed + index})}


def chat_request(body: Mapping[str, Any], limits: ServerLimits) -> ChatRequest:
    """Read a parsed body. Raises ApiError that names the key, or a PrecedentError."""
    _check_tools(body.get("tools"))
    said = checked(body, KEYS)
    if said.get("modalities", ["text"]) != ["text"]:
        raise ApiError("only text is written", param="modalities", code="unsupported_value")
    _check_bounds(said, limits)
    stream, options = said.get("stream", False), said.get("stream_options", {})
    messages, num_ignored = read_messages(said["messages"])
    said |= _allowed_tools(said)
    settings = {name: said[name] for name in _SAME if name in said}
    settings |= _max_tokens(said)
    if "logit_bias" in said:
        settings["logit_bias"] = biases(said["logit_bias"])
    if isinstance(settings.get("speculation"), dict):
        settings["speculation"] = SpeculationConfig.from_dict(settings["speculation"])
    return ChatRequest(
        model=said["model"],
        messages=messages,
        settings=settings,
        num_choices=said.get("n", 1),
        stream=stream,
        include_usage=options.get("include_usage") is True,
        include_sources=options.get("include_sources") is True,
        keys=tuple(said),
        renamed=_RENAMED if "max_completion_tokens" in said else {"prompt": "messages"},
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


def _max_tokens(said: Mapping[str, Any]) -> dict[str, int]:
    given = [said[name] for name in ("max_tokens", "max_completion_tokens") if name in said]
    if len(set(given)) > 1:
        raise ApiError("max_tokens and max_completion_tokens differ: give one of the two", param="max_tokens")
    return {"max_tokens": given[0]} if given else {}


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
