"""Loads what a server holds, and closes it in the right order."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import ExitStack, closing, contextmanager
from pathlib import Path
from typing import Literal

from precedent.cache import Bounds, SpeculationCache
from precedent.cache.store_url import Place
from precedent.engine.engine import Engine
from precedent.engine.options import EngineOptions
from precedent.errors import ConfigError
from precedent.target.load.loading import load_config, load_tokenizer
from precedent_server.access import NO_RULES, AccessRules
from precedent_server.following import Following
from precedent_server.keys import KeyFile
from precedent_server.serving import Served, Serving
from precedent_server.settings import ServerLimits


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
    sampling: Literal["model", "precedent"] = "precedent",
    loading: Callable[[str], object] = lambda target: None,
) -> Iterator[Serving]:
    """Models by name on engines of these options, over one cache that follows its store; all closed at the end.

    Names of one target share its engine. Of several targets each is looked for before the first is loaded. `bounds`
    are those of the cache. `sampling` "model" gives requests that name no settings those that the checkpoint
    recommends, "precedent" OpenAI's. `loading` is told each target before it is loaded. Raises what `Engine.load` and
    `SpeculationCache.open` do, and ConfigError for bounds without a cache.
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
            shared = held.enter_context(_cache(cache, options, bounds or Bounds()))
            following = held.enter_context(Following(shared))
            options = dataclasses.replace(options, cache=shared, embedder=None)
        served, engines = dict[str, Served](), dict[str, Engine]()
        for name, target in models.items():
            place = _place(target)
            if place not in engines:
                loading(target)
                engines[place] = held.enter_context(closing(Engine.load(target, options, name=name)))
            engine = engines[place]
            served[name] = Served.of(
                name, engine, kept_steps=kept_steps, sampling=engine.sampling_defaults if sampling == "model" else {}
            )
        yield held.enter_context(closing(Serving(served, limits, keys, following, access=access)))


def _place(target: str) -> str:
    """What tells that two targets are one: a folder or file may be written in several ways."""
    path = Path(target).expanduser()
    return str(path.resolve()) if path.exists() else target


def _cache(place: Place, options: EngineOptions, bounds: Bounds) -> SpeculationCache:
    return SpeculationCache.open(
        place,
        embedder=options.embedder,
        max_bytes=bounds.max_bytes,
        max_age=bounds.max_age,
        max_tenant_bytes=bounds.max_tenant_bytes,
    )
