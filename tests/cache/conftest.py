"""Fixtures that several tests of the cache share."""

from __future__ import annotations

import pytest


@pytest.fixture
def nobody_waits_long(monkeypatch):
    """A file that another transaction or process holds is given up at once."""
    monkeypatch.setattr("precedent.cache.database.BUSY_SECONDS", 0.05)
