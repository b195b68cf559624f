"""Fixtures that several tests of the cache share."""

from __future__ import annotations

import pytest


@pytest.fixture
def few_are_many(monkeypatch):
    """Grouping from 64 vectors on."""
    monkeypatch.setattr("precedent.cache.search.grouped_index.GROUPED_FROM", 64)


@pytest.fixture
def nobody_waits_long(monkeypatch):
    """A file that another transaction or process holds is given up at once."""
    monkeypatch.setattr("precedent.cache.store.connection.BUSY_SECONDS", 0.05)


@pytest.fixture(scope="module")
def server():
    """A PostgreSQL server of this module's own."""
    testing = pytest.importorskip("precedent_postgres.testing", reason="precedent-postgres is not installed")
    with testing.TemporaryServer() as running:
        yield running


@pytest.fixture
def url(server):
    """The URL of an empty database."""
    yield server.url
    server.execute("DROP SCHEMA IF EXISTS precedent CASCADE")
