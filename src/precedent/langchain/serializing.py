"""A model's fields as plain values, without weights or secrets: to write it down, and to tell two models apart."""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

from precedent.cache import SpeculationCache
from precedent.config import SpeculationConfig
from precedent.langchain.arguments import SAMPLING
from precedent.langchain.settings import OF_THE_ENGINE, templates_of

if TYPE_CHECKING:
    from precedent.langchain.fields import EngineFields

SECRETS = frozenset({"token", "use_auth_token"})
"""Arguments of `from_pretrained` that must not appear in a trace."""

WITHOUT_EFFECT = ("speculation_cache", "embedder", "draft_device", "loop", "keep_prefixes")
"""Fields of the engine that no answer depends on."""

UNLESS_GIVEN = ("draft_model", "speculation_cache")
"""Fields that the environment fills in unless they are given: always written, or a model read back could differ."""


def plain_fields(model: EngineFields) -> dict[str, Any]:
    """The fields that may hold objects, as JSON values; None for an object without such a form."""
    plain = {
        "draft_model": _named(model.draft_model),
        "speculation_cache": written_cache(model.speculation_cache),
        "embedder": _named(model.embedder),
        "speculation": _settings(model.speculation),
        "model_kwargs": without_secrets(model.model_kwargs),
        "templates": None if model.templates is None else [one.text for one in templates_of(model, {}, ())],
    }
    return {name: value for name, value in plain.items() if name in UNLESS_GIVEN or not _is_default(model, name)}


def identifying_params(model: EngineFields) -> dict[str, Any]:
    """Everything an answer depends on, and what speeds it up: the key of LangChain's answer caches."""
    draft = model.draft_model
    of_engine = [name for name in OF_THE_ENGINE if name not in WITHOUT_EFFECT]
    names = (*of_engine, "sampling", *SAMPLING, "stop", "logprobs", "top_logprobs", "tenant", "drafters", "speculation")
    settings = {name: getattr(model, name) for name in names}
    settings["model_kwargs"] = without_secrets(model.model_kwargs)
    settings["templates"] = [template.text for template in templates_of(model, {}, ())]
    drafted_by = draft if draft is None or isinstance(draft, str) else type(draft).__name__
    return {**settings, "model_name": model.model, "weights": model.engines.identity, "draft_model": drafted_by}


def _is_default(model: EngineFields, name: str) -> bool:
    return bool(getattr(model, name) is type(model).model_fields[name].default)


def _named(value: Any) -> str | None:
    return str(value) if isinstance(value, str | Path) else None


def written_cache(cache: Any) -> str | None:
    """A cache's path, or its URL without secrets; None for one in memory."""
    if isinstance(cache, SpeculationCache):
        return cache.path
    return None if cache is None else str(cache)


def _settings(speculation: Any) -> Any:
    return asdict(speculation) if isinstance(speculation, SpeculationConfig) else speculation


def without_secrets(settings: dict[str, Any] | None) -> dict[str, Any] | None:
    """Arguments of `from_pretrained` without those that must not be shown."""
    if settings is None:
        return None
    kept = {name: value for name, value in settings.items() if name not in SECRETS}
    return {name: value.to_dict() if hasattr(value, "to_dict") else value for name, value in kept.items()}
