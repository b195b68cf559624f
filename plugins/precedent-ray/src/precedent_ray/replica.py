"""What one replica holds, reads before its first request, and tells, and the metrics of all; knows nothing of Ray."""

from __future__ import annotations

import logging
from collections.abc import Awaitable, Callable, Iterable, Iterator, Mapping
from contextlib import ExitStack
from time import monotonic
from typing import Any, Self

from starlette.requests import HTTPConnection
from starlette.responses import JSONResponse
from starlette.types import ASGIApp, Receive, Scope, Send

from precedent.cache import SpeculationCache, TenantStats
from precedent.drafters.recall.tenant_memory import cost
from precedent.engine.engine import Engine
from precedent.errors import CacheError, PrecedentError
from precedent_ray.scaling import QUEUE_SECONDS
from precedent_ray.settings import Settings
from precedent_server.access import LOOPBACK
from precedent_server.app import server_app
from precedent_server.errors import DENIED, ApiError
from precedent_server.prometheus import metric_text
from precedent_server.serving import Serving, opened

log = logging.getLogger("precedent.ray")


class StuckError(PrecedentError):
    """An engine that no longer gets on; its replica must be replaced."""


class Replica:
    """Models behind the server's application, and the memory that they share: `with Replica(settings, name):`."""

    def __init__(self, settings: Settings, name: str) -> None:
        self._settings, self.name = settings, name
        self._held = ExitStack()
        self._tenants_read = 0

    def __enter__(self) -> Self:
        settings = self._settings
        with ExitStack() as held:
            self._serving: Serving = held.enter_context(
                opened(settings.models, settings.options, settings.limits, cache=settings.cache, keys=settings.keys)
            )
            engines = [served.engine for served in self._serving.models.values()]
            cache = engines[0].cache
            if cache is not None:
                self._tenants_read = read_ahead(engines, cache, settings.read_ahead_seconds)
            self._held = held.pop_all()
        return self

    def __exit__(self, *_: object) -> None:
        self._serving.closed = True
        self._held.close()

    def app(self, metrics: Callable[[], Awaitable[str]]) -> Any:
        """The server's application; `metrics` tells those of all replicas."""
        made = server_app(self._serving, metrics)
        if self._serving.keys is None:
            made.add_middleware(LocalOnly)
        return made

    def check_health(self) -> None:
        """Raise StuckError, with the reason, if an engine fails: see `Engine.health`."""
        for name, served in self._serving.models.items():
            if failing := served.engine.health(self._settings.stuck_seconds).failing:
                raise StuckError(f"model {name!r}: {failing}")

    def load(self) -> dict[str, float]:
        """How long requests wait here, for the autoscaler."""
        return {QUEUE_SECONDS: max(served.engine.longest_wait() for served in self._serving.models.values())}

    async def metrics(self) -> str:
        """The server's metrics, and what concerns this replica's part in the shared memory."""
        return await self._serving.metrics_text() + "".join(
            metric_text(name, "gauge", help_text, value) for name, (value, help_text) in self._own_figures().items()
        )

    def _own_figures(self) -> dict[str, tuple[float, str]]:
        held = [served.engine.recall.held() for served in self._serving.models.values() if served.engine.recall]
        following = self._serving.following
        return {
            "precedent:queued_requests": (self._serving.places.total, "Answers that run or wait."),
            "precedent:tenants_read_ahead": (self._tenants_read, "Tenants read before the first request."),
            "precedent:completions_in_memory": (sum(number for number, _ in held), "Completions to draft from."),
            "precedent:memory_bytes": (sum(size for _, size in held), "What they take in memory, about."),
            "precedent:seconds_behind": (
                following.seconds_behind if following else 0.0,
                "Since memory last agreed with the store about what is forgotten.",
            ),
        }


class LocalOnly:
    """ASGI middleware for a deployment without keys: answers clients of the proxy's own machine, and no others.

    The server itself looks at the host's name, which keeps browsers out; another machine can send any name.
    """

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Pass a request on, or refuse it."""
        if scope["type"] == "http" and not _is_local(HTTPConnection(scope)):
            error = ApiError("without API keys only this machine is served: give api_keys", status=403, kind=DENIED)
            await JSONResponse(error.body(), status_code=error.status)(scope, receive, send)
            return
        await self._app(scope, receive, send)


def _is_local(connection: HTTPConnection) -> bool:
    return connection.client is not None and connection.client.host in LOOPBACK


def worth_reading(tenants: Iterable[TenantStats], max_bytes: int) -> Iterator[str]:
    """The tenants whose completions saved most tokens, as far as all fit into `max_bytes` of drafting memory."""
    left = max_bytes
    for one in sorted(tenants, key=lambda each: (-each.accepted, -each.tokens, each.tenant)):
        left -= cost(one.records, one.tokens)
        if left < 0:
            return
        yield one.tenant


def read_ahead(
    engines: Iterable[Engine], cache: SpeculationCache, seconds: float, *, clock: Callable[[], float] = monotonic
) -> int:
    """Read the tenants that are worth it into the engines' memories, for at most `seconds`; returns their number.

    A tenant that was begun is finished. A store that is away fails nothing: it is read when requests come.
    """
    recalls = [engine.recall for engine in engines if engine.recall is not None]
    until, number = clock() + seconds, 0
    try:
        for tenant in worth_reading(cache.stats().tenants, cache.max_index_bytes):
            if clock() >= until:
                log.info("read %d tenants ahead; the others are read with their first requests", number)
                break
            for recall in recalls:
                recall.read_ahead(tenant)
            number += 1
    except CacheError as error:
        log.warning("nothing more is read ahead, completions are read with the first requests: %s", error)
    return number


_OF_HISTOGRAMS = ("_bucket", "_sum", "_count")
"""How the names of a histogram's series end."""


def merged(texts: Mapping[str, str]) -> str:
    """Prometheus texts by replica as one, each series with the label `replica`; HELP and TYPE stand once per name.

    Nothing is added up: sums over counters of replicas that come and go are Prometheus's to make (`sum by …`).
    """
    heads: dict[str, list[str]] = {}
    series: dict[str, list[str]] = {}
    for replica, text in texts.items():
        for line in text.splitlines():
            if line.startswith("#"):
                name = line.split(" ", 3)[2]
                lines = heads.setdefault(name, [])
                lines += [line] if line not in lines else []
            elif line:
                name = line.partition("{")[0].partition(" ")[0]
                family = name.rpartition("_")[0] if name.endswith(_OF_HISTOGRAMS) else name
                name = family if family in heads else name
                series.setdefault(name, []).append(_labelled(line, replica))
    names = [*heads, *(name for name in series if name not in heads)]
    return "".join(f"{line}\n" for name in names for line in [*heads.get(name, []), *series.get(name, [])])


def _labelled(line: str, replica: str) -> str:
    label = f'replica="{replica}"'
    name, brace, rest = line.partition("{")
    if brace:
        return f"{name}{{{label},{rest}"
    name, _, value = line.partition(" ")
    return f"{name}{{{label}}} {value}"
