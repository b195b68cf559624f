"""From a request to its answer: admission, scheduling, the worker that owns the target, write-back, metrics.

Must not know LangChain or a server; they call it. `Engine` and its types load torch, so they are imported on first use.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from precedent.engine.delivery import ResultObserver
    from precedent.engine.engine import Engine
    from precedent.engine.generation import Emission, Generation, GenerationResult
    from precedent.engine.options import EngineOptions
    from precedent.engine.prometheus import prometheus_text

__all__ = ["Emission", "Engine", "EngineOptions", "Generation", "GenerationResult", "ResultObserver", "prometheus_text"]

_HOMES = {
    "Emission": "generation",
    "Engine": "engine",
    "EngineOptions": "options",
    "Generation": "generation",
    "GenerationResult": "generation",
    "ResultObserver": "delivery",
    "prometheus_text": "prometheus",
}


def __getattr__(name: str) -> object:
    """Import a public name from the module that defines it."""
    if name not in __all__:
        raise AttributeError(f"module 'precedent.engine' has no attribute {name!r}")
    return getattr(import_module(f"precedent.engine.{_HOMES[name]}"), name)
