"""Settings of the hook, from the environment: it reaches every process that SGLang starts."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

from precedent.cache.records import check_tenant
from precedent.errors import ConfigError

if TYPE_CHECKING:
    from precedent.cache import Embedder

PREFIX = "PRECEDENT_SGLANG"
_OWN = ("STORE", "EMBEDDER", "TENANT", "DRAFTERS")
_SWITCH = {"on": True, "off": False}


@dataclass(frozen=True, slots=True)
class Settings:
    """What the variables `PRECEDENT_SGLANG…` say.

    `on` is the kill switch `PRECEDENT_SGLANG=off`. `store` is a folder, file or URL, and `tenant` owns every request of
    this server; without both, requests are drafted from their own prompts. Without `drafters`, all of a service's.
    """

    on: bool = True
    store: str | None = None
    embedder: str | Embedder | None = None
    tenant: str | None = None
    drafters: tuple[str, ...] | None = None

    @classmethod
    def read(cls, environment: Mapping[str, str] = os.environ) -> Settings:
        """Read them. Raises ConfigError for an unknown name or a value that does not fit, CacheError for a tenant."""
        names = {f"{PREFIX}_{name}" for name in _OWN}
        unknown = sorted(name for name in environment if name.startswith(f"{PREFIX}_") and name not in names)
        if unknown:
            raise ConfigError(f"{unknown[0]} is no setting; there are {PREFIX} and {', '.join(sorted(names))}")
        switch = environment.get(PREFIX, "on").strip().lower()
        if switch not in _SWITCH:
            raise ConfigError(f"{PREFIX}={switch!r} must be on or off")
        said = {name: environment.get(f"{PREFIX}_{name}", "").strip() or None for name in _OWN}
        if said["TENANT"] is not None:
            check_tenant(said["TENANT"])
        if said["STORE"] is not None and said["TENANT"] is None:
            raise ConfigError(f"{PREFIX}_STORE needs {PREFIX}_TENANT: SGLang does not say whose a request is")
        drafters = said["DRAFTERS"]
        return cls(
            on=_SWITCH[switch],
            store=said["STORE"],
            embedder=said["EMBEDDER"],
            tenant=said["TENANT"],
            drafters=None if drafters is None else tuple(name.strip() for name in drafters.split(",")),
        )
