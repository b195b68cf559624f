"""Draft models over a store in memory whose searches are done at once."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
from helpers.llama_model import FakeLibrary, FakeLlama
from helpers.service_fixtures import cache, tokenizer
from helpers.services import FREE

from precedent.cache import SpeculationCache
from precedent.runtime.background import AtOnce
from precedent_llama_cpp import PrecedentDraft

__all__ = ["cache", "tokenizer"]  # fixtures

Draft = Callable[..., PrecedentDraft]
Model = Callable[..., FakeLlama]


@pytest.fixture
def draft(cache: SpeculationCache, tokenizer: Any) -> Iterator[Draft]:
    """Makes draft models; all are closed after the test."""
    made: list[PrecedentDraft] = []

    def of(store: Any = cache, **settings: Any) -> PrecedentDraft:
        settings = {"tenant": "north", "cost": FREE, "executor": AtOnce(), "library": FakeLibrary(), **settings}
        made.append(PrecedentDraft(store, tokenizer, **settings))
        return made[-1]

    yield of
    for one in made:
        one.close()


@pytest.fixture
def attached(draft: Draft, tokenizer: Any) -> Model:
    """Makes models with a draft model attached, of these settings."""

    def model(next_token: Any = None, **settings: Any) -> FakeLlama:
        one = draft(**settings)
        scripted = {} if next_token is None else {"next_token": next_token}
        found: FakeLlama = one.attach(FakeLlama(one, vocabulary=tokenizer.get_vocab(), **scripted))
        return found

    return model
