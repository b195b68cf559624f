"""From a request to its answer: admission, scheduling, the worker that owns the target, write-back, metrics.

Must not know LangChain or a server; they call it. `Engine` and its types load torch, so they are imported on first use.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from precedent.decoding.sequence import Emission
    from precedent.engine.delivery import ResultObserver
    from precedent.engine.engine import Engine
    from precedent.engine.generation import Generation, GenerationResult
    from precedent.engine.options import EngineOptions

__all__ = ["Emission", "Engine", "EngineOptions", "Generation", "GenerationResult", "ResultObserver"]

_HOMES = {
    "Emission": "decoding.sequence",
    "Engine": "engine.engine",
    "EngineOptions": "engine.options",
    "Generation": "engine.generation",
    "GenerationResult": "engine.generation",
    "ResultObserver": "engine.delivery",
}


def __getattr__(name: str) -> object:
    """Import a public name from the module that defines it."""
    if name not in __all__:
        raise AttributeError(f"module 'precedent.engine' has no attribute {name!r}")
    return getattr(import_module(f"precedent.{_HOMES[name]}"), name)
