"""Settings, from the environment: it alone reaches vLLM's server and its workers alike."""

from __future__ import annotations

import json
import math
import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from precedent.cache.records import check_tenant
from precedent.errors import ConfigError

if TYPE_CHECKING:
    from precedent.cache import Embedder

PREFIX = "PRECEDENT_VLLM"
SECRET = f"{PREFIX}_SECRET"
FOLDER = f"{PREFIX}_FOLDER"
_OWN = ("STORE", "EMBEDDER", "API_KEYS", "TENANT", "DRAFTERS", "STEP_COST", "SECRET", "FOLDER")
_SWITCH = {"on": True, "off": False}


@dataclass(frozen=True, slots=True)
class Settings:
    """What the variables `PRECEDENT_VLLM…` say.

    `on` is the kill switch `PRECEDENT_VLLM=off`: nothing is drafted and nothing stored, and API keys are still asked
    for. `store` is a folder, file or URL; None drafts from prompts alone. `tenant` owns all requests where there is no
    file of API keys. `secret` proves to workers that a note comes from this server's middleware; `folder` holds the
    workers' counts. Without `drafters`, all of a service's. `step_cost` gives milliseconds of a step by its tokens;
    without it they are learned.
    """

    on: bool = True
    store: str | None = None
    embedder: str | Embedder | None = None
    api_keys: Path | None = None
    tenant: str | None = None
    drafters: tuple[str, ...] | None = None
    step_cost: dict[int, float] | None = None
    secret: bytes = b""
    folder: Path | None = None

    @classmethod
    def read(cls, environment: Mapping[str, str] = os.environ) -> Settings:
        """Read them. Raises ConfigError for an unknown name or a value that does not fit."""
        names = {f"{PREFIX}_{name}" for name in _OWN}
        unknown = sorted(name for name in environment if name.startswith(f"{PREFIX}_") and name not in names)
        if unknown:
            raise ConfigError(f"{unknown[0]} is no setting; there are {PREFIX} and {', '.join(sorted(names))}")
        said = {name: environment.get(f"{PREFIX}_{name}", "").strip() for name in _OWN}
        tenant, keys = said["TENANT"] or None, said["API_KEYS"]
        if tenant is not None:
            check_tenant(tenant)
        if tenant and keys:
            raise ConfigError(f"{PREFIX}_TENANT is for a server without {PREFIX}_API_KEYS: keys name their tenants")
        return cls(
            on=_switch(environment.get(PREFIX, "on")),
            store=said["STORE"] or None,
            embedder=said["EMBEDDER"] or None,
            api_keys=Path(keys).expanduser() if keys else None,
            tenant=tenant,
            drafters=tuple(name.strip() for name in said["DRAFTERS"].split(",")) if said["DRAFTERS"] else None,
            step_cost=_step_cost(said["STEP_COST"]) if said["STEP_COST"] else None,
            secret=said["SECRET"].encode(),
            folder=Path(said["FOLDER"]) if said["FOLDER"] else None,
        )


def _switch(text: str) -> bool:
    if text.strip().lower() not in _SWITCH:
        raise ConfigError(f"{PREFIX}={text!r} must be on or off")
    return _SWITCH[text.strip().lower()]


def _step_cost(text: str) -> dict[int, float]:
    try:
        found = {int(width): float(milliseconds) for width, milliseconds in json.loads(text).items()}
    except (ValueError, TypeError, AttributeError):
        found = {}
    if not found or min(found) < 1 or not all(0.0 < milliseconds < math.inf for milliseconds in found.values()):
        raise ConfigError(
            f'{PREFIX}_STEP_COST={text!r} must give milliseconds by tokens in a step, like {{"1": 20, "17": 24}}'
        )
    return found
