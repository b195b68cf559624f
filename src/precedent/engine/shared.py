"""One engine for equal settings: weights are loaded once per process."""

from __future__ import annotations

import weakref
from collections.abc import Hashable
from pathlib import Path
from typing import TYPE_CHECKING, Any

from precedent.engine.engine import Engine
from precedent.engine.sharing import key_of
from precedent.runtime.process import Lock, in_forked_processes

if TYPE_CHECKING:
    from transformers import PreTrainedModel

    from precedent.cache import SpeculationCache

_LOADING = Lock()
_SHARED: weakref.WeakValueDictionary[Hashable, Engine] = weakref.WeakValueDictionary()
in_forked_processes(_SHARED.clear)  # an engine of the parent's answers nobody here


def shared_engine(
    target: str | Path | PreTrainedModel, *, cache: SpeculationCache | None = None, **loading: Any
) -> Engine:
    """The engine of these settings, loaded once per process and kept while somebody holds it.

    LangChain re-creates chat models behind one's back (`configurable_fields`, `init_chat_model`); the weights must not
    be loaded again each time. `loading` are further arguments of `Engine.load`, which raises what it raises.
    """
    key = key_of({"target": target, "cache": cache, **loading})
    with _LOADING:
        engine = _SHARED.get(key)
        if engine is None or engine.closed:
            engine = _SHARED[key] = Engine.load(target, cache=cache, **loading)
        return engine
