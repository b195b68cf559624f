"""Models of a server by name: loaded when they are asked for, within a memory budget, and unloaded when idle.

A `ModelPool` belongs to the event loop's thread; one thread of its own loads and closes engines, one at a time.
"""

from __future__ import annotations

import asyncio
import gc
import logging
import math
import sys
import threading
import time
import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from types import MappingProxyType
from typing import Any, Literal, Self, TypeVar

from precedent.engine.engine import Engine
from precedent.errors import ConfigError, PrecedentError
from precedent.langchain.chat_model import ChatPrecedent
from precedent.runtime.background import Background, long_work
from precedent.runtime.plain_values import in_one_line, shown
from precedent_server.errors import FAILED, ApiError, api_error, stopping
from precedent_server.microscope import Microscope
from precedent_server.model_files import Stamp, allowed_model, file_bytes, models_in, spellings, stamp_of, weight_bytes

log = logging.getLogger(__name__)

Result = TypeVar("Result")

ON_DEMAND_SECONDS = 300.0
"""How long an idle model that a client asked for stays loaded by default, as with Ollama."""

RETRY_SECONDS = 5

GIGABYTE = 10**9

RELEASE_CHECKS, RELEASE_SECONDS = 10, 0.05
"""How often, and how long apart, a closed engine is looked at before garbage is collected."""


@dataclass(frozen=True, slots=True)
class Served:
    """One model under its name; `sampling` are the settings of requests that give none."""

    name: str
    engine: Engine
    chat: ChatPrecedent
    sampling: Mapping[str, Any]
    microscope: Microscope | None = None

    @classmethod
    def of(
        cls, name: str, engine: Engine, *, kept_steps: int = 0, sampling: Mapping[str, Any] = MappingProxyType({})
    ) -> Served:
        """An engine as a chat model, which keeps so many steps for administrators to look at.

        `sampling` replaces OpenAI's default of temperature 1.
        """
        microscope = Microscope(kept_steps) if kept_steps else None
        if microscope is not None:
            engine.watch_steps(microscope)
        chat = ChatPrecedent.from_engine(engine, sampling="precedent")  # a request brings its settings
        return cls(name, engine, chat, {"temperature": 1.0, **sampling}, microscope)

    def settings_of(self, given: Mapping[str, Any], most_tokens: int) -> dict[str, Any]:
        """The settings of a request, completed by the defaults: an answer has `most_tokens`, as far as they fit."""
        most = {"max_tokens": min(most_tokens, self.engine.context_length)}
        return most | dict(self.sampling) | dict(given)


def collect_closed(gone: weakref.ref[Engine]) -> None:
    """Collect an engine that cycles of references hold, also if a server froze its objects; all streams pause."""
    for _ in range(RELEASE_CHECKS):
        if gone() is None:  # its last request lets go of it a moment after it was released
            return
        time.sleep(RELEASE_SECONDS)
    frozen = gc.get_freeze_count()
    gc.unfreeze()
    gc.collect()
    if frozen:
        gc.freeze()


@dataclass(frozen=True, slots=True)
class Loader:
    """Functions that load a target and look at its files; all may take long and run on a thread.

    - `load`: starts one engine of a target and serves it under each of the names.
    - `size`: bytes that a target will take in memory, by its files; 0 if they do not tell.
    - `held`: bytes of a loaded engine's weights; 0 if it does not tell.
    - `stamp`: the target's files and when they changed.
    - `collect`: frees the memory of a closed engine that references still hold.
    """

    load: Callable[[str, Sequence[str]], Mapping[str, Served]]
    size: Callable[[str], int] = file_bytes
    held: Callable[[Engine], int] = weight_bytes
    stamp: Callable[[str], Stamp] = stamp_of
    collect: Callable[[weakref.ref[Engine]], None] = collect_closed


@dataclass(eq=False, slots=True)
class Instance:
    """A loaded engine under the names of its entry, and the leases that use it now.

    `retired`: no new request gets it, and it closes after the last one. `outdated`: its files have changed, and there
    was no memory for two at once. `fixed`: its engine was handed over loaded; it is neither unloaded nor closed here.
    """

    served: Mapping[str, Served]
    size: int
    stamp: Stamp
    keep_alive: float
    used: float
    leases: int = 0
    retired: bool = False
    outdated: bool = False
    fixed: bool = False

    @property
    def engine(self) -> Engine:
        """The engine that all names share."""
        return next(iter(self.served.values())).engine

    def under(self, name: str) -> Served:
        """The model under a name of it, however a client spells it."""
        found = (self.served[one] for one in spellings(name) if one in self.served)
        return next(found, next(iter(self.served.values())))

    @property
    def expires(self) -> float:
        """The time, on the pool's clock, at which it is unloaded if nobody asks it before."""
        return math.inf if self.fixed else self.used + self.keep_alive


@dataclass(eq=False, slots=True)
class Entry:
    """A model that may be loaded, under one or several names. `origin` says who named it.

    "named" are those of the command line, "folder" those of `--model-dir`, "allowed" those that a client asked for by a
    name that `--allow-load` permits. `waiting` counts requests that wait for it, `fault` says why it could not be
    loaded anew.
    """

    target: str
    names: list[str]
    origin: Literal["named", "folder", "allowed"]
    instance: Instance | None = None
    loading: asyncio.Task[None] | None = None
    waiting: int = 0
    fault: str = ""


class Lease:
    """A request's hold on a model: `with pool.lease(name) as lease:`. The model stays loaded until the block ends.

    `ready` is the model if it is loaded already; otherwise `await lease.model()` waits for it.
    """

    def __init__(self, pool: ModelPool, name: str, keep_alive: float | None) -> None:
        self._pool, self._name, self._keep_alive = pool, name, keep_alive
        self._instance: Instance | None = None
        self.ready: Served | None = None

    async def model(self) -> Served:
        """The model, loaded if need be. Raises ApiError: 404, 400 and 503 as `ModelPool` says, 500 if loading fails."""
        if self.ready is None:
            entry = await self._pool.find(self._name)
            entry.waiting += 1
            try:
                instance = await self._pool.loaded(entry)
            finally:
                entry.waiting -= 1
                self._pool.forget_unused(entry)
            self._take(instance)
        assert self.ready is not None
        return self.ready

    def _take(self, instance: Instance) -> None:
        instance.leases += 1
        if self._keep_alive is not None:
            instance.keep_alive = self._keep_alive
        self._instance, self.ready = instance, instance.under(self._name)

    def __enter__(self) -> Self:
        entry = self._pool.known(self._name)
        if entry is not None and entry.instance is not None:
            self._take(entry.instance)
        return self

    def __exit__(self, *_: object) -> None:
        if self._instance is not None:
            self._instance.leases -= 1
            self._pool.released(self._instance)


class ModelPool(Mapping[str, Served]):
    """Models by name, as a mapping of those that are loaded; `lease` gives any other as well, once it is loaded.

    Weights take at most `max_bytes`: before a load, models without requests are unloaded, least recently used first. A
    model with requests never is: the caller gets 503 with `Retry-After`. One that is larger than the budget is refused
    with 400. An idle model is unloaded after `keep_alive` seconds (None: `ON_DEMAND_SECONDS`, and
    never for those named on the command line), or what the last request that said so gave.

    Clients can have loaded: names that were added, models in `folder`, and models of other programs and of the hub's
    cache under names that match one of the patterns `allowed`. Other names are refused with 404, whatever exists.
    Nothing is downloaded.
    """

    def __init__(
        self,
        loader: Loader | None = None,
        *,
        folder: Path | None = None,
        allowed: Sequence[str] = (),
        max_bytes: float = math.inf,
        keep_alive: float | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.max_bytes, self.allowed, self.num_loaded, self.num_unloaded = max_bytes, tuple(allowed), 0, 0
        self._loader, self._folder, self._keep_alive, self._clock = loader, folder, keep_alive, clock
        self._entries = dict[str, Entry]()
        self._names = dict[str, Entry]()
        self._retired = set[Instance]()
        self._turn, self._reloading = asyncio.Lock(), asyncio.Lock()
        self._timer: asyncio.TimerHandle | None = None
        self._tasks = set[asyncio.Task[None]]()
        self._gate, self._engines, self._closed = threading.Lock(), set[Engine](), False
        self._thread = Background(1, "precedent-load")

    @classmethod
    def of(cls, models: Mapping[str, Served]) -> ModelPool:
        """Models that are loaded already and stay so; who loaded them closes them. Names of one engine are aliases."""
        pool = cls()
        for name, served in models.items():
            key = f"engine {id(served.engine)}"
            entry = pool.add(name, name, key=key)
            others = {} if entry.instance is None else entry.instance.served
            size = weight_bytes(served.engine)
            entry.instance = Instance({**others, name: served}, size, (), math.inf, pool._clock(), fixed=True)
        return pool

    # Names

    def add(
        self, name: str, target: str, *, origin: Literal["named", "folder", "allowed"] = "named", key: str | None = None
    ) -> Entry:
        """Add a name of a target, without loading it; names of one `key` share an engine."""
        entry = self._entries.setdefault(target if key is None else key, Entry(target, [], origin))
        entry.names.append(name)
        self._names[name] = entry
        return entry

    @property
    def entries(self) -> Iterable[Entry]:
        """The models that were added or found in the folder, and those that clients had loaded."""
        return tuple(self._entries.values())

    @property
    def names(self) -> list[str] | None:
        """All names that requests may give; None if clients may have others loaded."""
        return None if self.allowed else [name for entry in self.entries for name in entry.names]

    @property
    def longest_context(self) -> int:
        """The longest context of a model, in tokens; as good as endless while some are not loaded."""
        lengths = [one.instance.engine.context_length for one in self.entries if one.instance is not None]
        return max(lengths, default=0) if len(lengths) == len(self._entries) and not self.allowed else sys.maxsize

    @property
    def counts(self) -> tuple[int, int, int]:
        """Models loaded so far and unloaded so far, and the bytes of those that are loaded."""
        return self.num_loaded, self.num_unloaded, self.bytes

    def loaded_as(self, name: str | None = None) -> Served:
        """A model that is loaded, by default the first. Raises ApiError (404)."""
        if name is None:
            name = next(iter(self), "")
        entry = self.known(name)
        if entry is None or entry.instance is None:
            raise ApiError(f"the model {shown(name)} is not loaded", status=404, param="model", code="model_not_loaded")
        return entry.instance.under(name)

    def known(self, name: str) -> Entry | None:
        """The model of a name; None if it must be looked for among allowed ones. Raises ApiError (404)."""
        for spelled in spellings(name):
            if spelled in self._names:
                return self._names[spelled]
        if not self.allowed:
            raise self._unknown(name)
        return None

    async def find(self, name: str) -> Entry:
        """The model of a name, which may be a new one that is allowed. Raises ApiError (404)."""
        if (entry := self.known(name)) is not None:
            return entry
        found = await asyncio.to_thread(allowed_model, name, self.allowed)
        if found is None:
            raise self._unknown(name)
        if found.key in self._entries:
            return self._entries[found.key]
        return self.add(found.name, found.target, origin="allowed", key=found.key)

    def _unknown(self, name: str) -> ApiError:
        names = [name for entry in self.entries if entry.origin != "allowed" for name in entry.names]
        return ApiError(
            f"no model {shown(name)} is served here; models: {', '.join((*names, *self.allowed))}",
            status=404, param="model", code="model_not_found",
        )  # fmt: skip

    def scan(self) -> None:
        """Add models that are new in the folder, and drop those that are gone once no request waits for them.

        Raises ConfigError if it cannot be read.
        """
        if self._folder is not None:
            self._found(models_in(self._folder))

    def _found(self, files: Mapping[str, Path]) -> None:
        for key, entry in list(self._entries.items()):
            name = entry.names[0]
            if entry.origin == "folder" and name not in files and not (entry.loading or entry.waiting):
                del self._entries[key], self._names[name]
                if entry.instance is not None:
                    self._retire(entry.instance)
        for name, path in files.items():
            key = str(path.resolve())
            if name not in self._names and key not in self._entries:
                self.add(name, str(path), origin="folder", key=key)

    # Requests

    def lease(self, name: str, keep_alive: float | None = None) -> Lease:
        """Hold a model for a request; afterwards it stays loaded for `keep_alive` seconds (None: as it was).

        Entering the lease raises ApiError (404) for a name that cannot be served.
        """
        return Lease(self, name, keep_alive)

    async def unload(self, name: str) -> None:
        """Unload a model after its last request, at once if it has none. Raises ApiError (404)."""
        entry = await self.find(name)
        if entry.instance is not None:
            entry.instance.keep_alive = 0.0
            self.expire()
        self.forget_unused(entry)

    async def loaded(self, entry: Entry) -> Instance:
        """Wait until a model is loaded; all that wait share one load, and one that leaves does not end it."""
        while entry.instance is None:
            load = entry.loading = entry.loading or self._start(self._load(entry))
            try:
                await asyncio.shield(load)
            except asyncio.CancelledError:
                if self._closed and load.cancelled():
                    raise stopping() from None
                raise
        return entry.instance

    def released(self, instance: Instance) -> None:
        """Take note that a lease has ended."""
        instance.used = self._clock()
        if instance.retired and not instance.leases:
            self._shut(instance)
        self.expire()

    def expire(self) -> None:
        """Unload idle models whose time is over, and set the timer for the next one."""
        for entry in self.entries:
            instance = entry.instance
            if instance is None or not self._idle(entry):
                continue
            if instance.outdated and instance.keep_alive > 0:
                entry.loading = self._start(self._load(entry))
                self._unload(entry)
            elif instance.expires <= self._clock():
                self._unload(entry)
        self.watch()

    def watch(self) -> None:
        """Set the timer by which idle models are unloaded; needs a running event loop."""
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        due = min((one.instance.expires for one in self.entries if one.instance and self._idle(one)), default=math.inf)
        if due < math.inf and not self._closed:
            wait = max(0.0, due - self._clock())
            self._timer = asyncio.get_running_loop().call_later(wait, self.expire)

    def seconds_left(self, instance: Instance) -> float:
        """Seconds until a model is unloaded if nobody asks it; of one with requests, after the last of them."""
        return instance.keep_alive if instance.leases else instance.expires - self._clock()

    def _idle(self, entry: Entry) -> bool:
        return entry.instance is not None and not entry.instance.leases and not entry.waiting

    # Loading and unloading

    def preload(self, tell: Callable[[str], object] = lambda target: None) -> None:
        """Load all models that were named, without an event loop, as far as the budget allows; the rest waits.

        Raises what loading raises, and ConfigError for a model that is larger than the budget.
        """
        assert self._loader is not None
        for entry in self.entries:
            if entry.origin != "named":
                continue
            size = 0 if self.max_bytes == math.inf else self._loader.size(entry.target)
            if size > self.max_bytes:
                raise ConfigError(
                    f"{entry.target} takes {_gigabytes(size)}, and --max-model-bytes is {_gigabytes(self.max_bytes)}"
                )
            if size + self.bytes > self.max_bytes:
                log.warning("%s is loaded when it is asked for: --max-model-bytes is reached", entry.names[0])
                continue
            tell(entry.target)
            entry.instance = self._open(entry)
            self.num_loaded += 1

    @property
    def bytes(self) -> int:
        """Bytes of all loaded engines, of those as well that are about to close."""
        held = [one.instance for one in self.entries if one.instance is not None]
        return sum(one.size for one in (*held, *self._retired))

    async def _load(self, entry: Entry) -> None:
        """Load a model when its turn comes. Raises ApiError."""
        try:
            async with self._turn:
                if entry.instance is None:
                    entry.instance = await self._loaded_anew(entry)
                    self.num_loaded += 1
        except ApiError as error:
            entry.fault = str(error) if entry.fault else ""
            raise
        finally:
            entry.loading = None
            self.forget_unused(entry)
        entry.fault = ""
        self.expire()

    async def _loaded_anew(self, entry: Entry) -> Instance:
        """A new instance, for which others made room. Raises ApiError."""
        assert self._loader is not None
        size = await self._in_thread(partial(self._loader.size, entry.target), entry)
        self._make_room(entry, size)
        log.info("loading %s", entry.names[0])
        instance = await self._in_thread(partial(self._open, entry), entry)
        try:
            self._make_room(entry, instance.size)  # files do not always tell what a model takes
        except ApiError:
            self._shut(instance)
            raise
        return instance

    async def _in_thread(self, work: Callable[[], Result], entry: Entry) -> Result:
        """Do work on the loading thread. Raises ApiError in place of other errors, which the log has."""
        try:
            return await asyncio.get_running_loop().run_in_executor(self._thread, work)
        except ApiError:
            raise
        except Exception as error:
            if self._closed:
                raise stopping() from error
            told = api_error(error)
            log.error("%s could not be loaded: %s", entry.names[0], in_one_line(error), exc_info=not _ours(error))
            if told.status >= 500:
                message = f"the model {entry.names[0]!r} could not be loaded; the server's log says why"
                told = ApiError(message, status=500, kind=FAILED)
            raise told from error

    def _open(self, entry: Entry) -> Instance:
        """Load a model, on any thread."""
        assert self._loader is not None
        stamp = self._loader.stamp(entry.target)
        with long_work():
            served = self._loader.load(entry.target, entry.names)
        engine = next(iter(served.values())).engine
        with self._gate:
            closed = self._closed
            self._engines |= set() if closed else {engine}
        if closed:
            engine.close()
            raise stopping()
        if gc.get_freeze_count():  # a server froze its objects: looking through a model's makes all streams pause
            gc.collect()
            gc.freeze()
        size = self._loader.held(engine) or self._loader.size(entry.target)
        forever = entry.origin == "named" and self._keep_alive is None
        keep_alive = math.inf if forever else ON_DEMAND_SECONDS if self._keep_alive is None else self._keep_alive
        return Instance(served, size, stamp, keep_alive, self._clock())

    def _make_room(self, entry: Entry, size: int) -> None:
        """Unload idle models, least recently used first, until `size` more bytes fit. Raises ApiError if they cannot.

        The entry's own instance, which the new one will replace, stays.
        """
        if size > self.max_bytes:
            raise ApiError(
                f"the model {entry.names[0]!r} takes {_gigabytes(size)}, more than this server gives to models: "
                f"{_gigabytes(self.max_bytes)}",
                param="model", code="model_too_large",
            )  # fmt: skip
        others = [one for one in self.entries if one is not entry and one.instance is not None]
        idle = [one for one in others if self._idle(one) and one.instance is not None and not one.instance.fixed]
        freed = sum(one.instance.size for one in idle if one.instance is not None)
        if self.bytes - freed + size > self.max_bytes:
            running = ", ".join(one.names[0] for one in others if one not in idle) or "the former version of a model"
            raise ApiError(
                f"there is no memory for the model {entry.names[0]!r} while others run ({running}): try again later",
                status=503, kind=FAILED, code="model_not_loaded", headers={"Retry-After": str(RETRY_SECONDS)},
            )  # fmt: skip
        for one in sorted(idle, key=lambda one: one.instance.used if one.instance else 0.0):
            if self.bytes + size <= self.max_bytes:
                return
            self._unload(one)

    def _unload(self, entry: Entry) -> None:
        if entry.instance is not None:
            log.info("unloading %s", entry.names[0])
            self._shut(entry.instance)
        entry.instance = None
        self.forget_unused(entry)

    def forget_unused(self, entry: Entry) -> None:
        """Drop what a client asked for once it is not loaded: its files may go, and so may others come."""
        if entry.origin == "allowed" and not (entry.instance or entry.loading or entry.waiting):
            self._entries = {key: one for key, one in self._entries.items() if one is not entry}
            self._names = {name: one for name, one in self._names.items() if one is not entry}

    def _retire(self, instance: Instance) -> None:
        """Close an instance after its last request."""
        if instance.leases:
            instance.retired = True
            self._retired.add(instance)
        else:
            self._shut(instance)

    def _shut(self, instance: Instance) -> None:
        """Close an engine on the thread, before whatever is loaded next."""
        self._retired.discard(instance)
        self.num_unloaded += 1
        if not self._closed and self._loader is not None:
            self._thread.submit(self._close_engine, instance.engine)
            self._thread.submit(self._loader.collect, weakref.ref(instance.engine))

    def _close_engine(self, engine: Engine) -> None:
        try:
            engine.close()
        except Exception:
            log.exception("an engine did not close")
        with self._gate:
            self._engines.discard(engine)

    # Reloading

    def begin_reload(self) -> None:
        """Start `reload` from a signal handler; a further one waits for it."""
        self._start(self.reload())

    async def reload(self) -> None:
        """Read the folder again, and replace loaded models whose files have changed.

        Running requests end on the old engine, new ones go to the new one. A model that cannot be loaded anew stays as
        it is, with the reason in `faults`. Where there is no memory for both, the old one is replaced when it is idle.
        """
        async with self._reloading:
            try:
                if self._folder is not None:
                    self._found(await asyncio.to_thread(models_in, self._folder))
            except ConfigError as error:
                log.warning("the list of models stays as it was: %s", error)
            for entry in self.entries:
                if entry.instance is not None and not entry.instance.fixed:
                    await self._reload(entry)
            self.expire()

    async def _reload(self, entry: Entry) -> None:
        assert self._loader is not None
        old = entry.instance
        try:
            stamp = await self._in_thread(partial(self._loader.stamp, entry.target), entry)
            if old is None or old.stamp == stamp:
                return
            async with self._turn:
                if entry.instance is old:
                    self._replace(entry, await self._loaded_anew(entry))
        except ApiError as error:
            if old is not None and entry.instance is old and error.status == 503 and not self._closed:
                old.outdated = True
                entry.fault = "changed on disk, and loaded anew when it is idle: there is no memory for both"
            else:
                entry.fault = f"changed on disk, and not loaded anew: {error}"
            log.warning("%s is %s", entry.names[0], entry.fault)

    def _replace(self, entry: Entry, new: Instance) -> None:
        """Give new requests a new instance, unless the old one was unloaded meanwhile and nobody waits."""
        old, entry.fault = entry.instance, ""
        self.num_loaded += 1
        if old is None and not entry.waiting:
            self._shut(new)
            return
        entry.instance = new
        if old is not None:
            new.keep_alive = old.keep_alive
            self._retire(old)
        log.info("%s changed on disk and was loaded anew", entry.names[0])

    @property
    def faults(self) -> dict[str, list[str]]:
        """Why models were not loaded anew, by name."""
        return {entry.names[0]: [entry.fault] for entry in self.entries if entry.fault}

    # Lifetime

    def _start(self, work: Any) -> asyncio.Task[None]:
        """Begin a load that does not end with who asked for it."""
        task: asyncio.Task[None] = asyncio.get_running_loop().create_task(work)
        self._tasks.add(task)

        def ended(task: asyncio.Task[None]) -> None:
            self._tasks.discard(task)
            if not task.cancelled():
                task.exception()  # those who wait are told

        task.add_done_callback(ended)
        return task

    def close(self) -> None:
        """Close all engines that were loaded here; one that is being loaded is closed as soon as it can be."""
        with self._gate:
            self._closed = True
            engines, self._engines = self._engines, set[Engine]()
        if self._timer is not None:
            self._timer.cancel()
        self._thread.shutdown(wait=False, cancel_futures=True)
        for engine in engines:
            engine.close()

    def __getitem__(self, name: str) -> Served:
        entry = self._names[name]
        if entry.instance is None:
            raise KeyError(name)
        return entry.instance.served[name]

    def __iter__(self) -> Iterator[str]:
        return (name for entry in self.entries if entry.instance for name in entry.names)

    def __len__(self) -> int:
        return sum(1 for _ in self)


def _ours(error: Exception) -> bool:
    return isinstance(error, PrecedentError)


def _gigabytes(size: float) -> str:
    return f"{size / GIGABYTE:.2f} GB"
