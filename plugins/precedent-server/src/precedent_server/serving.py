"""What a server holds: models by name, keys, places, and threads that prepare prompts. `opened` loads all of it."""

from __future__ import annotations

import asyncio
import dataclasses
import threading
import time
from collections import Counter
from collections.abc import Awaitable, Callable, Collection, Iterable, Iterator, Mapping
from contextlib import ExitStack, closing, contextmanager
from contextvars import copy_context
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from types import MappingProxyType
from typing import Any, Literal, TypeVar

from starlette.requests import Request
from starlette.responses import Response

from precedent.cache import Bounds, SpeculationCache
from precedent.cache.store_url import Place
from precedent.engine.engine import Engine
from precedent.engine.options import EngineOptions
from precedent.errors import ConfigError
from precedent.langchain.chat_model import ChatPrecedent
from precedent.runtime.background import Background
from precedent.runtime.plain_values import shown
from precedent.target.load.loading import load_config, load_tokenizer
from precedent.target.load.source import samples_as_recommended
from precedent_server.access import ANYONE, NO_RULES, AccessRules
from precedent_server.errors import BUSY, FAILED, ApiError, stopping
from precedent_server.following import Following
from precedent_server.keys import Caller, KeyFile
from precedent_server.microscope import Microscope
from precedent_server.prometheus import metric_text, prometheus_text, usage_text
from precedent_server.rate_limits import RateLimits
from precedent_server.response_store import ResponseStore
from precedent_server.settings import ServerLimits
from precedent_server.usage import KeyUsage, Owner

Result = TypeVar("Result")

IGNORED = "precedent:ignored_message_parts_total"
IGNORED_HELP = "Parts of messages that were not read."
"""The counter of parts of messages that no route reads."""

PREPARING_THREADS = 4
"""Prompts and grammars prepared at once: one that takes long holds up no others."""

LATEST = ":latest"
"""Ollama's tag for a name without one."""

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


class Serving:
    """Everything that requests share; `keys` is None for a server without keys.

    `following` keeps memory free of what other processes forget; None without a cache of a place. `closed` says that
    the server is stopping. `num_ignored` counts parts of messages that no route reads, `most_body_bytes` is the length
    of the longest body that some model can use. `rates` bounds what each key uses, and `usage` counts it.
    """

    def __init__(
        self,
        models: Mapping[str, Served],
        limits: ServerLimits | None = None,
        keys: KeyFile | None = None,
        following: Following | None = None,
        access: AccessRules = NO_RULES,
    ) -> None:
        self.models, self.keys, self.following, self.access = models, keys, following, access
        self.limits = limits = limits or ServerLimits()
        self.started, self.started_clock = int(time.time()), time.monotonic()
        self.closed, self.num_ignored = False, 0
        self.most_body_bytes = limits.most_body_bytes(
            max((one.engine.context_length for one in models.values()), default=0)
        )
        self.places = Quota("requests", limits.max_queued, limits.max_queued_per_key, retry_seconds=1)
        self.uploads = Quota(
            "bytes of unfinished requests", limits.max_upload_bytes, limits.max_upload_bytes_per_key, retry_seconds=5
        )
        self.rates, self.usage = RateLimits(limits), KeyUsage(self._owners)
        self.response_store = ResponseStore(limits)
        self._threads = Background(PREPARING_THREADS, "precedent-prepare")

    def model(self, name: str) -> Served:
        """The model of a request; `:latest` may be left out and added. Raises ApiError (404) for another name."""
        for known in (name, f"{name}{LATEST}", name.removesuffix(LATEST)):
            if known in self.models:
                return self.models[known]
        raise ApiError(
            f"no model {shown(name)} is served here; models: {', '.join(self.models)}",
            status=404, param="model", code="model_not_found",
        )  # fmt: skip

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
        ignored = metric_text(IGNORED, "counter", IGNORED_HELP, self.num_ignored)
        engines = {id(served.engine): served.engine for served in self.models.values()}  # aliases share one
        return prometheus_text(engines.values()) + usage_text(self.usage.counts()) + ignored

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
        """Stop the threads; engines are closed by who made them."""
        self._threads.shutdown(wait=False, cancel_futures=True)


def _dispose(unused: Callable[[Any], object] | None, job: asyncio.Future[Any]) -> None:
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


@contextmanager
def opened(
    models: Mapping[str, str],
    options: EngineOptions,
    limits: ServerLimits,
    *,
    cache: Place | None = None,
    bounds: Bounds | None = None,
    keys: KeyFile | None = None,
    access: AccessRules = NO_RULES,
    kept_steps: int = 0,
    sampling: Literal["model", "precedent"] | None = None,
    loading: Callable[[str], object] = lambda target: None,
) -> Iterator[Serving]:
    """Models by name on engines of these options, over one cache that follows its store; all closed at the end.

    Names of one target share its engine. Of several targets each is looked for before the first is loaded. `bounds`
    are those of the cache. `sampling` "model" gives requests that name no settings those that the checkpoint
    recommends, "precedent" OpenAI's; None chooses by the target's name. `loading` is told each target before it is
    loaded. Raises what `Engine.load` and `SpeculationCache.open` do, and ConfigError for bounds without a cache.
    """
    if bounds is not None and cache is None:
        raise ConfigError("--max-cache-bytes, --max-tenant-bytes and --max-age bound a cache: give --cache as well")
    targets = {_place(target): target for target in models.values()}
    if len(targets) > 1:
        for target in targets.values():
            load_config(target)
            load_tokenizer(target)
    with ExitStack() as held:
        following = None
        if cache is not None:
            given = dataclasses.asdict(bounds or Bounds())
            shared = held.enter_context(SpeculationCache.open(cache, embedder=options.embedder, **given))
            following = held.enter_context(Following(shared))
            options = dataclasses.replace(options, cache=shared, embedder=None)
        served, engines = dict[str, Served](), dict[str, Engine]()
        for name, target in models.items():
            place = _place(target)
            if place not in engines:
                loading(target)
                engines[place] = held.enter_context(closing(Engine.load(target, options, name=name)))
            engine = engines[place]
            defaults = engine.sampling_defaults if samples_as_recommended(target, sampling) else {}
            served[name] = Served.of(name, engine, kept_steps=kept_steps, sampling=defaults)
        yield held.enter_context(closing(Serving(served, limits, keys, following, access=access)))


def _place(target: str) -> str:
    """What tells that two targets are one: a folder or file may be written in several ways."""
    path = Path(target).expanduser()
    return str(path.resolve()) if path.exists() else target
