"""What a deployment is made from: the arguments of `serve run precedent_ray:app`."""

from __future__ import annotations

import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Self

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from precedent.cache import StoreURL
from precedent.cache.store_url import place_of
from precedent.engine.options import EngineOptions
from precedent.errors import ConfigError
from precedent_server.keys import KeyFile
from precedent_server.serving import named_models
from precedent_server.settings import ServerLimits


class Settings(BaseModel):
    """Arguments of a deployment; texts of a command line are read as what they stand for.

    - `model`: the target, or NAME=TARGET, several separated by commas. `draft_model`, `device`, `dtype`, `bitwise`,
      `embedder` are those of `EngineOptions`.
    - `cache`: a PostgreSQL URL without a password; a folder or file is for one replica. None: each remembers its own.
    - `api_keys`: the key file's path, the same on every node. Without keys a proxy answers its own machine alone.
    - `max_queued`, `max_queued_per_key`, `request_seconds`, `grace_seconds`: as of `precedent serve`, in each replica.
    - `min_replicas`, `max_replicas`: equal numbers switch autoscaling off.
    - `target_ongoing_requests`: replicas are added beyond it, and a tenant spreads beyond it.
    - `target_queue_seconds`: a replica is added if a request waits longer for memory.
    - `upscale_seconds`, `downscale_seconds`: how long a reason to add or remove replicas must last.
    - `num_cpus`, `num_gpus`: what a replica reserves; a CPU engine computes with `num_cpus` threads.
    - `read_ahead_seconds`: how long a new replica reads from the store before it takes requests; 0 reads nothing.
    - `stuck_seconds`: a replica whose engine works on one step for longer is replaced; so is one that fails many
      requests.
    """

    model_config = ConfigDict(extra="forbid", frozen=True)

    model: str
    draft_model: str | None = None
    device: str | None = None
    dtype: str | None = None
    bitwise: bool = False
    embedder: str | None = None
    cache: str | None = None
    api_keys: str | None = None
    max_queued: int = Field(256, ge=1)
    max_queued_per_key: int = Field(64, ge=1)
    request_seconds: float = Field(600.0, gt=0)
    grace_seconds: float = Field(30.0, gt=0)
    min_replicas: int = Field(1, ge=1)
    max_replicas: int = Field(4, ge=1)
    target_ongoing_requests: int = Field(16, ge=1)
    target_queue_seconds: float = Field(2.0, gt=0)
    upscale_seconds: float = Field(30.0, ge=0)
    downscale_seconds: float = Field(600.0, ge=0)
    num_cpus: float = Field(1.0, ge=0)
    num_gpus: float = Field(0.0, ge=0)
    read_ahead_seconds: float = Field(60.0, ge=0)
    stuck_seconds: float = Field(120.0, gt=0)

    @classmethod
    def of(cls, args: Mapping[str, Any]) -> Self:
        """The settings that these arguments name. Raises ConfigError for an unknown name, or a value that is none."""
        for name in args:
            if name not in cls.model_fields:
                raise ConfigError(f"precedent_ray:app has no argument {name!r}; known: {', '.join(cls.model_fields)}")
        try:
            settings = cls(**args)
        except ValidationError as error:
            first = error.errors(include_input=False)[0]
            raise ConfigError(f"precedent_ray:app: {'.'.join(map(str, first['loc']))}: {first['msg']}") from None
        settings._check()
        return settings

    def _check(self) -> None:
        if self.max_replicas < self.min_replicas:
            raise ConfigError(f"max_replicas={self.max_replicas} is below min_replicas={self.min_replicas}")
        place = place_of(self.cache)
        if isinstance(place, StoreURL):
            _check_shown(place, self.cache)
        elif place is not None and self.max_replicas > 1:
            raise ConfigError(
                f"cache={self.cache!r} is a file: replicas on several machines cannot share it; give a "
                "postgresql:// URL, or max_replicas=1"
            )
        _ = self.models, self.keys  # both are checked here, where the operator sees it

    @property
    def models(self) -> dict[str, str]:
        """Targets by name. Raises ConfigError."""
        entries = [entry.strip() for entry in self.model.split(",") if entry.strip()]
        if not entries:
            raise ConfigError("model is empty: name a target")
        return named_models(entry if "=" in entry else f"{entry}={entry}" for entry in entries)

    @property
    def keys(self) -> KeyFile | None:
        """The key file, read; None without keys. Raises ConfigError."""
        if self.api_keys is None:
            return None
        path = Path(self.api_keys)
        if not path.is_absolute():
            raise ConfigError(f"api_keys={self.api_keys!r} must be an absolute path, the same on every node")
        return KeyFile(path)

    @property
    def options(self) -> EngineOptions:
        """What each engine is built from."""
        return EngineOptions(
            draft_model=self.draft_model,
            device=self.device,
            dtype=self.dtype,
            bitwise=self.bitwise,
            embedder=self.embedder,
        )

    @property
    def limits(self) -> ServerLimits:
        """What callers may ask of each replica."""
        return ServerLimits(
            max_queued=self.max_queued,
            max_queued_per_key=self.max_queued_per_key,
            request_seconds=self.request_seconds,
            grace_seconds=self.grace_seconds,
        )

    @property
    def shutdown_seconds(self) -> int:
        """How long Ray lets a replica that is taken away finish its answers, and close."""
        return math.ceil(self.grace_seconds) + 10


def _check_shown(url: StoreURL, given: str | None) -> None:
    """Refuse a URL with a secret: Ray shows arguments on its dashboard, keeps them, and sends them to other nodes."""
    if url.reveal() != StoreURL(url.shown).reveal():
        raise ConfigError(
            f"cache={url} holds a password, which Ray would show on its dashboard: leave it out, and set PGPASSWORD or "
            "~/.pgpass on every node"
        )
