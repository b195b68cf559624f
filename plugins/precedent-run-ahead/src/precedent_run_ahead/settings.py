"""The settings of a `RunAheadMiddleware`, and the switch that turns all of them off."""

from __future__ import annotations

import logging
import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from langchain.agents.middleware import AgentState
from langchain_core.messages import ToolCall

from precedent.cache import SpeculationCache
from precedent.errors import ConfigError
from precedent.langchain.middleware import Tenant
from precedent_run_ahead.beside import Harmless
from precedent_run_ahead.marks import ReadOnlyList
from precedent_run_ahead.recording import Redact

SWITCH = "PRECEDENT_RUN_AHEAD"
"""Environment variable that stops all running ahead in a running process: `off`, or `on` (the default)."""

Predictor = Callable[[AgentState[Any]], Sequence[ToolCall]]
"""A predictor of your own: the calls that may come next, from the state that the model is about to see."""

log = logging.getLogger("precedent.run_ahead")


@dataclass(frozen=True, slots=True)
class Settings:
    """What the middleware was given; see `RunAheadMiddleware`."""

    allowed: ReadOnlyList
    cache: SpeculationCache | None
    predict: Predictor | None
    tenant: Tenant
    harmless: Harmless
    listen: bool | None
    redact: Redact | None


def switched_off() -> bool:
    """Whether `SWITCH` is off. Raises ConfigError for another value than on and off."""
    switch = os.environ.get(SWITCH, "on")
    if switch not in ("on", "off"):
        raise ConfigError(f"{SWITCH}={switch!r} is neither 'on' nor 'off'")
    return switch == "off"
