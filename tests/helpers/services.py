"""What tests of the drafting service share: fixtures, scripted drafters."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest

from precedent.cache import SpeculationCache
from precedent.drafters import Request
from precedent.drafters.base import Candidates
from precedent_engines import DraftingService
from precedent_testing.embedders import HashEmbedder
from precedent_testing.scripted_model import scripted_tokenizer

FREE = {1: 10.0, 65: 10.0}
"""A cost curve for which width is free."""

END = 2

Serve = Callable[..., DraftingService]


class Scripted:
    """A drafter that proposes the same candidates at every step; `error` is raised instead from call `fails_at` on."""

    def __init__(self, name: str, *nodes: tuple[int, int, float, int], fails_at: int | None = None) -> None:
        self.name, self._nodes = name, nodes
        self.calls, self._fails_at, self.seen = 0, fails_at, list[int]()

    def begin(self, request: Request) -> Scripted:
        return self

    def match(self, budget: int) -> Candidates:
        self.calls += 1
        if self._fails_at is not None and self.calls >= self._fails_at:
            raise RuntimeError("the drafter broke")
        return Candidates.of(self.name, self._nodes[:budget])

    def committed(self, token_ids: Any) -> None:
        self.seen += token_ids

    def end(self) -> None:
        pass

    def close(self) -> None:
        pass


def store(service: DraftingService, *answers: list[int], tenant: str = "north", query: str = "an order") -> None:
    """Write answers back; done when this returns if the service's executor works at once."""
    for answer in answers:
        service.write_back([1], answer, tenant=tenant, query=query)


def left_in(cache: SpeculationCache) -> set[tuple[str, tuple[int, ...]]]:
    """Tenant and tokens of everything stored."""
    return {(one.tenant, one.token_ids) for one in cache.list(limit=None)}


def added(service: DraftingService, *drafters: Any) -> DraftingService:
    """The service with these drafters in place of its own."""
    service._drafters = {drafter.name: drafter for drafter in drafters}
    return service


@pytest.fixture(scope="session")
def tokenizer() -> Any:
    return scripted_tokenizer()


@pytest.fixture
def cache() -> Iterator[SpeculationCache]:
    with SpeculationCache.open(None, embedder=HashEmbedder()) as opened:
        yield opened
