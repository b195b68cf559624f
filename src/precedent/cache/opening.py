"""Opening a store by where it lies: a folder or file is SQLite's, a URL a plugin's that knows its scheme."""

from __future__ import annotations

import re
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
from precedent.errors import CacheError, ConfigError

GROUP = "precedent.stores"
"""Entry points whose names are URL schemes and whose objects are called like `open_store`, with a URL."""

KNOWN_PLUGINS = {"postgresql": "precedent-postgres", "postgres": "precedent-postgres"}
"""Which package to install for a scheme that nobody here opens."""

_SCHEME = re.compile(r"([A-Za-z][A-Za-z0-9+.-]+)://")


def open_store(
    where: str | Path | None = None,
    *,
    embedder: Embedder | None = None,
    bounds: Bounds | None = None,
    create: bool = True,
    read_only: bool = False,
) -> CompletionStore:
    """Open the store at a folder, a file or a URL; in memory without any.

    Raises ConfigError for a URL that no installed package opens, and CacheError as the store itself does.
    """
    scheme = url_scheme(where)
    opener: Callable[..., CompletionStore] = SQLiteStore.open if scheme is None else _opener(scheme)
    return opener(where, embedder=embedder, bounds=bounds, create=create, read_only=read_only)


def verify_store(where: str | Path, *, repair: bool = False) -> VerifyReport:
    """Check the store at a folder, a file or a URL, with `repair` mend it; see `verify_cache`. Raises CacheError."""
    if url_scheme(where) is None:
        return verify_cache(where, repair=repair)
    with closing(open_store(where, create=False)) as store:
        return store.verify(repair=repair)


def url_scheme(where: object) -> str | None:
    """The scheme of a URL in lower case, None for a path; a drive letter is no scheme."""
    found = _SCHEME.match(where) if isinstance(where, str) else None
    return None if found is None else found.group(1).lower()


def shown(where: str) -> str:
    """A store's URL as it may be shown and logged: without its password."""
    return re.sub(r"(://[^/@:]*):[^/]*@", r"\1@", re.sub(r"(?i)([?&]password=)[^&]*", r"\1…", where))


def _opener(scheme: str) -> Callable[..., CompletionStore]:
    for entry in entry_points(group=GROUP, name=scheme):
        try:
            opener: Callable[..., CompletionStore] = entry.load()
        except ImportError as error:
            raise CacheError(f"{entry.value} opens {scheme}:// and cannot be imported: {error}") from error
        return opener
    known = KNOWN_PLUGINS.get(scheme)
    advice = f"pip install {known}" if known else f"give a folder, or install the package that opens {scheme}://"
    raise ConfigError(f"nothing installed here opens a cache at {scheme}://; {advice}")
