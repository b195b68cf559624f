"""The arguments of our models, wherever the model runs: fields, names of a call's arguments, tenants, and their checks.

Nothing here loads the engine, so that the client of a server reads its arguments with the same code.
"""

from __future__ import annotations

import dataclasses
import logging
import uuid
from collections.abc import Collection, Mapping
from typing import Any

from pydantic import BaseModel, StrictBool

from precedent.config import SamplingParams, SpeculationConfig, drafter_names, stop_texts
from precedent.errors import CacheError, ConfigError
from precedent.langchain.exceptions import of_both_kinds
from precedent.langchain.messages import Media
from precedent.langchain.synonyms import translated
from precedent.runtime.plain_values import check_plain, is_whole, shown

log = logging.getLogger(__name__)


class CallFields(BaseModel):
    """Settings that every model has as fields, and that each call may override; `ChatPrecedent` describes them."""

    temperature: float = 0.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    frequency_penalty: float = 0.0
    presence_penalty: float = 0.0
    logit_bias: dict[int, float] | None = None
    seed: int | None = None
    max_tokens: int = 512
    stop: list[str] | None = None
    stop_token_ids: tuple[int, ...] | None = None
    logprobs: StrictBool = False
    top_logprobs: int | None = None
    drafters: tuple[str, ...] | None = None
    templates: Any = None
    speculation: Any = True

    def _call_settings(self, kwargs: Mapping[str, Any]) -> dict[str, Any]:
        """A call's arguments under our names, without those that are None.

        Raises ConfigError or UnsupportedError for an argument that the model does not take.
        """
        raise NotImplementedError

    @of_both_kinds()
    def _check(self, kwargs: Mapping[str, Any]) -> None:
        """Check a call's arguments before LangChain consumes some of them."""
        merged_stop(self._call_settings(kwargs).get("stop"))


class ChatFields(CallFields):
    """The same of a chat model."""

    streaming: StrictBool = False
    strict_tools: Any = "auto"
    chat_template_kwargs: dict[str, Any] | None = None
    reasoning: Any = None
    media: Media = "refuse"


_TOOLS = ("tools", "tool_choice", "parallel_tool_calls", "strict", "response_format")
SAMPLING = tuple(
    field.name for field in dataclasses.fields(SamplingParams) if field.name not in ("stop", "logprobs")
)  # both are merged from several places
FOR_CHAT = (*_TOOLS, *(name for name in ChatFields.model_fields if name not in CallFields.model_fields))
"""Settings that only a chat model takes, and a model that continues texts refuses."""

OF_THE_CALL = (
    *(name for name in ChatFields.model_fields if name != "streaming"),
    *_TOOLS,
    *("model", "max_nodes", "tenant", "workflow_step", "prediction", "learning"),
)
ONLY_SPEED = ("learning", "prediction", "templates", "max_nodes", "drafters", "workflow_step")
"""Settings of a call that change its speed and nothing else."""

_OF_TRACING = ("ls_structured_output_format", "structured_output_format")
FROM_LANGCHAIN = ("stream", *_OF_TRACING)
"""Keyword arguments that LangChain passes on and that do not affect the answer."""

RANDOM_SEED = -1
"""llama.cpp's and Ollama's seed for other random numbers in every request, which is no seed here."""


def checked_fields(
    given: Mapping[str, Any], known: Collection[str], where: str, elsewhere: Mapping[str, str]
) -> dict[str, Any]:
    """A constructor's arguments under the names in `known`, with sampling settings checked; None is a default.

    Raises ConfigError or UnsupportedError, with what to write instead.
    """
    fields = translated(given, known, where, elsewhere)
    for name, value in fields.items():
        check_plain(name, value)
    fields = {name: value for name, value in fields.items() if value is not None or name not in ChatFields.model_fields}
    chosen = {name: value for name, value in fields.items() if name in SAMPLING}
    params = SamplingParams(**chosen)
    fields |= {name: getattr(params, name) for name in chosen}
    if "stop" in fields:
        fields["stop"] = list(stop_texts(fields["stop"]))
    if "drafters" in fields:
        fields["drafters"] = drafter_names(fields["drafters"])
    return fields


def checked_arguments(
    kwargs: Mapping[str, Any], known: Collection[str], elsewhere: Mapping[str, str]
) -> dict[str, Any]:
    """A call's arguments under the names in `known`, without those that are None.

    Raises ConfigError or UnsupportedError for an argument that would otherwise be dropped silently.
    """
    settings = translated(kwargs, (*known, *FROM_LANGCHAIN), "a call", elsewhere)
    settings = {name: value for name, value in settings.items() if value is not None}
    for name, value in settings.items():
        check_plain(name, value)
        if name in _OF_TRACING and not (isinstance(value, Mapping) and "schema" in value):
            raise ConfigError(f"{name}={shown(value)} is LangChain's own: leave it out")
    if not isinstance(settings.get("workflow_step", ""), str):
        raise ConfigError(f"workflow_step={shown(settings['workflow_step'])} must be a text")
    return settings


# Single settings: the call's own, or else the model's


def strictness(settings: Mapping[str, Any], default: Any) -> Any:
    """The call's `strict` or `strict_tools`, else the default. Raises ConfigError if neither "auto" nor a bool."""
    strict = settings.get("strict", settings.get("strict_tools", default))
    if not (isinstance(strict, bool) or (isinstance(strict, str) and strict == "auto")):
        raise ConfigError(f"strict={shown(strict)} must be 'auto', True or False")
    return strict


def parallel_calls(settings: Mapping[str, Any]) -> bool | None:
    """The call's `parallel_tool_calls`. Raises ConfigError unless it is True, False or None."""
    parallel = settings.get("parallel_tool_calls")
    if not isinstance(parallel, bool | None):
        raise ConfigError(f"parallel_tool_calls={shown(parallel)} must be True or False")
    return parallel


def sampling_params(model: CallFields, stop: Any, settings: Mapping[str, Any]) -> SamplingParams:
    """The model's sampling settings, overridden by those of the call; stop strings of both apply."""
    chosen = {name: settings.get(name, getattr(model, name)) for name in SAMPLING}
    chosen = {name: value for name, value in chosen.items() if value is not None}
    if is_whole(chosen.get("seed")) and chosen["seed"] == RANDOM_SEED:
        del chosen["seed"]
    wanted, top = (settings.get(name, getattr(model, name)) for name in ("logprobs", "top_logprobs"))
    if not isinstance(wanted, bool):
        raise ConfigError(f"logprobs={shown(wanted)} must be True or False; top_logprobs= says how many")
    if top is not None and not wanted:
        raise ConfigError(f"top_logprobs={shown(top)} needs logprobs=True")
    if not (top is None or (is_whole(top) and 0 <= top <= 20)):
        raise ConfigError(f"top_logprobs={shown(top)} must be a number of tokens, at most 20")
    stops = merged_stop(model.stop, stop, settings.get("stop"))
    return SamplingParams(**chosen, stop=stops, logprobs=(top or 0) if wanted else None)


def merged_stop(*stops: Any) -> tuple[str, ...]:
    """All stop strings, each once and in order; a single text counts as one. Raises ConfigError for other types."""
    return stop_texts([text for texts in stops for text in stop_texts(texts)])


def speculation_config(
    model: CallFields, settings: Mapping[str, Any], default: SpeculationConfig
) -> SpeculationConfig | None:
    """How this call speculates, None for the engine's `default`. Raises ConfigError on other types."""
    wanted = settings.get("speculation", model.speculation)
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
    chosen = {"drafters": settings.get("drafters", model.drafters), "max_nodes": settings.get("max_nodes")}
    chosen = {name: value for name, value in chosen.items() if value is not None}  # an empty list asks for no drafters
    if chosen:
        config = dataclasses.replace(config, **chosen)
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


# What a run's metadata says: the workflow step, and the tenant where the model has `tenant_from="metadata"`

DEFAULT_TENANT = "default"
"""The tenant of a model that is given none."""


class UnsharedTenant(str):
    """The tenant of a single request, for a run that names none: no other request can share it."""

    __slots__ = ()


def unshared_tenant() -> UnsharedTenant:
    """A tenant that is unique."""
    return UnsharedTenant(f"nobody-{uuid.uuid4().hex}")


def workflow_step_of(metadata: Mapping[str, Any] | None) -> str | None:
    """The workflow step that a run's metadata names.

    LangChain's agents and graphs set `lc_agent_name` and `langgraph_node`, which together name the step.
    """
    metadata = metadata or {}
    step = metadata.get("workflow_step") or "/".join(
        str(metadata[key]) for key in ("lc_agent_name", "langgraph_node") if metadata.get(key)
    )
    return _checked_text("workflow_step", step) if step else None


def tenant_of(model: Any, settings: Mapping[str, Any], metadata: Mapping[str, Any] | None) -> str:
    """The call's own tenant, else the model's, or with `tenant_from` the run's or a new `UnsharedTenant`.

    Completions are drafted from those of the call's tenant alone, and stored among them.
    """
    given = settings.get("tenant")
    if given is not None:
        return given if isinstance(given, UnsharedTenant) else checked_tenant(given)
    if model.tenant_from is None:
        own: str = model.tenant
        return own
    named = usable_tenant(metadata)
    if named is None and not model.engines.told_of_no_tenant:
        model.engines.told_of_no_tenant = True
        log.warning("a run's metadata names no tenant: it neither reads nor writes the cache")
    return named or unshared_tenant()


def own_tenant(model: Any, given: str | None) -> str:
    """The tenant for completions that come from no run. Raises ConfigError if only runs can name it."""
    if given is None and model.tenant_from is not None:
        raise ConfigError(f"with tenant_from={model.tenant_from!r} the model has no tenant of its own: give tenant=…")
    return str(model.tenant) if given is None else checked_tenant(given)


def usable_tenant(metadata: Mapping[str, Any] | None) -> str | None:
    """The tenant that a run's metadata names; None if it names none, or what cannot be one."""
    try:
        return checked_tenant((metadata or {}).get("tenant"))
    except ConfigError:
        return None


def checked_tenant(tenant: Any) -> str:
    """The tenant, if it can be one. Raises ConfigError."""
    from precedent.cache.records import check_tenant  # here: it loads numpy

    text = _checked_text("tenant", tenant)
    try:
        check_tenant(text)
    except CacheError as error:
        raise ConfigError(f"tenant={tenant!r} cannot be used: {error}") from None
    return text


def _checked_text(key: str, value: Any) -> str:
    if not isinstance(value, str) or not value:
        raise ConfigError(f"{key}={shown(value)} must be a non-empty text")
    check_plain(key, value)
    return value
