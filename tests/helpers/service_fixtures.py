"""Fixtures of all that drafts through the service: a tokenizer, and a cache in memory."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

from precedent.cache import SpeculationCache
from precedent_testing.embedders import HashEmbedder
from precedent_testing.scripted_model import scripted_tokenizer


@pytest.fixture(scope="session")
def tokenizer() -> Any:
    return scripted_tokenizer()


@pytest.fixture
def cache() -> Iterator[SpeculationCache]:
    with SpeculationCache.open(None, embedder=HashEmbedder()) as opened:
        yield opened
