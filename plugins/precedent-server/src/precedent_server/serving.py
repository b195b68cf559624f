"""What a server holds: models by name, keys, places, and threads that prepare prompts. `opened` loads all of it."""

from __future__ import annotations

import asyncio
import dataclasses
import math
import threading
import time
from collections import Counter
from collections.abc import Awaitable, Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, closing, contextmanager
from contextvars import copy_context
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Literal, TypeVar

from starlette.requests import Request
from starlette.responses import Response

from precedent.cache import Bounds, SpeculationCache
from precedent.cache.store_url import Place
from precedent.engine.engine import Engine
from precedent.engine.options import EngineOptions
from precedent.errors import ConfigError
from precedent.runtime.background import Background
from precedent.runtime.device_memory import free_bytes
from precedent.target.load.loading import device_named, load_config, load_tokenizer
from precedent.target.load.source import samples_as_recommended
from precedent_server.access import ANYONE, NO_RULES, AccessRules
from precedent_server.errors import BUSY, FAILED, ApiError, stopping
from precedent_server.following import Following
from precedent_server.keys import Caller, KeyFile
from precedent_server.model_files import file_bytes
from precedent_server.models import Loader, ModelPool, Served
from precedent_server.prometheus import metric_text, prometheus_text, usage_text
from precedent_server.rate_limits import RateLimits
from precedent_server.response_store import ResponseStore
from precedent_server.settings import ServerLimits
from precedent_server.usage import KeyUsage, Owner

__all__ = ["ModelOptions", "Quota", "Route", "Served", "Serving", "named_models", "opened", "served_name"]

Result = TypeVar("Result")

IGNORED = "precedent:ignored_message_parts_total"
IGNORED_HELP = "Parts of messages that were not read."
"""The counter of parts of messages that no route reads."""

OF_MODELS = {
    "precedent:models_loaded_total": ("counter", "Models that were loaded, those at the start among them."),
    "precedent:models_unloaded_total": ("counter", "Models that were unloaded or replaced."),
    "precedent:model_bytes": ("gauge", "Bytes of the weights of loaded models."),
}
"""Series of a server's models, without labels."""

PREPARING_THREADS = 4
"""Prompts and grammars prepared at once: one that takes long holds up no others."""

SHORT_BODY = 8192
"""Bytes that are read and checked in less than a millisecond."""


class Quota:
    """Bounds what is held, of everybody and of each key; belongs to the event loop's thread."""

    def __init__(self, what: str, most: int, most_per_key: int, retry_seconds: int) -> None:
        self._what, self._retry = what, str(retry_seconds)
        self.most, self.most_per_key = most, most_per_key
        self._held = Counter[str]()

    @property
    def total(self) -> int:
        """What is held now."""
        return self._held.total()

    @contextmanager
    def held(self, name: str, number: int = 0) -> Iterator[Callable[[int], None]]:
        """Hold so much for the key called `name`, and more with what this returns, until the end of the block.

        Raises ApiError (429) where a bound is reached.
        """
        size = 0

        def add(more: int) -> None:
            nonlocal size
            of_key = self._held[name] + more > self.most_per_key
            if of_key or self.total + more > self.most:
                raise ApiError(
                    f"{'this key has' if of_key else 'there are'} too many {self._what} already: try again later",
                    status=429, kind=BUSY, code="rate_limit_exceeded", headers={"Retry-After": self._retry},
                )  # fmt: skip
            self._held[name] += more
            size += more

        try:
            add(number)
            yield add
        finally:
            self._held[name] -= size
            if not self._held[name]:
                del self._held[name]


class Serving:
    """Everything that requests share; `keys` is None for a server without keys.

    `following` keeps memory free of what other processes forget; None without a cache of a place. `cache` is that of
    models that are not loaded. `closed` says that the server is stopping. `num_ignored` counts parts of messages that
    no route reads. `rates` bounds what each key uses, and `usage` counts it.
    """

    def __init__(
        self,
        models: ModelPool | Mapping[str, Served],
        limits: ServerLimits | None = None,
        keys: KeyFile | None = None,
        following: Following | None = None,
        access: AccessRules = NO_RULES,
        cache: SpeculationCache | None = None,
    ) -> None:
        self.models = models if isinstance(models, ModelPool) else ModelPool.of(models)
        self.keys, self.following, self.access, self._cache = keys, following, access, cache
        self.limits = limits = limits or ServerLimits()
        self.started, self.started_clock = int(time.time()), time.monotonic()
        self.closed, self.num_ignored = False, 0
        self.places = Quota("requests", limits.max_queued, limits.max_queued_per_key, retry_seconds=1)
        self.uploads = Quota(
            "bytes of unfinished requests", limits.max_upload_bytes, limits.max_upload_bytes_per_key, retry_seconds=5
        )
        self.rates, self.usage = RateLimits(limits), KeyUsage(self._owners)
        self.response_store = ResponseStore(limits)
        self._threads = Background(PREPARING_THREADS, "precedent-prepare")

    @property
    def most_body_bytes(self) -> int:
        """Length of the longest body that some model can use."""
        return self.limits.most_body_bytes(self.models.longest_context)

    def cache_of(self, name: str | None = None) -> SpeculationCache | None:
        """The cache of a model, which need not be loaded, by default of the first. Raises ApiError (404)."""
        entry = self.models.known(name) if name is not None else next(iter(self.models.entries), None)
        return self._cache if entry is None or entry.instance is None else entry.instance.engine.cache

    @contextmanager
    def taken(self, name: str, number: int = 1) -> Iterator[None]:
        """Hold places for answers to the key called `name`. Raises ApiError (429, 503 when the server stops)."""
        if self.closed:
            raise stopping()
        if number > (most := min(self.places.most, self.places.most_per_key)):
            raise ApiError(f"the request asks for {number} answers, and at most {most} may run at once", param="n")
        with self.places.held(name, number):
            yield

    def take_prompt(self, caller: Caller, number: int) -> None:
        """Count the tokens of a prompt. Raises ApiError (400, 429) for more than the caller may use."""
        self.rates.take_prompt(caller, number)
        self.usage.of(caller)["prompt_tokens"] += number

    def _owners(self) -> Collection[Owner]:
        return {(ANYONE.name, ANYONE.tenant)} if self.keys is None else self.keys.owners()

    async def metrics_text(self) -> str:
        """Metrics of all models, and of keys, in Prometheus's text format."""
        instances = [entry.instance for entry in self.models.entries]
        told = prometheus_text(one.engine if one else None for one in instances) + usage_text(self.usage.counts())
        told += metric_text(IGNORED, "counter", IGNORED_HELP, self.num_ignored)
        for (name, (kind, help_text)), value in zip(OF_MODELS.items(), self.models.counts, strict=True):
            told += metric_text(name, kind, help_text, value)
        return told

    async def read(self, raw: bytes, read: Callable[[bytes], Result]) -> Result:
        """What a body says; a short one is read before a thread could wake up. Raises what `read` and `prepared` do."""
        return read(raw) if len(raw) <= SHORT_BODY else await self.prepared(partial(read, raw))

    async def prepared(self, work: Callable[[], Result], unused: Callable[[Result], object] | None = None) -> Result:
        """Do work that takes long off the event loop. Raises ApiError if it, or waiting for a thread, takes too long.

        `unused` gets the result if nobody waits for it any more.
        """
        begun = threading.Event()

        def started() -> Result:
            begun.set()
            return work()

        job = asyncio.get_running_loop().run_in_executor(self._threads, copy_context().run, started)
        try:
            async with asyncio.timeout(self.limits.prepare_seconds):
                return await asyncio.shield(job)
        except BaseException as error:
            job.add_done_callback(partial(_dispose, unused))  # it may be done already: both can end in one turn
            if not isinstance(error, TimeoutError):
                raise
            if begun.is_set():
                raise ApiError(
                    f"preparing the request took longer than {self.limits.prepare_seconds:g} seconds: "
                    "give a shorter prompt, or a simpler schema"
                ) from None
            raise ApiError(
                "other requests take long to prepare: try again later",
                status=503, kind=FAILED, headers={"Retry-After": "5"},
            ) from None  # fmt: skip

    def close(self) -> None:
        """Stop the threads, and close the engines that were loaded here; others are closed by who made them."""
        self.models.close()
        self._threads.shutdown(wait=False, cancel_futures=True)


def _dispose(unused: Callable[[Result], object] | None, job: asyncio.Future[Result]) -> None:
    """Take note of how abandoned work ended, so that asyncio does not report its error."""
    if not job.cancelled() and job.exception() is None and unused is not None:
        unused(job.result())


Route = Callable[[Serving, Caller, Request], Awaitable[Response]]


def named_models(entries: Iterable[str]) -> dict[str, str]:
    """Targets by name, of NAME=TARGET. Raises ConfigError for an entry without a name, and for a name twice."""
    found = dict[str, str]()
    for entry in entries:
        name, sign, source = entry.partition("=")
        if not (name and sign and source):
            raise ConfigError(f"--model {entry!r} must be NAME=TARGET")
        if name in found:
            raise ConfigError(f"--model {name!r} is given twice")
        found[name] = source
    return found


def served_name(target: str) -> str:
    """The name under which a single target is served: clients and metrics see no path."""
    path = Path(target).expanduser()
    if not path.exists():
        return target
    return path.resolve().stem if path.suffix == ".gguf" else path.resolve().name


@dataclass(frozen=True, slots=True)
class ModelOptions:
    """Which models are loaded when a client asks for one, and how long they stay; see `ModelPool`.

    `max_bytes` None is what the models named at the start take, and half of the memory that is free then.
    """

    folder: Path | None = None
    allowed: Sequence[str] = ()
    max_bytes: int | None = None
    keep_alive: float | None = None

    def __post_init__(self) -> None:
        if self.max_bytes is not None and self.max_bytes < 1:
            raise ConfigError(f"--max-model-bytes {self.max_bytes} must be at least 1")
        if self.keep_alive is not None and not self.keep_alive >= 0:
            raise ConfigError(f"--keep-alive {self.keep_alive} must be at least 0")


@contextmanager
def opened(
    models: Mapping[str, str],
    options: EngineOptions,
    limits: ServerLimits,
    *,
    more: ModelOptions | None = None,
    cache: Place | None = None,
    bounds: Bounds | None = None,
    keys: KeyFile | None = None,
    access: AccessRules = NO_RULES,
    kept_steps: int = 0,
    sampling: Literal["model", "precedent"] | None = None,
    loading: Callable[[str], object] = lambda target: None,
) -> Iterator[Serving]:
    """Models by name on engines of these options, over one cache that follows its store; all closed at the end.

    Names of one target share its engine. Of several targets each is looked for before the first is loaded. `more` says
    which others may be loaded later. `bounds` are those of the cache. `sampling` "model" gives requests that name no
    settings those that the checkpoint recommends, "precedent" OpenAI's; None chooses by the target's name. `loading` is
    told each target before it is loaded at the start. Raises what `Engine.load` and `SpeculationCache.open` do, and
    ConfigError for bounds without a cache.
    """
    if bounds is not None and cache is None:
        raise ConfigError("--max-cache-bytes, --max-tenant-bytes and --max-age bound a cache: give --cache as well")
    more = more or ModelOptions()
    targets = {_place(target): target for target in models.values()}
    if len(targets) > 1:
        for target in targets.values():
            load_config(target)
            load_tokenizer(target)
    with ExitStack() as held:
        following, shared = None, None
        if cache is not None:
            given = dataclasses.asdict(bounds or Bounds())
            shared = held.enter_context(SpeculationCache.open(cache, embedder=options.embedder, **given))
            following = held.enter_context(Following(shared))
            options = dataclasses.replace(options, cache=shared, embedder=None)

        def load(target: str, names: Sequence[str]) -> dict[str, Served]:
            engine = Engine.load(target, options, name=names[0])
            defaults = engine.sampling_defaults if samples_as_recommended(target, sampling) else {}
            first = Served.of(names[0], engine, kept_steps=kept_steps, sampling=defaults)
            return {name: dataclasses.replace(first, name=name) for name in names}

        device = device_named(None if options.device == "auto" else options.device)
        pool = ModelPool(
            Loader(load, size=partial(file_bytes, device=device)), folder=more.folder, allowed=more.allowed,
            max_bytes=math.inf if more.max_bytes is None else more.max_bytes, keep_alive=more.keep_alive,
        )  # fmt: skip
        serving = held.enter_context(closing(Serving(pool, limits, keys, following, access=access, cache=shared)))
        for name, target in models.items():
            pool.add(name, target, key=_place(target))
        pool.scan()
        pool.preload(loading)
        if more.max_bytes is None:
            pool.max_bytes = pool.bytes + free_bytes(device) // 2
        yield serving


def _place(target: str) -> str:
    """What tells that two targets are one: a folder or file may be written in several ways."""
    path = Path(target).expanduser()
    return str(path.resolve()) if path.exists() else target
