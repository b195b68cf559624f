"""The interface between the speculation cache and the store that holds its completions, and how a store is opened.

`precedent.cache.SQLiteStore` is the embedded store. A package offers another one under the entry points
`precedent.stores`: the entry's name is a URL scheme, and its object is called with a `StoreURL` and the settings of
`open_store`. `precedent_testing.store_contract.StoreContract` is the test class that every store has to pass.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import closing
from importlib.metadata import entry_points
from pathlib import Path
from typing import Protocol

from precedent.cache.embedder import Embedder
from precedent.cache.inspection import verify_cache
from precedent.cache.records import (
    Bounds,
    CacheStats,
    Completion,
    Completions,
    EmbedderIdentity,
    Ids,
    Selection,
    Vector,
    VerifyReport,
)
from precedent.cache.store_url import Place, StoreURL, place_of
from precedent.errors import CacheError, ConfigError

Flags = list[bool]
RowIds = list[int]


class CompletionStore(Protocol):
    """Completions with their vectors, in partitions by (tenant, tokenizer) that no method reads across.

    Ids increase with every insertion and are never reused. Several threads may call all methods. They raise CacheError.
    """

    def insert(self, completion: Completion, vector: Vector | None, embedder: EmbedderIdentity | None) -> int:
        """Store durably and return the id; 0 if the store is read-only or full, or the completion too large."""

    def since(self, tenant: str, tokenizer: str, after_id: int) -> Completions:
        """The partition's completions with a higher id, in increasing order; takes microseconds if there are none."""

    def vectors_since(self, tenant: str, tokenizer: str, after_id: int) -> tuple[Ids, Vector]:
        """The same as ids `[n]` and vectors `[n, dimension]`, for the completions that have one."""

    def tokenizers(self) -> frozenset[str]:
        """The fingerprints of all tokenizers whose completions are stored, of any tenant."""

    def stamp(self) -> tuple[int, int]:
        """Changes whenever any process may have added or removed records; takes microseconds."""

    def epoch(self) -> int:
        """Increases whenever records are removed."""

    def forgets(self) -> int:
        """Changes at every `forget`, of any process, and not at an eviction."""

    def ids(self, tenant: str, tokenizer: str) -> Ids:
        """The ids of the partition's completions in increasing order, `[n]`: what an index may still hold."""

    def embedder(self) -> EmbedderIdentity | None:
        """The embedder that made the vectors; None while there are none."""

    def credit(self, counts: Mapping[int, tuple[int, int]]) -> None:
        """Add (accepted, rejected) tokens to completions; ignores missing ids, and does nothing if read-only."""

    def list(self, selection: Selection, limit: int | None) -> Completions:
        """The selected completions, newest first."""

    def records(self, selection: Selection, after_id: int, limit: int) -> Completions:
        """At most `limit` selected completions above an id with their vectors, in increasing order; no damaged ones."""

    def holds(self, completions: Sequence[Completion]) -> Flags:
        """For each completion, whether the same answer to the same query is stored."""

    def restore(self, completions: Sequence[Completion], embedder: EmbedderIdentity | None) -> RowIds:
        """Store completions with their times and counters, all or none; existing ones keep the larger of each.

        Returns their ids, 0 for a refused one.
        """

    def forget(self, selection: Selection) -> int:
        """Erase the selected completions permanently; returns their number.

        Raises CacheError if the store is read-only, nothing is selected, or somebody keeps their bytes (they are
        forgotten nevertheless).
        """

    def compact(self) -> tuple[int, int]:
        """Free the space of removed records; returns bytes on disk before and after."""

    def verify(self) -> VerifyReport:
        """Check every record."""

    def stats(self) -> CacheStats:
        """A summary of the cache."""

    def close(self) -> None:
        """Release everything; may be called again."""


GROUP = "precedent.stores"

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
    from precedent.cache.sqlite_store import SQLiteStore  # here: it is such a store itself

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
