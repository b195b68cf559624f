"""A hook and clients over a store in memory, in workers that hand over what SGLang's does, and of servers like it."""

from __future__ import annotations

import zlib
from collections.abc import Callable, Iterator
from typing import Any

import pytest
from helpers.services import cache, store, tokenizer
from helpers.sglang_fakes import FakeSGLangServer, Scheduler, worker_of

from precedent.cache import Completion, SpeculationCache, tokenizer_fingerprint
from precedent.runtime.background import AtOnce
from precedent_engines import DraftingService
from precedent_sglang import Corpora, SGLangServer
from precedent_sglang.hook import SAME, Hook
from precedent_sglang.settings import Settings
from precedent_testing.scripted_model import scripted_tokenizer

__all__ = ["cache", "tokenizer"]  # fixtures

FINGERPRINT = tokenizer_fingerprint(scripted_tokenizer())

Put = Callable[..., int]

ORDER = [40, 41, 42, 43, 44, 45, 46, 47, 48, 49, 2]
REFUND = [50, 51, 52, 53, 54, 2]


@pytest.fixture
def service(cache: SpeculationCache, tokenizer: Any) -> Iterator[DraftingService]:
    with DraftingService(cache, tokenizer, cost=SAME, executor=AtOnce(), context_length=256) as opened:
        store(opened, ORDER)
        store(opened, REFUND, tenant="south")
        yield opened


@pytest.fixture
def hook(service: DraftingService) -> Iterator[Hook]:
    made = Hook(Settings(tenant="north"), service, lambda ids: "an order")
    yield made
    made.close()


@pytest.fixture
def schedule(hook: Hook) -> Callable[..., Scheduler]:
    """Makes a scheduler whose worker drafts through the hook."""
    return lambda **how: Scheduler(worker_of(hook, **how))


@pytest.fixture
def put(cache: SpeculationCache) -> Put:
    """Stores an answer of as many tokens as words."""

    def insert(text: str, query: str = "an order", tenant: str = "north", tokenizer: str = FINGERPRINT) -> int:
        ids = tuple(3 + zlib.crc32(word.encode()) % 40_000 for word in text.split())
        return cache.insert(Completion(ids, tokenizer=tokenizer, model="", tenant=tenant, query=query, text=text))

    return insert


@pytest.fixture
def fake() -> FakeSGLangServer:
    return FakeSGLangServer()


@pytest.fixture
def connect(cache: SpeculationCache, fake: FakeSGLangServer) -> Iterator[Callable[..., Corpora]]:
    """Opens clients of the fake server; all are closed after the test."""
    opened: list[Corpora] = []

    def client(server: FakeSGLangServer = fake, key: str | None = None, **how: Any) -> Corpora:
        how = {"tenant": "north", "max_tokens": 100, "pause": 0.0, **how}
        http = SGLangServer("http://sglang", transport=server.transport, api_key=key)
        opened.append(Corpora(http, cache, scripted_tokenizer(), **how))
        return opened[-1]

    yield client
    for corpora in opened:
        corpora.close()
