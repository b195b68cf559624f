"""Which engine a chat model runs on: weights outlive the chat model objects that LangChain re-creates."""

from __future__ import annotations

import asyncio
import contextvars
import uuid
import weakref
from collections.abc import Callable, Hashable, Iterable
from dataclasses import dataclass, fields, replace
from functools import cache
from typing import TYPE_CHECKING, Any, Self

from precedent.cache import SpeculationCache
from precedent.cache.store.store_url import Place, place_of
from precedent.engine.sharing import key_of
from precedent.errors import UnsupportedError
from precedent.runtime.background import Background, long_work
from precedent.runtime.process import Lock, computing, in_forked_processes

if TYPE_CHECKING:
    from precedent.engine.engine import Engine

_LOADING, _NOTING = Lock(), Lock()
_RUNNING: weakref.WeakSet[Engine] = weakref.WeakSet()
"""Engines that a chat model has used: those that a call may choose by name."""

_HOLDERS: weakref.WeakSet[EngineHolder] = weakref.WeakSet()
"""Who may hold an engine that is to be let go."""

_OPEN_CACHES: weakref.WeakValueDictionary[Hashable, SpeculationCache] = weakref.WeakValueDictionary()

in_forked_processes(_RUNNING.clear)
in_forked_processes(_OPEN_CACHES.clear)


@dataclass(frozen=True, slots=True)
class EngineSettings:
    """What an engine is built from; equal settings share one."""

    model: str
    draft_model: Any = None
    speculation_cache: Any = None
    embedder: Any = None
    device: str | None = None
    draft_device: str | None = None
    dtype: str | None = None
    model_kwargs: dict[str, Any] | None = None
    bitwise: bool | None = None
    cuda_graphs: bool | None = None
    pearl: bool | None = None
    tensor_parallel: bool | None = None

    def __post_init__(self) -> None:
        object.__setattr__(self, "speculation_cache", cache_or_place(self.speculation_cache))

    def key(self) -> Hashable:
        """Names and paths by value, objects by identity."""
        return key_of([getattr(self, field.name) for field in fields(self)])


class EngineHolder:
    """The engines of one chat model and of all copies made of it.

    Copies share the holder, so an engine loaded for a short-lived copy stays loaded. `identity` is empty for models
    loaded by name, else unique: two sets of weights of one name must not be taken for each other.
    """

    def __init__(self, *, engine: Engine | None = None, weights: tuple[Any, Any] | None = None) -> None:
        self._given, self._weights = engine, weights
        self._engines: dict[Hashable, Engine] = {}
        self._said: set[str] = set()
        self.identity = uuid.uuid4().hex if engine is not None or weights is not None else ""
        with _NOTING:
            _HOLDERS.add(self)
        if engine is not None:
            _note(engine)

    def __copy__(self) -> Self:
        return self

    def __deepcopy__(self, memo: dict[int, Any]) -> Self:
        return self

    def __reduce__(self) -> tuple[type[Self], tuple[()]]:
        """Pickled without engines: what is loaded by name is loaded where it arrives. Raises UnsupportedError."""
        if self.identity:
            raise UnsupportedError(
                "a chat model made by from_model or from_engine cannot be pickled, for weights stay in their process: "
                "pass model=NAME, and it is loaded where it arrives"
            )
        return type(self), ()

    def once(self, say: Callable[[str], None], text: str) -> None:
        """Say something the first time only, by whichever copy."""
        if text not in self._said:
            self._said.add(text)
            say(text)

    def loaded(self, settings: EngineSettings) -> Engine | None:
        """The engine if it is there already."""
        return self._given or self._engines.get(settings.key())

    def get(self, settings: EngineSettings) -> Engine:
        """The engine, loaded on first use. Raises ModelLoadError, UnsupportedError, ConfigError or CacheError."""
        engine = self.loaded(settings)  # asked without the lock: what runs does not wait while another one is loaded
        if engine is None:
            with _LOADING:
                engine = self.loaded(settings) or self._engines.setdefault(settings.key(), self._load(settings))
        return engine

    def check_drafters(self, names: Iterable[str]) -> None:
        """Raise ConfigError, with the near one, for a drafter that is neither installed nor added to the engine."""
        from precedent.drafters import check_known

        check_known(names, () if self._given is None else self._given.drafters)

    def unload(self, settings: EngineSettings) -> None:
        """Close the engine if there is one, and let everyone forget it, so that its weights go.

        Raises UnsupportedError for an engine or weights that somebody else holds.
        """
        if self._given is not None:
            raise UnsupportedError("this model runs on an engine that you hold: close that one with engine.close()")
        if self._weights is not None:
            raise UnsupportedError("these weights are yours: they go when you let go of the model and of this object")
        with _LOADING:
            engine = self._engines.get(settings.key())
            for holder in _holders():
                holder._forget(engine)
        if engine is not None:
            from precedent.runtime.device_memory import give_back

            engine.close()
            del engine
            give_back()

    def _forget(self, engine: Engine | None) -> None:
        self._engines = {key: one for key, one in self._engines.items() if one is not engine}

    def other(self, settings: EngineSettings, name: str) -> Engine:
        """The running engine of another model: that of else equal settings, or the only one of this name.

        Raises UnsupportedError when there is none or the name does not say which.
        """
        engine = self._engines.get(replace(settings, model=name).key())
        running = _running()
        found = [engine] if engine else [engine for engine in running if engine.model_name == name]
        if len(found) == 1:
            return found[0]
        if found:
            raise UnsupportedError(
                f"model={name!r} names {len(found)} loaded engines: make a chat model on one of them"
            )
        loaded = ", ".join(sorted({engine.model_name for engine in running})) or "none"
        raise UnsupportedError(
            f"model={name!r} is not loaded, and a call loads nothing (loaded: {loaded}): make a ChatPrecedent for it"
        )

    @computing()  # what is imported now could not be imported in a process that another thread forks meanwhile
    def _load(self, settings: EngineSettings) -> Engine:
        from precedent.engine.shared import shared_engine

        target, tokenizer = self._weights or (settings.model, None)
        engine = shared_engine(
            target,
            tokenizer=tokenizer,
            draft_model=settings.draft_model,
            device=settings.device,
            draft_device=settings.draft_device,
            dtype=settings.dtype,
            model_kwargs=settings.model_kwargs,
            bitwise=bool(settings.bitwise),
            cuda_graphs=bool(settings.cuda_graphs),
            pearl=settings.pearl,
            tensor_parallel=bool(settings.tensor_parallel),
            cache=_opened(settings.speculation_cache, settings.embedder),
        )
        _note(engine)
        return engine


async def load_beside(load: Callable[..., Engine], *settings: Any) -> Engine:
    """What `load` returns, from a thread that a process which ends does not wait for, as it would for asyncio's own."""
    call = contextvars.copy_context().run
    return await asyncio.wrap_future(_loader().submit(_load_at_length, call, load, *settings))


def _load_at_length(call: Callable[..., Engine], *arguments: Any) -> Engine:
    with long_work():
        return call(*arguments)


@cache
def _loader() -> Background:
    return Background(1, "precedent-loading")


in_forked_processes(_loader.cache_clear)


def _note(engine: Engine) -> None:
    with _NOTING:
        _RUNNING.add(engine)


def _holders() -> list[EngineHolder]:
    with _NOTING:
        return list(_HOLDERS)


def _running() -> list[Engine]:
    with _NOTING:
        return list(_RUNNING)


def cache_or_place(cache: Any) -> SpeculationCache | Place | None:
    """An open cache as it is, else where one lies: a URL keeps its password to itself. Raises ConfigError."""
    return cache if isinstance(cache, SpeculationCache) else place_of(cache)


def _opened(cache: SpeculationCache | Place | None, embedder: Any) -> SpeculationCache | None:
    """The cache itself, or the one of this place, which all engines of the process share."""
    if cache is None or isinstance(cache, SpeculationCache):
        return cache
    key = key_of([cache, embedder])
    opened = _OPEN_CACHES.get(key)
    if opened is None:
        opened = _OPEN_CACHES[key] = SpeculationCache.open(cache, embedder=embedder)
    return opened
