"""What one replica holds and tells; knows nothing of Ray."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from contextlib import ExitStack
from types import TracebackType
from typing import Any, Self

from starlette.requests import HTTPConnection
from starlette.responses import JSONResponse
from starlette.types import ASGIApp, Receive, Scope, Send

from precedent.errors import PrecedentError
from precedent_ray.merging import gauges
from precedent_ray.reading import read_ahead
from precedent_ray.scaling import QUEUE_SECONDS
from precedent_ray.settings import Settings
from precedent_server.access import LOOPBACK
from precedent_server.app import server_app
from precedent_server.errors import DENIED, ApiError
from precedent_server.opening import opened
from precedent_server.serving import Serving


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

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._serving.places.closed = True
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
        return await self._serving.metrics_text() + gauges(self._own_figures())

    def _own_figures(self) -> dict[str, tuple[float, str]]:
        held = [served.engine.recall.held() for served in self._serving.models.values() if served.engine.recall]
        following = self._serving.following
        return {
            "precedent:queued_requests": (self._serving.places.num_taken, "Answers that run or wait."),
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
