"""Which engine a chat model runs on: weights outlive the chat model objects that LangChain re-creates."""

from __future__ import annotations

import asyncio
import contextvars
import uuid
import weakref
from collections.abc import Callable, Hashable
from functools import cache
from typing import TYPE_CHECKING, Any, Self

from precedent.engine.options import EngineOptions
from precedent.engine.shared import note_engine, running_engines, shared_engine
from precedent.errors import UnsupportedError
from precedent.runtime.background import Background, long_work
from precedent.runtime.process import Lock, in_forked_processes

if TYPE_CHECKING:
    from precedent.engine.engine import Engine

_HOLDING, _NOTING = Lock(), Lock()
_HOLDERS: weakref.WeakSet[EngineHolder] = weakref.WeakSet()
"""Every holder of this process: `unload` makes all of them drop an engine."""


class EngineHolder:
    """Keeps the engines of one chat model, and of all copies made of it, alive.

    Copies share the holder, so an engine loaded for a short-lived copy stays loaded. `identity` is empty for models
    loaded by name, else unique, so that two sets of weights of one name are never confused. `told_of_no_tenant`: a
    warning was given for a run without a tenant.
    """

    def __init__(self, *, engine: Engine | None = None, weights: tuple[Any, Any] | None = None) -> None:
        self.given, self.weights = engine, weights
        self._engines: dict[Hashable, Engine] = {}
        self.told_of_no_tenant = False
        self.identity = uuid.uuid4().hex if engine is not None or weights is not None else ""
        with _NOTING:
            _HOLDERS.add(self)
        if engine is not None:
            note_engine(engine)

    def __copy__(self) -> Self:
        return self

    def __deepcopy__(self, memo: dict[int, Any]) -> Self:
        return self

    def __reduce__(self) -> tuple[type[Self], tuple[()]]:
        """Pickle the holder without engines: the process that reads it loads its own. Raises UnsupportedError."""
        if self.identity:
            raise UnsupportedError(
                "a chat model made by from_model or from_engine cannot be pickled, for weights stay in their process: "
                "pass model=NAME, and it is loaded where it arrives"
            )
        return type(self), ()

    def loaded(self, model: str, options: EngineOptions) -> Engine | None:
        """The engine of a model, None if it is not loaded yet."""
        return self.given or self._engines.get((model, options.key()))

    def get(self, model: str, options: EngineOptions) -> Engine:
        """The engine of a model, loaded on first use.

        Raises ModelLoadError, UnsupportedError, ConfigError or CacheError.
        """
        engine = self.loaded(model, options)  # without the lock: a running engine does not wait while another one loads
        if engine is None:
            with _HOLDING:
                engine = self.loaded(model, options)
                if engine is None:
                    target, tokenizer = self.weights or (model, None)
                    engine = shared_engine(target, options, tokenizer=tokenizer)
                    self._engines[model, options.key()] = engine
        return engine

    def unload(self, model: str, options: EngineOptions) -> None:
        """Close the engine of a model, if it is loaded, and make every holder drop it, so that its weights are freed.

        Weights that were handed over stay their owner's. Raises UnsupportedError for an engine that was handed over.
        """
        if self.given is not None:
            raise UnsupportedError("this model runs on an engine that you hold: close that one with engine.close()")
        with _NOTING:
            holders = list(_HOLDERS)
        with _HOLDING:
            engine = self._engines.get((model, options.key()))
            for holder in holders:
                holder._engines = {key: one for key, one in holder._engines.items() if one is not engine}
        if engine is not None:
            from precedent.runtime.device_memory import give_back

            engine.close()
            del engine
            give_back()

    def other(self, model: str, options: EngineOptions) -> Engine:
        """The running engine of another model: the one of these options, or else the only one of this name.

        Raises UnsupportedError if no engine has this name, or several do.
        """
        engine, running = self._engines.get((model, options.key())), running_engines()
        found = [engine] if engine else [one for one in running if one.model_name == model]
        if len(found) > 1:
            raise UnsupportedError(
                f"model={model!r} names {len(found)} loaded engines: make a chat model on one of them"
            )
        if not found:
            loaded = ", ".join(sorted({one.model_name for one in running})) or "none"
            raise UnsupportedError(
                f"model={model!r} is not loaded, and a call loads nothing (loaded: {loaded}): make a ChatPrecedent for "
                "it"
            )
        return found[0]


async def load_beside(load: Callable[..., Engine], *arguments: Any) -> Engine:
    """Call `load` on a thread that does not delay the end of the process, as one of asyncio's own would."""
    context = contextvars.copy_context()

    def loaded() -> Engine:
        with long_work():
            return context.run(load, *arguments)

    return await asyncio.wrap_future(_loader().submit(loaded))


@cache
def _loader() -> Background:
    return Background(1, "precedent-loading")


in_forked_processes(_loader.cache_clear)
