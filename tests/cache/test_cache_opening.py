"""Where a cache lies: paths are SQLite's, URLs are opened by installed packages."""

from __future__ import annotations

import pytest

from precedent.cache import SpeculationCache, SQLiteStore, StoreURL
from precedent.cache.store import open_store, verify_store
from precedent.errors import CacheError, ConfigError
from precedent_testing.embedders import HashEmbedder


class Entry:
    """An installed package's entry point."""

    value = "theirs:open_store"

    def __init__(self, load) -> None:
        self.load = load


@pytest.fixture
def installed(monkeypatch):
    """Makes one package open `redis://`."""

    def install(load):
        found = [Entry(load)]
        monkeypatch.setattr("precedent.cache.store.entry_points", lambda group, name: found if name == "redis" else [])

    return install


def test_an_installed_package_opens_its_urls_with_the_settings_of_the_cache(installed):
    asked = []

    def opener(url, **settings):
        asked.append((url, settings))
        return SQLiteStore.open()

    installed(lambda: opener)
    embedder = HashEmbedder()
    with SpeculationCache.open("redis://host/1", embedder=embedder, max_bytes=10**6) as cache:
        assert cache.stats().records == 0
    assert verify_store("redis://host/1").records == 0
    (first, settings), (second, others) = asked
    assert first == second == StoreURL("redis://host/1")
    assert (settings["embedder"], settings["bounds"].max_bytes, settings["read_only"]) == (embedder, 10**6, False)
    assert others["create"] is False


def test_what_nobody_opens_or_cannot_be_imported_is_named(installed):
    with pytest.raises(ConfigError, match="no installed package opens a cache at etcd://"):
        open_store("etcd://host")
    with pytest.raises(ConfigError, match="at etcd://"):
        verify_store("ETCD://host")

    def load():
        raise ImportError("no module named theirs")

    installed(load)
    with pytest.raises(CacheError, match="theirs:open_store opens redis:// and cannot be imported: no module"):
        open_store("redis://host")
