"""Draft models over a store in memory whose searches are done at once."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any

import pytest
from helpers.llama_model import FakeLlama
from helpers.services import FREE, cache, tokenizer

from precedent.cache import SpeculationCache
from precedent.runtime.background import AtOnce
from precedent_llama_cpp import PrecedentDraft

__all__ = ["cache", "tokenizer"]  # fixtures

Draft = Callable[..., PrecedentDraft]
Model = Callable[..., FakeLlama]


@pytest.fixture
def draft(cache: SpeculationCache, tokenizer: Any, monkeypatch: pytest.MonkeyPatch) -> Iterator[Draft]:
    """Makes draft models; all are closed after the test."""
    monkeypatch.setitem(sys.modules, "llama_cpp", SimpleNamespace(__version__="0.3.36"))
    made: list[PrecedentDraft] = []

    def of(store: Any = cache, **settings: Any) -> PrecedentDraft:
        settings = {"tenant": "north", "cost": FREE, "executor": AtOnce(), **settings}
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
