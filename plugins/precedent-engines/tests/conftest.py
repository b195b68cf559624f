"""Services over a cache in memory whose searches are done at once, and a cost curve for which width is free."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
from helpers.services import FREE, Serve, cache, tokenizer

from precedent.cache import SpeculationCache
from precedent.runtime.background import AtOnce
from precedent_engines import DraftingService

__all__ = ["cache", "tokenizer"]  # fixtures


@pytest.fixture
def serve(cache: SpeculationCache, tokenizer: Any) -> Iterator[Serve]:
    """Opens services; all are closed after the test."""
    opened: list[DraftingService] = []

    def open_service(store: Any = cache, with_tokenizer: Any = tokenizer, **settings: Any) -> DraftingService:
        settings = {"cost": FREE, "executor": AtOnce(), **settings}
        opened.append(DraftingService(store, with_tokenizer, **settings))
        return opened[-1]

    yield open_service
    for service in opened:
        service.close()
