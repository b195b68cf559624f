"""Shares engines and caches in a process: equal options give one engine, and each place one cache."""

from __future__ import annotations

import weakref
from collections.abc import Hashable
from pathlib import Path
from typing import TYPE_CHECKING, Any

from precedent.cache import SpeculationCache
from precedent.engine.options import EngineOptions, key_of
from precedent.runtime.process import Lock, computing, in_forked_processes

if TYPE_CHECKING:
    from transformers import PreTrainedModel, PreTrainedTokenizerBase

    from precedent.engine.engine import Engine

_LOADING, _NOTING, _OPENING = Lock(), Lock(), Lock()  # a load may note engines and open caches
_OPEN: weakref.WeakValueDictionary[Hashable, SpeculationCache] = weakref.WeakValueDictionary()
_ENGINES: weakref.WeakValueDictionary[Hashable, Engine] = weakref.WeakValueDictionary()
in_forked_processes(_OPEN.clear)
in_forked_processes(_ENGINES.clear)  # an engine of the parent process answers nobody here


@computing()  # a process forked while a module is being imported could never import it
def shared_engine(
    target: str | Path | PreTrainedModel,
    options: EngineOptions | None = None,
    *,
    tokenizer: PreTrainedTokenizerBase | None = None,
    **changes: Any,
) -> Engine:
    """The engine of this target and these options, loaded once per process and kept as long as somebody holds it.

    LangChain re-creates chat models unasked (`configurable_fields`, `init_chat_model`), and their weights must not be
    loaded again each time. The arguments are those of `Engine.load`, and so are the errors raised.
    """
    from precedent.engine.engine import Engine

    options = (options or EngineOptions()).with_changes(**changes)
    options.check()
    with _LOADING:
        # a cache counts as the same by whichever way it was given: opened, or by its place
        options = options.with_changes(cache=opened_cache(options), embedder=None)
        key = key_of((target, tokenizer, options.key()))
        engine = _ENGINES.get(key)
        if engine is None or engine.closed:
            engine = Engine.load(target, options, tokenizer=tokenizer)
            _note(key, engine)
        return engine


def note_engine(engine: Engine) -> None:
    """Let `running_engines` know an engine that somebody else built and holds."""
    _note(id(engine), engine)  # valid as long as the engine lives, and so does its entry


def running_engines() -> list[Engine]:
    """The engines of this process that were shared or noted, and take requests."""
    with _NOTING:
        return [engine for engine in set(_ENGINES.values()) if not engine.closed]


def _note(key: Hashable, engine: Engine) -> None:
    with _NOTING:
        _ENGINES[key] = engine


def opened_cache(options: EngineOptions) -> SpeculationCache | None:
    """The cache of the options, opened if they name its place and no other engine opened it. Raises CacheError."""
    place = options.cache
    if place is None or isinstance(place, SpeculationCache):
        return place
    key = key_of((place, options.embedder))
    with _OPENING:
        cache = _OPEN.get(key)
        if cache is None:
            cache = _OPEN[key] = SpeculationCache.open(place, embedder=options.embedder)
        return cache
