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

from precedent.cache.records import check_tenant
from precedent.config import SpeculationConfig
from precedent.errors import CacheError, ConfigError
from precedent.langchain.arguments import checked_text

if TYPE_CHECKING:
    from precedent.langchain.fields import EngineFields

DEFAULT_TENANT = "default"
"""The tenant of a model that is given none."""

log = logging.getLogger(__name__)


class UnsharedTenant(str):
    """The tenant of a single request, for a run that names none: no other request can share it."""

    __slots__ = ()

    @classmethod
    def new(cls) -> Self:
        """Return one that is unique."""
        return cls(f"nobody-{uuid.uuid4().hex}")


def check_tenants(model: EngineFields) -> None:
    """Raise ConfigError if the model's fields do not determine a tenant."""
    _checked(model.tenant)
    if model.tenant_from is not None and model.tenant != DEFAULT_TENANT:
        raise ConfigError(
            f"tenant={model.tenant!r} and tenant_from={model.tenant_from!r} both set the runs' tenant: leave one out"
        )


def tenant_of(model: EngineFields, settings: Mapping[str, Any], metadata: Mapping[str, Any] | None) -> str:
    """The call's own tenant, else the model's, or with `tenant_from` the run's or an `UnsharedTenant`."""
    given = settings.get("tenant")
    if given is not None:
        return given if isinstance(given, UnsharedTenant) else _checked(given)
    if model.tenant_from is None:
        return model.tenant
    named = usable_tenant(metadata)
    if named is None and not model.engines.told_of_no_tenant:
        model.engines.told_of_no_tenant = True
        log.warning("a run's metadata names no tenant: it neither reads nor writes the cache")
    return named or UnsharedTenant.new()


def own_tenant(model: EngineFields, given: str | None) -> str:
    """The tenant for completions that come from no run. Raises ConfigError if only runs can name it."""
    if given is None and model.tenant_from is not None:
        raise ConfigError(f"with tenant_from={model.tenant_from!r} the model has no tenant of its own: give tenant=…")
    return model.tenant if given is None else _checked(given)


def without_cache(speculation: SpeculationConfig) -> SpeculationConfig:
    """The same settings without reading or writing the cache."""
    drafters = tuple(name for name in speculation.drafters if name != "recall")
    return dataclasses.replace(speculation, drafters=drafters, write_back=False)


def usable_tenant(metadata: Mapping[str, Any] | None) -> str | None:
    """The tenant that a run's metadata names; None if it names none, or what cannot be one."""
    try:
        return _checked((metadata or {}).get("tenant"))
    except ConfigError:
        return None


def _checked(tenant: Any) -> str:
    text = checked_text("tenant", tenant)
    try:
        check_tenant(text)
    except CacheError as error:
        raise ConfigError(f"tenant={tenant!r} cannot be used: {error}") from None
    return text
