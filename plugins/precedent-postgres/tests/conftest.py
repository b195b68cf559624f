"""A PostgreSQL server for the tests of its store."""

from __future__ import annotations

import pytest


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
