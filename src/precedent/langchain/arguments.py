"""The arguments of chat models, wherever the model runs: their names, and the checks of their values.

Nothing here loads the engine, so that the client of a server reads its arguments with the same code.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any

from precedent.config import SamplingParams, SpeculationConfig, drafter_names, stop_texts
from precedent.errors import ConfigError
from precedent.langchain.synonyms import Elsewhere, translated
from precedent.runtime.plain_values import check_plain, is_whole, shown

SAMPLING = (
    *("temperature", "top_k", "top_p", "min_p", "repetition_penalty", "frequency_penalty", "presence_penalty"),
    *("logit_bias", "seed", "max_tokens", "stop_token_ids"),
)

FOR_CHAT = (
    *("tools", "tool_choice", "parallel_tool_calls", "strict", "strict_tools", "response_format"),
    *("chat_template_kwargs", "reasoning", "streaming", "media"),
)
"""Settings that only a chat model takes, and a model that continues texts refuses."""

OF_THE_CALL = (
    *SAMPLING,
    *("speculation", "drafters", "max_nodes", "tenant", "workflow_step", "prediction", "templates", "learning"),
    *("logprobs", "top_logprobs", "tools", "tool_choice", "model", "chat_template_kwargs", "reasoning"),
    *("strict", "strict_tools", "parallel_tool_calls", "response_format", "stop", "media"),
)
ONLY_SPEED = ("learning", "prediction", "templates", "max_nodes", "drafters", "workflow_step")
"""Settings of a call that change its speed and nothing else."""

_OF_TRACING = ("ls_structured_output_format", "structured_output_format")
FROM_LANGCHAIN = ("stream", *_OF_TRACING)
"""Keyword arguments that LangChain passes on and that do not affect the answer."""

RANDOM_SEED = -1
"""llama.cpp's and Ollama's seed for other random numbers in every request, which is no seed here."""

_DEFAULT_IF_NONE = (*SAMPLING, "stop", "logprobs", "top_logprobs", "speculation", "strict_tools", "streaming", "media")
"""Fields whose None means the default; in a call it means the model's own."""

STRICT = ("auto", True, False)


def checked_fields(
    given: Mapping[str, Any], known: Sequence[str], where: str, elsewhere: Sequence[Elsewhere]
) -> dict[str, Any]:
    """A constructor's arguments under the names in `known`, with sampling settings checked; None is a default.

    Raises ConfigError or UnsupportedError, with what to write instead.
    """
    fields = translated(given, known, where, elsewhere)
    for name, value in fields.items():
        check_plain(name, value)
    chosen = {name: value for name, value in fields.items() if name in SAMPLING and value is not None}
    params = SamplingParams(**chosen)
    fields |= {name: getattr(params, name) for name in chosen}
    if "stop" in fields:
        fields["stop"] = None if fields["stop"] is None else list(stop_texts(fields["stop"]))
    if fields.get("drafters") is not None:
        fields["drafters"] = drafter_names(fields["drafters"])
    return {name: value for name, value in fields.items() if value is not None or name not in _DEFAULT_IF_NONE}


def checked_arguments(
    kwargs: Mapping[str, Any], known: Sequence[str], elsewhere: Sequence[Elsewhere]
) -> dict[str, Any]:
    """A call's arguments under the names in `known`; None leaves the model's own setting.

    Raises ConfigError or UnsupportedError for an argument that would otherwise be dropped silently.
    """
    settings = translated(kwargs, (*known, *FROM_LANGCHAIN), "a call", elsewhere)
    for name, value in settings.items():
        check_plain(name, value)
    step = settings.get("workflow_step")
    if not isinstance(step, str | None):
        raise ConfigError(f"workflow_step={shown(step)} must be a text")
    for name in _OF_TRACING:
        told = settings.get(name)
        if not (told is None or (isinstance(told, Mapping) and "schema" in told)):
            raise ConfigError(f"{name}={shown(told)} is LangChain's own: leave it out")
    return settings


def strictness(kwargs: Mapping[str, Any], default: Any) -> Any:
    """The call's `strict` or `strict_tools`, else the default. Raises ConfigError if neither "auto" nor a bool."""
    strict = next((kwargs[name] for name in ("strict", "strict_tools") if kwargs.get(name) is not None), default)
    check_strict(strict)
    return strict


def check_strict(strict: Any) -> None:
    """Raise ConfigError unless `strict` is "auto", True or False."""
    if not any(strict is known or (isinstance(strict, str) and strict == known) for known in STRICT):
        raise ConfigError(f"strict={shown(strict)} must be 'auto', True or False")


def parallel_calls(kwargs: Mapping[str, Any]) -> bool | None:
    """The call's `parallel_tool_calls`. Raises ConfigError unless it is True, False or None."""
    parallel = kwargs.get("parallel_tool_calls")
    if not isinstance(parallel, bool | None):
        raise ConfigError(f"parallel_tool_calls={shown(parallel)} must be True or False")
    return parallel


def sampling_params(model: Any, stop: Any, kwargs: Mapping[str, Any]) -> SamplingParams:
    """The model's sampling settings, overridden by those of the call; stop strings of both apply."""
    said = [{name: getattr(model, name) for name in SAMPLING}, {name: kwargs.get(name) for name in SAMPLING}]
    chosen = {name: value for settings in said for name, value in settings.items() if value is not None}
    if is_whole(chosen.get("seed")) and chosen["seed"] == RANDOM_SEED:
        del chosen["seed"]
    stops = merged_stop(model.stop, stop, kwargs.get("stop"))
    return SamplingParams(**chosen, stop=stops, logprobs=_num_logprobs(model, kwargs))


def _num_logprobs(model: Any, kwargs: Mapping[str, Any]) -> int | None:
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


def speculation_config(model: Any, kwargs: Mapping[str, Any], default: SpeculationConfig) -> SpeculationConfig | None:
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
