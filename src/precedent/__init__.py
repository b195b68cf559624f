"""Precedent: lossless speculative decoding for agents, drafted from a semantic cache of earlier completions.

The public names are loaded on first use (PEP 562), so that `import precedent` is quick and loads no torch.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from precedent.cache import SpeculationCache
    from precedent.config import EngineLimits, SamplingParams, SpeculationConfig
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
    from precedent.langchain import ChatPrecedent
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
    "PromptError",
    "RequestCancelled",
    "SamplingParams",
    "SpeculationCache",
    "SpeculationConfig",
    "Template",
    "Templates",
    "UnsupportedError",
    "__version__",
]

_HOMES = {
    "ChatPrecedent": "precedent.langchain",
    "Engine": "precedent.engine.engine",
    "EngineLimits": "precedent.config",
    "SamplingParams": "precedent.config",
    "SpeculationCache": "precedent.cache",
    "SpeculationConfig": "precedent.config",
    "Template": "precedent.text.templates",
    "Templates": "precedent.text.templates",
}

PLUGINS = {
    "ChatPrecedentServer": ("precedent_server.client", "client"),
    "PrecedentRecorder": ("precedent_replay.recorder", "replay"),
    "RunAheadMiddleware": ("precedent_run_ahead", "agents"),
    "generate": ("precedent_generate", "generate"),
    "read_only": ("precedent_run_ahead", "agents"),
}
"""Names of other packages, each with its module and the extra that installs it. They are outside of `__all__`, so that
a star import works without those packages."""

OPTIONS = {
    "bitwise": "precedent-cpu",
    "bitwise on cuda": "precedent-llm[cuda]",
    "cuda_graphs": "precedent-llm[cuda]",
    "llama.cpp": "precedent-llm[llama-cpp]",
    "models": "precedent-llm[models]",
    "quantization": "precedent-cpu",
}
"""Options and kinds of models that other packages compute, each with what to install."""

COMMANDS = {
    "bench": "replay",
    "demo": "demo",
    "keys": "serve",
    "measure-draft": "drafts",
    "models": "testing",
    "replay": "replay",
    "serve": "serve",
    "train-draft": "drafts",
    "train-judge": "research",
}
"""Commands of other packages, each with the extra that installs it."""

DRAFTERS = {"block-draft": "drafts", "eagle": "drafts", "mtp": "drafts"}
"""Drafters of other packages, each with the extra that installs it."""


def __getattr__(name: str) -> object:
    """Import a public name from the module that defines it."""
    value: object
    if name in PLUGINS:
        value = _of_plugin(name, *PLUGINS[name])
    elif name in __all__:
        value = getattr(import_module(_HOMES.get(name, "precedent.errors")), name)
    else:
        raise AttributeError(f"module 'precedent' has no attribute {name!r}")
    globals()[name] = value
    return value


def _of_plugin(name: str, module: str, extra: str) -> object:
    try:
        return getattr(import_module(module), name)
    except ModuleNotFoundError as error:
        if error.name != module.partition(".")[0]:
            raise
        from precedent.errors import ConfigError

        raise ConfigError(f"{name} is not installed: pip install 'precedent-llm[{extra}]'") from error


def __dir__() -> list[str]:
    return sorted([*__all__, *PLUGINS])
