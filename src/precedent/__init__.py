"""Precedent: lossless speculative decoding for agents, drafted from a semantic cache of earlier completions.

The public names are loaded on first use (PEP 562), so that `import precedent` is quick and loads no torch.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from precedent.cache import SpeculationCache
    from precedent.client import ChatPrecedentServer as ChatPrecedentServer
    from precedent.config import EngineLimits, SamplingParams, SpeculationConfig
    from precedent.custom_generate import generate
    from precedent.engine.engine import Engine
    from precedent.errors import (
        CacheError,
        CacheMismatchError,
        CapacityError,
        ConfigError,
        ContextOverflowError,
        EngineClosedError,
        GenerationError,
        GrammarError,
        ModelLoadError,
        PrecedentError,
        PromptError,
        RequestCancelled,
        UnsupportedError,
    )
    from precedent.langchain import ChatPrecedent, PrecedentRecorder
    from precedent.text.templates import Template, Templates

__version__ = "0.1.0"

__all__ = [
    "CacheError",
    "CacheMismatchError",
    "CapacityError",
    "ChatPrecedent",
    "ConfigError",
    "ContextOverflowError",
    "Engine",
    "EngineClosedError",
    "EngineLimits",
    "GenerationError",
    "GrammarError",
    "ModelLoadError",
    "PrecedentError",
    "PrecedentRecorder",
    "PromptError",
    "RequestCancelled",
    "SamplingParams",
    "SpeculationCache",
    "SpeculationConfig",
    "Template",
    "Templates",
    "UnsupportedError",
    "__version__",
    "generate",
]

_WITH_AN_EXTRA = {"ChatPrecedentServer": "precedent.client"}
"""Names outside of `__all__`, so that a star import works without the packages that they need."""

_HOMES = {
    **_WITH_AN_EXTRA,
    "ChatPrecedent": "precedent.langchain",
    "Engine": "precedent.engine.engine",
    "EngineLimits": "precedent.config",
    "PrecedentRecorder": "precedent.langchain",
    "SamplingParams": "precedent.config",
    "SpeculationCache": "precedent.cache",
    "SpeculationConfig": "precedent.config",
    "Template": "precedent.text.templates",
    "Templates": "precedent.text.templates",
    "generate": "precedent.custom_generate",
}


def __getattr__(name: str) -> object:
    """Import a public name from the module that defines it."""
    if name not in __all__ and name not in _WITH_AN_EXTRA:
        raise AttributeError(f"module 'precedent' has no attribute {name!r}")
    value: object = getattr(import_module(_HOMES.get(name, "precedent.errors")), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted(__all__)
