"""Fixtures that several tests of decoding share."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from helpers.scheduling import WatchedTarget
from helpers.small_engines import make_engine

from precedent.cache import SpeculationCache
from precedent.engine.engine import Engine
from precedent_testing.embedders import HashEmbedder
from precedent_testing.tiny_models import tiny_causal_lm


@pytest.fixture(scope="module")
def engine() -> Iterator[Engine]:
    """An engine with a cache in memory and a draft model."""
    cache = SpeculationCache.open(None, embedder=HashEmbedder())
    running = make_engine(cache, draft_model=tiny_causal_lm("llama", seed=22, num_hidden_layers=1))
    yield running
    running.close()
    cache.close()


@pytest.fixture
def target() -> WatchedTarget:
    return WatchedTarget()
