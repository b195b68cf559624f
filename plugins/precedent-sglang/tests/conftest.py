"""A hook over a store in memory, in workers that hand over what SGLang's does."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
from helpers.services import cache, store, tokenizer
from helpers.sglang_fakes import Scheduler, worker_of

from precedent.cache import SpeculationCache
from precedent.runtime.background import AtOnce
from precedent_engines import DraftingService
from precedent_sglang.hook import SAME, Hook
from precedent_sglang.settings import Settings

__all__ = ["cache", "tokenizer"]  # fixtures

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
