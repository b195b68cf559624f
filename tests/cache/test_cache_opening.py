"""Where a cache lies: paths are SQLite's, URLs are opened by installed packages, and passwords are never shown."""

from __future__ import annotations

from pathlib import Path

import pytest

from precedent.cache import SpeculationCache, SQLiteStore
from precedent.cache.opening import open_store, shown, url_scheme, verify_store
from precedent.errors import CacheError, ConfigError
from precedent.testing.embedders import HashEmbedder


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
        monkeypatch.setattr(
            "precedent.cache.opening.entry_points", lambda group, name: found if name == "redis" else []
        )

    return install


PATHS = ["cache", "/a/b.sqlite", "C://cache", "c:/x", "", None, Path("redis://host"), "://x", "a//b"]


@pytest.mark.parametrize("where", PATHS)
def test_a_path_is_no_url(where):
    assert url_scheme(where) is None


def test_a_scheme_is_read_without_regard_to_case():
    assert url_scheme("PostgreSQL://host/db") == "postgresql"
    assert url_scheme("my+store.2://x") == "my+store.2"


@pytest.mark.parametrize(
    ("url", "says"),
    [
        ("postgresql://me:secret@host/db", "postgresql://me@host/db"),
        ("postgresql://me:sec@ret@host/db", "postgresql://me@host/db"),
        ("postgresql://host/db?user=me&password=secret&sslmode=require", "…&sslmode=require"),
        ("postgresql://me@host:5432/db", "postgresql://me@host:5432/db"),
    ],
)
def test_a_password_is_not_shown(url, says):
    assert shown(url).endswith(says)
    assert "sec" not in shown(url)


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
    assert first == second == "redis://host/1"
    assert (settings["embedder"], settings["bounds"].max_bytes, settings["read_only"]) == (embedder, 10**6, False)
    assert others["create"] is False


def test_what_nobody_opens_or_cannot_be_imported_is_named(installed):
    with pytest.raises(ConfigError, match="nothing installed here opens a cache at etcd://"):
        open_store("etcd://host")

    def load():
        raise ImportError("no module named theirs")

    installed(load)
    with pytest.raises(CacheError, match="theirs:open_store opens redis:// and cannot be imported: no module"):
        open_store("redis://host")
