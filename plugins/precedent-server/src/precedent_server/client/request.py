"""The body of a request: OpenAI's keys, and the others in `extra_body`, which `openai` sends beside them."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Mapping, Sequence
from typing import Any

from langchain_core.messages import BaseMessage

from precedent.config import SamplingParams, SpeculationConfig
from precedent.errors import ConfigError, UnsupportedError
from precedent.langchain.arguments import (
    parallel_calls,
    prediction_text,
    sampling_params,
    speculation_config,
    strictness,
)
from precedent.langchain.messages import Media, to_template_messages
from precedent.langchain.tools import (
    ANY,
    AUTO,
    NONE,
    UNNAMED,
    allowed_tools,
    asked_format,
    openai_tools,
    tool_choice_of,
)
from precedent.runtime.plain_values import shown
from precedent.text.template_settings import EFFORT, SWITCHES, TemplateSettings
from precedent.text.templates import Template, Templates

_OFF = SamplingParams()
_OF_OPENAI = ("top_p", "frequency_penalty", "presence_penalty", "seed", "logit_bias", "stop")
_OF_OURS = ("top_k", "min_p", "repetition_penalty", "stop_token_ids")
_CHOICES = {ANY: "required", NONE: "none"}


def request_fields(model: Any, settings: Mapping[str, Any], stop: Any = None) -> dict[str, Any]:
    """The keyword arguments of `chat.completions.create`, without the messages.

    These are the model's fields, overridden by the call's `settings`. Raises ConfigError, PromptError or
    UnsupportedError for a value that cannot be sent.
    """
    sampling, name = sampling_params(model, stop, settings), settings.get("model", model.model_name)
    if not isinstance(name, str) or not name:
        raise ConfigError(f"model={shown(name)} must be the name under which the server has the model")
    template, reasoning = _template_settings(model, settings)
    predicted = prediction_text(settings.get("prediction"))
    extra = {
        "speculation": _speculation(model, settings),
        "templates": template_texts(settings.get("templates", model.templates)),
        "workflow_step": settings.get("workflow_step"),
        "chat_template_kwargs": template,
        "reasoning": reasoning if isinstance(reasoning, bool) else None,
        # not an argument of `create`: langchain-openai would have `openai` parse the answer, which wants strict tools
        "response_format": _response_format(model, settings),
    }
    extra = {name: value for name, value in extra.items() if value is False or value}
    extra |= _chosen(sampling, _OF_OURS, settings)
    return {
        "model": name,
        "temperature": sampling.temperature,
        "max_completion_tokens": sampling.max_tokens,
        **_chosen(sampling, _OF_OPENAI, settings),
        **({} if sampling.logprobs is None else {"logprobs": True}),
        **({"top_logprobs": sampling.logprobs} if sampling.logprobs else {}),
        **_tools(model, settings),
        **({"prediction": {"type": "content", "content": predicted}} if predicted else {}),
        **({"reasoning_effort": reasoning} if isinstance(reasoning, str) else {}),
        **({"extra_body": extra} if extra else {}),
    }


def _chosen(sampling: SamplingParams, names: Sequence[str], given: Mapping[str, Any]) -> dict[str, Any]:
    """Settings that differ from their defaults, or that the call gives: the server may have defaults of its own."""
    values = {name: getattr(sampling, name) for name in names}
    sent = {
        name: value
        for name, value in values.items()
        if value != getattr(_OFF, name) or (given.get(name) is not None and value not in (None, (), {}))
    }
    return {name: list(value) if isinstance(value, tuple) else value for name, value in sent.items()}


def _tools(model: Any, settings: Mapping[str, Any]) -> dict[str, Any]:
    tools = openai_tools(settings.get("tools", ()))
    tools = allowed_tools(settings.get("tool_choice"), tools)
    choice = tool_choice_of(settings.get("tool_choice"), tools)
    strict, parallel = strictness(settings, model.strict_tools), parallel_calls(settings)
    if not tools:
        return {}
    if isinstance(strict, bool):
        tools = [{**tool, "function": {**tool["function"], "strict": strict}} for tool in tools]
    by_name = {"type": "function", "function": {"name": choice}}
    return {
        "tools": tools,
        **({} if choice == AUTO else {"tool_choice": _CHOICES.get(choice, by_name)}),
        **({} if parallel is None else {"parallel_tool_calls": parallel}),
    }


def _response_format(model: Any, settings: Mapping[str, Any]) -> dict[str, Any] | None:
    kind, schema, own = asked_format(settings.get("response_format"))
    if schema is None:
        return None if kind == "text" else {"type": kind}
    strict = own or strictness(settings, model.strict_tools)
    strict = own if strict == "auto" else strict
    described = {"name": schema.get("title", UNNAMED), "schema": dict(schema)}
    return {"type": kind, "json_schema": described if strict is None else {**described, "strict": strict}}


def _speculation(model: Any, settings: Mapping[str, Any]) -> Any:
    """What the body says of speculation: only what was given, since the server has its own defaults.

    Raises ConfigError for what is no setting of speculation.
    """
    speculation_config(model, settings, SpeculationConfig())  # checks the values
    wanted = settings.get("speculation", model.speculation)
    if wanted is False:
        return False
    given = {"drafters": settings.get("drafters", model.drafters), "max_nodes": settings.get("max_nodes")}
    given = {name: value for name, value in given.items() if value is not None}
    plain = {} if wanted is True else plain_speculation(wanted)
    return {name: list(value) if isinstance(value, tuple) else value for name, value in {**plain, **given}.items()}


def plain_speculation(speculation: Any) -> Any:
    """A `SpeculationConfig` as a dict of what it changes, which can be written down; any other value as it is."""
    if not isinstance(speculation, SpeculationConfig):
        return speculation
    usual = dataclasses.asdict(SpeculationConfig())
    return {name: value for name, value in dataclasses.asdict(speculation).items() if value != usual[name]}


def template_texts(templates: Any) -> list[str] | None:
    """Premade responses as texts. Raises UnsupportedError for one that no text expresses."""
    if templates is None:
        return None
    premade = Templates(templates)
    for template in premade:
        if template != Template.parse(template.text):
            raise UnsupportedError(
                f"template {template.text!r} has choices or kinds of holes, which a request cannot carry: give its text"
            )
    return [template.text for template in premade]


def _template_settings(model: Any, settings: Mapping[str, Any]) -> tuple[dict[str, Any], bool | str | None]:
    """The variables of the chat template and `reasoning`; the call's override the model's, under either's name."""
    variables: dict[str, Any] = {}
    reasoning: bool | str | None = None
    for given in (
        (model.chat_template_kwargs, model.reasoning),
        (settings.get("chat_template_kwargs"), settings.get("reasoning")),
    ):
        one = TemplateSettings({} if given[0] is None else given[0], given[1])
        if twice := _switches(one.reasoning) & one.variables.keys():
            raise ConfigError(f"reasoning= and chat_template_kwargs both set {min(twice)!r}: give one of them")
        if one.reasoning is not None:
            variables = {name: value for name, value in variables.items() if name not in _switches(one.reasoning)}
            reasoning = one.reasoning
        elif one.variables.keys() & _switches(reasoning):
            reasoning = None
        variables |= one.variables
    return variables, reasoning


def _switches(reasoning: bool | str | None) -> set[str]:
    """The variables of chat templates that a value of `reasoning` may set."""
    if reasoning is None:
        return set()
    return set(SWITCHES) if isinstance(reasoning, bool) else {EFFORT}


def wire_messages(messages: Sequence[BaseMessage], media: Media = "refuse") -> list[dict[str, Any]]:
    """The messages in OpenAI's form, read as `ChatPrecedent` reads them; earlier thoughts are `reasoning_content`.

    Raises PromptError or UnsupportedError for a message that cannot be part of a prompt.
    """
    return [_wire_message(turn) for turn in to_template_messages(messages, media=media)]


def _wire_message(turn: Mapping[str, Any]) -> dict[str, Any]:
    kept = {key: value for key, value in turn.items() if key not in ("tool_calls", "invalid_calls")}
    if turn["role"] == "tool":
        kept.pop("name", None)  # OpenAI's tool message has none: its call says which tool it was
    whole = (
        (call["id"], call["function"]["name"], json.dumps(call["function"]["arguments"], ensure_ascii=False))
        for call in turn.get("tool_calls", ())
    )
    broken = ((call.get("id"), call["name"], call["args"]) for call in turn.get("invalid_calls", ()))
    calls = [
        {"type": "function", "id": call_id or "", "function": {"name": name or "", "arguments": arguments}}
        for call_id, name, arguments in (*whole, *broken)
    ]
    return {**kept, "content": turn["content"] or None, "tool_calls": calls} if calls else kept
