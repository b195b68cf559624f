"""A drafter over a store in memory whose searches are done at once, for batches of plain arrays."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
from helpers.services import FREE
from helpers.vllm_batch import CONTEXT, SECRET, FakeVllm, config

from precedent.cache import SpeculationCache
from precedent.runtime.inline_executor import AtOnce
from precedent.service import DraftingService
from precedent.testing.embedders import HashEmbedder
from precedent.testing.scripted_model import scripted_tokenizer
from precedent_vllm import Drafter
from precedent_vllm.settings import Settings


@pytest.fixture(scope="session")
def tokenizer() -> Any:
    return scripted_tokenizer()


@pytest.fixture
def cache() -> Iterator[SpeculationCache]:
    with SpeculationCache.open(None, embedder=HashEmbedder()) as opened:
        yield opened


@pytest.fixture
def service(cache: SpeculationCache, tokenizer: Any) -> Iterator[DraftingService]:
    with DraftingService.open(cache, tokenizer, cost=FREE, executor=AtOnce(), context_length=CONTEXT) as opened:
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
