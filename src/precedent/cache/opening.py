"""Opens the store at a place: SQLite for a folder or file, for a URL the plugin that handles its scheme."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import closing
from importlib.metadata import entry_points
from pathlib import Path

from precedent.cache.maintain.verifying import verify_cache
from precedent.cache.search.embedder import Embedder
from precedent.cache.sqlite_store import SQLiteStore
from precedent.cache.store.bounds import Bounds
from precedent.cache.store.completion_store import CompletionStore
from precedent.cache.store.report import VerifyReport
from precedent.cache.store.store_url import Place, StoreURL, place_of
from precedent.errors import CacheError, ConfigError

GROUP = "precedent.stores"
"""Entry points whose names are URL schemes and whose objects are called like `open_store`, with a `StoreURL`."""

KNOWN_PLUGINS = {"postgresql": "precedent-postgres", "postgres": "precedent-postgres"}
"""The package to install for a scheme that nothing installed opens."""


def open_store(
    where: Place | None = None,
    *,
    embedder: Embedder | None = None,
    bounds: Bounds | None = None,
    create: bool = True,
    read_only: bool = False,
) -> CompletionStore:
    """Open the store at a folder, a file or a URL; without a place, in memory.

    Raises ConfigError for a URL that no installed package opens, and CacheError if the store cannot be opened.
    """
    place = place_of(where)
    opener: Callable[..., CompletionStore] = _opener(place) if isinstance(place, StoreURL) else SQLiteStore.open
    return opener(place, embedder=embedder, bounds=bounds, create=create, read_only=read_only)


def verify_store(where: Place) -> VerifyReport:
    """Check the store at a folder, file or URL; see `verify_cache`. Raises CacheError."""
    place = place_of(where)
    if isinstance(place, str | Path):
        return verify_cache(place)
    with closing(open_store(place, create=False)) as store:
        return store.verify()


def _opener(url: StoreURL) -> Callable[..., CompletionStore]:
    scheme = url.scheme
    for entry in entry_points(group=GROUP, name=scheme):
        try:
            opener: Callable[..., CompletionStore] = entry.load()
        except ImportError as error:
            raise CacheError(f"{entry.value} opens {scheme}:// and cannot be imported: {error}") from error
        return opener
    known = KNOWN_PLUGINS.get(scheme)
    advice = f"pip install {known}" if known else f"give a folder, or install the package that opens {scheme}://"
    raise ConfigError(f"no installed package opens a cache at {scheme}://; {advice}")
