"""Servers on scripted engines, asked over ASGI without a socket, and a place for API keys."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack, closing
from functools import partial
from pathlib import Path
from typing import Any

import httpx
import pytest

from precedent.cache import SpeculationCache
from precedent_server.app import server_app
from precedent_server.keys import KeyFile
from precedent_server.serving import Served, Serving
from precedent_server.settings import ServerLimits
from precedent_testing.embedders import HashEmbedder
from precedent_testing.scripted_model import scripted_model_engine


class Client(httpx.AsyncClient):
    """A client of one server, which is at hand as well."""

    def __init__(self, serving: Serving) -> None:
        self.serving, self.app = serving, server_app(serving)
        transport = httpx.ASGITransport(app=self.app, raise_app_exceptions=False)
        super().__init__(transport=transport, base_url="http://127.0.0.1:8000")


Serve = Callable[..., Client]


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "keys.json"


@pytest.fixture
def serve() -> Iterator[Serve]:
    """Makes a client of a server whose only model, `scripted`, follows a script."""
    with ExitStack() as held:
        yield partial(served_by, held)


@pytest.fixture(scope="module")
def client() -> Iterator[Client]:
    """A client of one server for all tests of a file; every answer of its model is "x"."""
    with ExitStack() as held:
        yield served_by(held, lambda prompt: "x")


def served_by(
    held: ExitStack,
    script: Any,
    *,
    limits: ServerLimits | None = None,
    keys: KeyFile | None = None,
    kept_steps: int = 0,
    **engine: Any,
) -> Client:
    cache = held.enter_context(SpeculationCache.open(None, embedder=HashEmbedder()))
    running = scripted_model_engine(script, name="scripted", cache=cache, **engine)
    held.callback(running.close)
    serving = held.enter_context(
        closing(
            Serving({"scripted": Served.of("scripted", running, kept_steps=kept_steps)}, limits or ServerLimits(), keys)
        )
    )
    return Client(serving)
