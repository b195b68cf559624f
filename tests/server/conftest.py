"""Servers on scripted engines, asked over ASGI without a socket, and a place for API keys."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import httpx
import pytest

from precedent.cache import SpeculationCache
from precedent.server.app import server_app
from precedent.server.serving import Served, Serving
from precedent.server.settings import ServerLimits
from precedent.testing.embedders import HashEmbedder
from precedent.testing.scripted_model import scripted_model_engine

Client = httpx.AsyncClient
Serve = Callable[..., Client]


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "keys.json"


@pytest.fixture
def serve() -> Iterator[Serve]:
    """Makes a client of a server whose only model, `scripted`, follows a script."""
    with ExitStack() as held:

        def make(script: Any, *, limits: ServerLimits | None = None, keys: Any = None, **engine: Any) -> Client:
            cache = held.enter_context(SpeculationCache.open(None, embedder=HashEmbedder()))
            running = scripted_model_engine(script, name="scripted", cache=cache, **engine)
            held.callback(running.close)
            serving = Serving({"scripted": Served.of("scripted", running)}, limits or ServerLimits(), keys)
            held.callback(serving.close)
            transport = httpx.ASGITransport(app=server_app(serving), raise_app_exceptions=False)
            client = Client(transport=transport, base_url="http://127.0.0.1:8000")
            client.serving = serving  # type: ignore[attr-defined]
            return client

        yield make
