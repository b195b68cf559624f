"""A hook over a store in memory whose searches are done at once, in workers that hand over what SGLang's does."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
from helpers.services import store
from helpers.sglang_worker import Scheduler, worker_of

from precedent.cache import SpeculationCache
from precedent.runtime.inline_executor import AtOnce
from precedent.service import DraftingService
from precedent.testing.embedders import HashEmbedder
from precedent.testing.scripted_model import scripted_tokenizer
from precedent_sglang.hook import SAME, Hook
from precedent_sglang.settings import Settings

ORDER = [40, 41, 42, 43, 44, 45, 46, 47, 48, 49, 2]
REFUND = [50, 51, 52, 53, 54, 2]


@pytest.fixture(scope="session")
def tokenizer() -> Any:
    return scripted_tokenizer()


@pytest.fixture
def cache() -> Iterator[SpeculationCache]:
    with SpeculationCache.open(None, embedder=HashEmbedder()) as opened:
        yield opened


@pytest.fixture
def service(cache: SpeculationCache, tokenizer: Any) -> Iterator[DraftingService]:
    with DraftingService.open(cache, tokenizer, cost=SAME, executor=AtOnce(), context_length=256) as opened:
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
