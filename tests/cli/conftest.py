"""Fixtures that several tests of the command line share."""

from __future__ import annotations

import pytest

from precedent.cache import Completion, SpeculationCache
from precedent_testing.embedders import HashEmbedder


@pytest.fixture
def folder(tmp_path):
    with SpeculationCache.open(tmp_path / "cache", embedder=HashEmbedder()) as cache:
        first = cache.insert(
            Completion((1, 2, 3), "tok", "model", "shop", "refund please", text="Your refund is on its way")
        )
        cache.insert(Completion((4, 5), "tok", "model", "bank", "balance?", text="\x1b[31m[bold]42[/bold] euros"))
        cache.credit({first: (2, 1)})
    return tmp_path / "cache"
