"""A drafter over a store in memory whose searches are done at once, for batches of plain arrays."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from helpers.services import FREE, cache, store, tokenizer
from helpers.vllm_fakes import (
    ANSWER,
    CONTEXT,
    ORDER,
    REFUND,
    SECRET,
    FakeRunner,
    FakeServer,
    FakeVllm,
    Wrap,
    closed,
    config,
)

from precedent.cache import SpeculationCache
from precedent.runtime.background import AtOnce
from precedent_engines import DraftingService
from precedent_server.keys import add_key
from precedent_testing.embedders import HashEmbedder
from precedent_testing.scripted_model import scripted_tokenizer
from precedent_vllm import Drafter, Middleware
from precedent_vllm.settings import Settings

__all__ = ["cache", "tokenizer"]  # fixtures


@pytest.fixture
def service(cache: SpeculationCache, tokenizer: Any) -> Iterator[DraftingService]:
    with DraftingService(cache, tokenizer, cost=FREE, executor=AtOnce(), context_length=CONTEXT) as opened:
        yield opened


@pytest.fixture
def drafter(service: DraftingService) -> Iterator[Drafter]:
    made = Drafter(config(), FakeVllm(), Settings(secret=SECRET), service)
    yield made
    made.close()


@pytest.fixture
def make(service: DraftingService) -> Callable[..., Drafter]:
    """Makes drafters of other settings over the same service."""

    def made(vllm: FakeVllm | None = None, settings: Settings | None = None, **parts: Any) -> Drafter:
        return Drafter(config(**parts), vllm or FakeVllm(), settings or Settings(secret=SECRET), service)

    return made


@pytest.fixture(scope="session")
def model_folder(tmp_path_factory: pytest.TempPathFactory) -> str:
    folder = tmp_path_factory.mktemp("model")
    scripted_tokenizer().save_pretrained(folder)
    return str(folder)


@pytest.fixture
def keys(tmp_path: Path) -> dict[str, str]:
    """Keys of two tenants, by name."""
    return {
        name: add_key(tmp_path / "keys.json", name, tenant) for name, tenant in (("desk", "north"), ("lab", "south"))
    }


@pytest.fixture
def wrap(tmp_path: Path, model_folder: str) -> Iterator[Wrap]:
    """Servers behind the middleware, with a store in a file."""
    made: list[Middleware] = []

    def wrapped(*answers: list[int], finish: str | None = "stop", **settings: Any) -> tuple[Middleware, FakeServer]:
        server = FakeServer(model_folder, *(answers or (ANSWER,)), finish=finish)
        chosen = {"store": str(tmp_path / "cache.db"), "embedder": HashEmbedder(), "secret": SECRET, **settings}
        made.append(Middleware(server, Settings(**chosen)))
        return made[-1], server

    yield wrapped
    for middleware in made:
        closed(middleware)


@pytest.fixture
def runner(service: DraftingService) -> FakeRunner:
    store(service, ORDER)
    store(service, REFUND, tenant="south")
    return FakeRunner()
