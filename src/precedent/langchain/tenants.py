"""Determines the tenant of a call: the call drafts from the tenant's completions and stores its own among them.

The application sets it on the model or in the call. A run's metadata counts only if the model has
`tenant_from="metadata"`; a run that then names no tenant shares nothing with others.
"""

from __future__ import annotations

import dataclasses
import logging
import uuid
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, Self

from langchain_core.runnables import RunnableConfig
from langchain_core.runnables.config import ensure_config

from precedent.cache.records import check_tenant
from precedent.config import SpeculationConfig
from precedent.errors import CacheError, ConfigError, UnsupportedError
from precedent.langchain.exceptions import of_both_kinds
from precedent.langchain.runs import checked_text, run_metadata, workflow_step_of

if TYPE_CHECKING:
    from precedent.langchain.fields import EngineFields

DEFAULT_TENANT = "default"
"""The tenant of a model that is given none."""

RECALL = "recall"
"""The drafter that reads the cache."""

log = logging.getLogger(__name__)


class Nobody(str):
    """The tenant of a single request, for a run that names none: no other request can share it."""

    __slots__ = ()

    @classmethod
    def alone(cls) -> Self:
        """A new, unique tenant."""
        return cls(f"nobody-{uuid.uuid4().hex}")


def check_tenants(model: EngineFields) -> None:
    """Raise ConfigError if the model's fields do not determine a tenant."""
    _checked("tenant", model.tenant)
    if model.tenant_from is not None and model.tenant != DEFAULT_TENANT:
        raise ConfigError(
            f"tenant={model.tenant!r} and tenant_from={model.tenant_from!r} both set the runs' tenant: leave one out"
        )


def tenant_of(model: EngineFields, kwargs: Mapping[str, Any], metadata: Mapping[str, Any] | None) -> str:
    """The call's own tenant, else the model's, or with `tenant_from` the run's or `Nobody`."""
    given = kwargs.get("tenant")
    if given is not None:
        return given if isinstance(given, Nobody) else _checked("tenant", given)
    if model.tenant_from is None:
        return model.tenant
    named = _usable((metadata or {}).get("tenant"))
    if named is None:
        model.engines.once(log.warning, "a run's metadata names no tenant: it neither reads nor writes the cache")
    return Nobody.alone() if named is None else named


def own_tenant(model: EngineFields, given: str | None) -> str:
    """The tenant for completions that come from no run. Raises ConfigError if only runs can name it."""
    if given is None and model.tenant_from is not None:
        raise ConfigError(f"with tenant_from={model.tenant_from!r} the model has no tenant of its own: give tenant=…")
    return model.tenant if given is None else _checked("tenant", given)


@of_both_kinds()
def tenant_of_batch(model: EngineFields, kwargs: Mapping[str, Any]) -> str:
    """The tenant of a batch of texts, which LangChain passes on with the first text's run.

    Raises UnsupportedError if the batch mixes tenants or workflow steps.
    """
    metadata = kwargs.get("metadata")
    runs = [run_metadata(model, one) for one in (metadata if isinstance(metadata, list) else [metadata])]
    named = model.tenant_from is not None and kwargs.get("tenant") is None
    told = {(workflow_step_of(run), _usable(run.get("tenant")) if named else None) for run in runs}
    if len(told) > 1:
        raise UnsupportedError("one batch of texts cannot mix tenants or workflow steps: use a separate batch for each")
    return tenant_of(model, kwargs, runs[0] if runs else None)


def with_tenant(config: RunnableConfig | None) -> RunnableConfig:
    """A run's configuration with the tenant copied from `configurable` to its metadata, unless that has one."""
    config = ensure_config(config)
    named = config["configurable"].get("tenant")
    if named is not None and "tenant" not in config["metadata"]:
        config["metadata"] = {**config["metadata"], "tenant": named}
    return config


def without_cache(speculation: SpeculationConfig) -> SpeculationConfig:
    """The same settings without reading or writing the cache."""
    drafters = tuple(name for name in speculation.drafters if name != RECALL)
    return dataclasses.replace(speculation, drafters=drafters, write_back=False)


def _usable(named: Any) -> str | None:
    try:
        return _checked("tenant", named)
    except ConfigError:
        return None


def _checked(key: str, value: Any) -> str:
    text = checked_text(key, value)
    try:
        check_tenant(text)
    except CacheError as error:
        raise ConfigError(f"{key}={value!r} cannot be used: {error}") from None
    return text
