"""Speculation caches that were opened by their place: the engines of a process share one."""

from __future__ import annotations

import weakref
from collections.abc import Hashable

from precedent.cache import SpeculationCache
from precedent.engine.options import EngineOptions
from precedent.engine.sharing import key_of
from precedent.runtime.process import Lock, in_forked_processes

_OPENING = Lock()
_OPEN: weakref.WeakValueDictionary[Hashable, SpeculationCache] = weakref.WeakValueDictionary()
in_forked_processes(_OPEN.clear)


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
