"""A model's fields as an engine's options, and the settings of a call: the fields, overridden by its arguments."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from precedent.config import SamplingParams, SpeculationConfig, drafter_names, stop_texts
from precedent.engine.options import EngineOptions
from precedent.errors import ConfigError, UnsupportedError
from precedent.langchain.exceptions import of_both_kinds
from precedent.langchain.learning import PendingCompletions
from precedent.langchain.synonyms import (
    IDLE,
    IN_A_CALL,
    IN_CHAT,
    IN_MODEL_KWARGS,
    IN_THE_CONSTRUCTOR,
    LEFT_OUT,
    OF_LOADING,
    WITH_TOOLS,
    Elsewhere,
    translated,
)
from precedent.langchain.tenants import check_tenants
from precedent.runtime.plain_values import check_plain, is_whole, shown
from precedent.text.templates import Template, Templates
from precedent.text.tool_skeletons import tool_templates

if TYPE_CHECKING:
    from precedent.langchain.fields import EngineFields
    from precedent.text.tool_formats import ToolFormat

SAMPLING = (
    *("temperature", "top_k", "top_p", "min_p", "repetition_penalty", "frequency_penalty", "presence_penalty"),
    *("logit_bias", "seed", "max_tokens", "stop_token_ids"),
)
_RENAMED = {"cache": "speculation_cache"}  # LangChain's own `cache` is one of whole answers
_NO_FIELDS = ("speculation", "limits")  # the former is applied to each call, the latter wants an engine of your own
_FIELD_OF = {
    option.name: _RENAMED.get(option.name, option.name)
    for option in dataclasses.fields(EngineOptions)
    if option.name not in _NO_FIELDS
}
OF_THE_ENGINE = tuple(_FIELD_OF.values())
"""Fields that say what a model's engine is built from."""

FOR_CHAT = (
    *("tools", "tool_choice", "parallel_tool_calls", "strict", "strict_tools", "response_format"),
    *("chat_template_kwargs", "reasoning", "streaming"),
)
"""Settings that only a chat model takes, and a model that continues texts refuses."""

OF_THE_CALL = (
    *SAMPLING,
    *("speculation", "drafters", "max_nodes", "tenant", "workflow_step", "prediction", "templates", "learning"),
    *("logprobs", "top_logprobs", "tools", "tool_choice", "model", "chat_template_kwargs", "reasoning"),
    *("strict", "strict_tools", "parallel_tool_calls", "response_format", "stop"),
)
ONLY_SPEED = ("learning", "prediction", "templates", "max_nodes", "drafters", "workflow_step")
"""Settings of a call that change its speed and nothing else."""

_OF_TRACING = ("ls_structured_output_format", "structured_output_format")
FROM_LANGCHAIN = ("stream", *_OF_TRACING)
"""Keyword arguments that LangChain passes on and that do not affect the answer."""

_DEFAULT_IF_NONE = (*SAMPLING, "stop", "logprobs", "top_logprobs", "speculation", "strict_tools", "streaming")
"""Fields whose None means the default; in a call it means the model's own."""

_WITH_TOOLS = Elsewhere(("tools", "tool_choice", "strict", "parallel_tool_calls"), WITH_TOOLS)
_IN_A_CALL = Elsewhere(OF_THE_CALL, IN_A_CALL)
_IN_CHAT = Elsewhere(FOR_CHAT, IN_CHAT)
_NOWHERE = Elsewhere(IDLE, LEFT_OUT)
_IN_THE_CONSTRUCTOR = Elsewhere((*OF_THE_ENGINE, *OF_LOADING, "streaming"), IN_THE_CONSTRUCTOR)


def engine_options(model: EngineFields) -> EngineOptions:
    """What the model's engine is built from; None in a field is the option's default."""
    given = {option: getattr(model, field) for option, field in _FIELD_OF.items()}
    return EngineOptions(**{option: value for option, value in given.items() if value is not None})


def fields_of(given: Mapping[str, Any], known: Sequence[str], where: str) -> dict[str, Any]:
    """A constructor's arguments under the names of its fields, with sampling settings checked; None is a default.

    Raises ConfigError or UnsupportedError, with what to write instead.
    """
    of_its_kind = _WITH_TOOLS if "strict_tools" in known else _IN_CHAT
    fields = translated(given, known, where, (of_its_kind, _IN_A_CALL))
    for name, value in fields.items():
        check_plain(name, value)
    _check_model_kwargs(fields.get("model_kwargs"))
    chosen = {name: value for name, value in fields.items() if name in SAMPLING and value is not None}
    params = SamplingParams(**chosen)
    fields |= {name: getattr(params, name) for name in chosen}
    if "stop" in fields:
        fields["stop"] = None if fields["stop"] is None else list(stop_texts(fields["stop"]))
    if fields.get("drafters") is not None:
        fields["drafters"] = drafter_names(fields["drafters"])
    return {name: value for name, value in fields.items() if value is not None or name not in _DEFAULT_IF_NONE}


def _check_model_kwargs(model_kwargs: Any) -> None:
    for name in model_kwargs if isinstance(model_kwargs, Mapping) else ():
        if name in OF_THE_CALL:
            raise ConfigError(IN_MODEL_KWARGS.format(name=name))


def check_fields(model: EngineFields) -> None:
    """Raise ConfigError before weights are loaded, for a field that no call could use."""
    sampling_params(model, None, {})
    config = speculation_config(model, {}, SpeculationConfig())
    if config is not None and (model.drafters is not None or not isinstance(model.speculation, bool)):
        model.engines.check_drafters(config.drafters)
    check_tenants(model)


def call_settings(kwargs: Mapping[str, Any]) -> dict[str, Any]:
    """A call's arguments under our names; None leaves the model's own setting.

    Raises ConfigError or UnsupportedError for an argument that would otherwise be dropped silently.
    """
    settings = translated(kwargs, (*OF_THE_CALL, *FROM_LANGCHAIN), "a call", (_IN_THE_CONSTRUCTOR, _NOWHERE))
    for name, value in settings.items():
        check_plain(name, value)
    step, learning = settings.get("workflow_step"), settings.get("learning")
    if not isinstance(step, str | None):
        raise ConfigError(f"workflow_step={shown(step)} must be a text")
    if not isinstance(learning, PendingCompletions | None):
        raise ConfigError(f"learning={shown(learning)} must be PendingCompletions, which SpeculationMiddleware makes")
    for name in _OF_TRACING:
        told = settings.get(name)
        if not (told is None or (isinstance(told, Mapping) and "schema" in told)):
            raise ConfigError(f"{name}={shown(told)} is LangChain's own: leave it out")
    return settings


@of_both_kinds()
def check_call(kwargs: Mapping[str, Any], stop: Any = None) -> None:
    """Raise what `call_settings` raises, as LangChain's errors too, before LangChain consumes some of the arguments."""
    merged_stop(call_settings(kwargs).get("stop"), stop)


def text_settings(kwargs: Mapping[str, Any]) -> dict[str, Any]:
    """`call_settings` of a text completion. Raises UnsupportedError for what only chat models support."""
    settings = call_settings(kwargs)
    for name in FOR_CHAT:
        if settings.get(name) is not None:
            raise UnsupportedError(f"{name} cannot be given to a text completion: use ChatPrecedent")
    return settings


def sampling_params(model: EngineFields, stop: Any, kwargs: Mapping[str, Any]) -> SamplingParams:
    """The model's sampling settings, overridden by those of the call; stop strings of both apply."""
    said = [{name: getattr(model, name) for name in SAMPLING}, {name: kwargs.get(name) for name in SAMPLING}]
    chosen = {name: value for settings in said for name, value in settings.items() if value is not None}
    stops = merged_stop(model.stop, stop, kwargs.get("stop"))
    return SamplingParams(**chosen, stop=stops, logprobs=_num_logprobs(model, kwargs))


def _num_logprobs(model: EngineFields, kwargs: Mapping[str, Any]) -> int | None:
    """OpenAI's `top_logprobs`: how many of the likeliest tokens to report at each place; None without `logprobs`."""
    wanted, top = (
        getattr(model, name) if kwargs.get(name) is None else kwargs[name] for name in ("logprobs", "top_logprobs")
    )
    if not isinstance(wanted, bool):
        raise ConfigError(f"logprobs={shown(wanted)} must be True or False; top_logprobs= says how many")
    if top is not None and not wanted:
        raise ConfigError(f"top_logprobs={shown(top)} needs logprobs=True")
    if wanted and not (top is None or (is_whole(top) and 0 <= top <= 20)):
        raise ConfigError(f"top_logprobs={shown(top)} must be a number of tokens, at most 20")
    return (top or 0) if wanted else None


def merged_stop(*stops: Any) -> tuple[str, ...]:
    """All stop strings, each once and in order; a single text counts as one. Raises ConfigError for other types."""
    return stop_texts([text for texts in stops for text in stop_texts(texts)])


def speculation_config(
    model: EngineFields, kwargs: Mapping[str, Any], default: SpeculationConfig
) -> SpeculationConfig | None:
    """How this call speculates, None for the engine's `default`. Raises ConfigError on other types."""
    wanted = kwargs.get("speculation")
    wanted = model.speculation if wanted is None else wanted
    drafters = kwargs.get("drafters")
    drafters = model.drafters if drafters is None else drafters  # an empty list asks for none
    if isinstance(wanted, bool):
        config = default if wanted else dataclasses.replace(default, enabled=False)
    elif isinstance(wanted, Mapping):
        config = SpeculationConfig.from_dict(wanted)
    elif isinstance(wanted, SpeculationConfig):
        config = wanted
    else:
        raise ConfigError(
            f"speculation={shown(wanted)} is neither True, False, a SpeculationConfig nor a dict of its settings"
        )
    if drafters is not None:
        config = dataclasses.replace(config, drafters=drafters)
    if kwargs.get("max_nodes") is not None:
        config = dataclasses.replace(config, max_nodes=kwargs["max_nodes"])
    return None if config is default else config


def prediction_text(prediction: Any) -> str | None:
    """The caller's guess of the answer: a text, or OpenAI's `{"type": "content", "content": …}` (text or text parts).

    Raises ConfigError on anything else.
    """
    if prediction is None or isinstance(prediction, str):
        return prediction
    content = prediction.get("content") if isinstance(prediction, Mapping) else None
    if isinstance(content, list):
        parts: list[Any] = [part.get("text") if isinstance(part, Mapping) else part for part in content]
        content = "".join(parts) if all(isinstance(part, str) for part in parts) else None
    if not isinstance(content, str) or prediction.get("type", "content") != "content":
        raise ConfigError(f'prediction={shown(prediction)} is neither a text nor {{"type": "content", "content": "…"}}')
    return content


def templates_of(
    model: EngineFields,
    kwargs: Mapping[str, Any],
    tools: Sequence[Mapping[str, Any]],
    form: ToolFormat | None = None,
) -> tuple[Template, ...]:
    """The premade responses of the call, or else the model's, and the forms of calls to the bound tools."""
    premade = kwargs.get("templates")
    premade = model.templates if premade is None else premade
    return (*(() if premade is None else Templates(premade)), *tool_templates(tools, form))
