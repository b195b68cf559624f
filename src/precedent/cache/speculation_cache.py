"""The speculation cache: finds prior completions by their requests, and gives drafters their token ids."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable, Mapping
from functools import lru_cache, partial
from typing import Self

from precedent.cache.embedder import Embedder, embed_one, identity_of, require_same, resolve
from precedent.cache.index import SimilarityIndex, SimilarityOf
from precedent.cache.prefixes import PrefixFiles
from precedent.cache.records import (
    ACTIONS,
    DEFAULT_MAX_BYTES,
    DEFAULT_MAX_INDEX_BYTES,
    DEFAULT_MAX_PREFIX_BYTES,
    Bounds,
    CacheStats,
    Completion,
    Completions,
    Hit,
    Ids,
    Selection,
    Vector,
    check_tenant,
)
from precedent.cache.redaction import Redact, apply
from precedent.cache.sqlite_store import SQLiteStore
from precedent.cache.store import CompletionStore, open_store
from precedent.cache.store_url import Place, place_of, written
from precedent.errors import CacheError
from precedent.runtime.process import OfOneProcess, check_fork

REMEMBERED_QUERIES = 256
"""Requests whose vectors are remembered: recall embeds a request, and storing its answer needs the same vector."""


class SpeculationCache(OfOneProcess):
    """Stores completions and recalls them by similarity; safe for several threads and processes.

    Each process opens its own cache: a process forked while the cache was open gets CacheError.

    A tenant is a hard partition: no method returns a completion of another tenant than the given one.
    `open` says what it is made of.

    >>> from precedent_testing.embedders import HashEmbedder
    >>> cache = SpeculationCache.open(embedder=HashEmbedder())  # in memory; give a path to keep it
    >>> number = cache.insert(Completion((5, 8, 13), "tokenizer", "model", tenant="acme", query="where is it?"))
    >>> [hit.completion_id == number for hit in cache.recall("where is it?", tenant="acme", tokenizer="tokenizer")]
    [True]
    >>> cache.recall("where is it?", tenant="bolt", tokenizer="tokenizer")
    []
    >>> cache.close()
    """

    instead = "give its path or URL, and open it only in the process that uses it"
    refused_as = CacheError

    def __init__(
        self,
        store: CompletionStore,
        embedder: Embedder,
        *,
        max_index_bytes: int = DEFAULT_MAX_INDEX_BYTES,
        redact: Redact | None = None,
        similarity: SimilarityOf | None = None,
    ) -> None:
        _check_index_bytes(max_index_bytes)
        self._opened = store
        self._embedder, self._redact, self.max_index_bytes = embedder, redact, max_index_bytes
        self._index = (similarity or SimilarityIndex)(store)
        self._vector_of = lru_cache(maxsize=REMEMBERED_QUERIES)(partial(embed_one, embedder))
        self._listeners: list[tuple[weakref.WeakMethod[Callable[[], None]], bool]] = []
        self.path: str | None = None
        """The path or URL passed to `open`, absolute and without secrets; None in memory."""

    @classmethod
    def open(
        cls,
        path: Place | None = None,
        *,
        embedder: str | Embedder | None = None,
        max_bytes: int = DEFAULT_MAX_BYTES,
        max_records: int | None = None,
        max_age: float | None = None,
        max_tenant_bytes: int | None = None,
        max_index_bytes: int = DEFAULT_MAX_INDEX_BYTES,
        max_prefix_bytes: int = DEFAULT_MAX_PREFIX_BYTES,
        redact: Redact | None = None,
        read_only: bool = False,
        similarity: SimilarityOf | None = None,
    ) -> Self:
        """Open a cache, in memory without a `path`.

        - `path`: a folder, a file that ends in .sqlite, .sqlite3 or .db, or a URL that an installed package opens.
        - `embedder`: a sentence-transformers id or folder, or an embedder object; None is all-MiniLM-L6-v2. It is
          loaded at first use, or here if the file holds vectors, which it must have made.
        - `max_bytes`: the most bytes of tokens, vectors and texts of all completions.
        - `max_records`: the most completions.
        - `max_age`: the most seconds since a completion was first stored.
        - `max_tenant_bytes`: the most bytes of any one tenant's completions.
        - `max_index_bytes`: the most bytes that drafting holds to match against. The oldest completions leave first.
        - `max_prefix_bytes`: the most bytes that `EngineOptions.keep_prefixes` keeps, at most for `max_age` (None: 30
          days).
        - `redact`: returns what to store instead of a completion, or None for nothing.
        - `read_only`: store nothing.
        - `similarity`: finds the nearest completions; None is FAISS in memory.

        Raises CacheError; a file that is refused is left untouched.

        >>> from precedent_testing.embedders import HashEmbedder
        >>> with SpeculationCache.open(embedder=HashEmbedder()) as cache:
        ...     cache.stats().records
        0
        """
        check_fork()
        place = place_of(path)
        _check_index_bytes(max_index_bytes)
        chosen = resolve(embedder)
        bounds = Bounds(max_bytes, max_records, max_age, max_tenant_bytes, max_prefix_bytes)
        store = open_store(place, embedder=chosen, bounds=bounds, read_only=read_only)
        opened = cls(store, chosen, max_index_bytes=max_index_bytes, redact=redact, similarity=similarity)
        opened.path = written(place)
        if opened.prefixes is not None:
            opened.prefixes.sweep()
        return opened

    @property
    def _store(self) -> CompletionStore:
        self.check_process()
        return self._opened

    @property
    def embedder(self) -> Embedder:
        """The model that turns texts into vectors; it is loaded at first use."""
        return self._embedder

    def warm_up(self) -> None:
        """Load the embedder now. Raises CacheError if it cannot be loaded or did not make the cache's vectors."""
        self._check_embedder()
        embed_one(self._embedder, "warm-up")

    def recall(self, query: str, *, tenant: str, tokenizer: str, k: int = 64) -> list[Hit]:
        """The at most `k` stored completions with the queries nearest to `query`, nearest first.

        The text is embedded once; an empty text recalls nothing. Raises CacheError if the embedder fails.
        """
        check_tenant(tenant)
        vector = self._vector(query)
        if vector is None:
            return []
        self._check_embedder()
        return self._index.search(vector, tenant, tokenizer, k)

    def insert(self, completion: Completion) -> int:
        """Store a completion; it is on disk when this returns its id.

        Repeating the same answer to the same query increases its count. Returns 0 if nothing could be stored (a
        read-only file, a full disk), which is logged once, or if `redact` returned None. Raises CacheError for an
        invalid completion.
        """
        check_tenant(completion.tenant)
        if self._redact is not None:
            redacted = apply(self._redact, completion)
            if redacted is None:
                return 0
            completion = redacted
        vector = self._vector(completion.query)
        identity = None if vector is None else identity_of(self._embedder)
        return self._store.insert(completion, vector, identity)

    def since(self, tenant: str, tokenizer: str, after_id: int = 0) -> Completions:
        """The completions of a partition with an id above `after_id`, in increasing order; cheap if there are none."""
        check_tenant(tenant)
        return self._store.since(tenant, tokenizer, after_id)

    def tokenizers(self) -> frozenset[str]:
        """The fingerprints of all tokenizers whose completions are stored, of any tenant."""
        return self._store.tokenizers() - {ACTIONS}

    def epoch(self) -> int:
        """Increases when completions are forgotten or evicted: compare with `ids` then."""
        return self._store.epoch()

    def forgets(self) -> int:
        """Changes at every `forget`, of any process, and not at an eviction."""
        return self._store.forgets()

    def ids(self, tenant: str, tokenizer: str) -> Ids:
        """The ids of a partition's completions in increasing order, `[n]`."""
        check_tenant(tenant)
        return self._store.ids(tenant, tokenizer)

    def credit(self, counts: Mapping[int, tuple[int, int]]) -> None:
        """Add tokens to completions, `{id: (accepted, rejected)}`; ids that are gone are ignored."""
        self._store.credit(counts)

    def stats(self) -> CacheStats:
        """Records, tokens and bytes, in total and by tenant."""
        return self._store.stats()

    def list(self, *, tenant: str | None = None, limit: int | None = 100) -> Completions:
        """Stored completions, newest first."""
        return self._store.list(Selection(tenant=tenant), limit)

    def search(self, text: str, *, tenant: str | None = None, limit: int | None = 100) -> Completions:
        """Completions whose query or text contains `text`, ignoring case, newest first."""
        return self._store.list(Selection(tenant=tenant, containing=text), limit)

    def among(self, ids: Iterable[int], *, tenant: str) -> Completions:
        """A tenant's completions with these ids; missing ids are skipped."""
        check_tenant(tenant)
        return self._store.list(Selection(tenant=tenant, ids=tuple(ids)), None)

    @property
    def prefixes(self) -> PrefixFiles | None:
        """The KV cache of prompt prefixes on disk; None for a cache in memory or at a URL."""
        return self._store.prefixes if isinstance(self._store, SQLiteStore) else None

    def lets_pass(self, prefix: Completion) -> bool:
        """Return whether `redact` leaves a prompt's prefix, given as a completion, as it is. Raises CacheError."""
        self.check_process()
        return self._redact is None or apply(self._redact, prefix) == prefix

    def forget(
        self,
        *,
        tenant: str | None = None,
        before: float | None = None,
        containing: str | None = None,
        ids: Iterable[int] | None = None,
    ) -> int:
        """Erase the completions that meet all given conditions from table, files, log, indexes and drafting.

        `before` is in seconds since the epoch; `containing` is searched for in query and text. Kept prefixes go by
        tenant and time; `containing` cannot be searched for in them and spares none, `ids` spares all. Returns the
        number of completions. Raises CacheError without a condition, if read-only, or if another process keeps bytes.
        """
        self.check_process()
        selection = Selection(tenant, before, containing, None if ids is None else tuple(ids))
        try:
            if not selection.everything:
                self._index.forget(selection)
            return self._store.forget(selection)
        finally:
            self._index.clear()
            self._erase_memories(forgotten=True)

    def erase_gone(self, *, forgotten: bool = True) -> None:
        """Erase from memory what any process has evicted or, unless `forgotten` is False, forgotten.

        Raises CacheError; then call it again.
        """
        self.check_process()
        self._index.erase_gone()
        self._erase_memories(forgotten=forgotten)

    def _erase_memories(self, *, forgotten: bool) -> None:
        self._vector_of.cache_clear()
        for reference, only_forgotten in list(self._listeners):
            if (method := reference()) is not None and (forgotten or not only_forgotten):
                method()

    def on_gone(self, erase: Callable[[], None], *, only_forgotten: bool = False) -> None:
        """Call a method at the end of every `forget` and `erase_gone`, before it returns, while its object lives.

        With `only_forgotten` not after evictions: for what holds words that only a wish to forget must erase.
        """
        living = [listener for listener in self._listeners if listener[0]() is not None]
        self._listeners = [*living, (weakref.WeakMethod(erase), only_forgotten)]

    def close(self) -> None:
        """Close the store; may be called again, and does nothing in a forked process."""
        if not self.is_here:
            return
        self._index.close()
        self._store.close()
        self._index.clear()
        self._vector_of.cache_clear()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    def _check_embedder(self) -> None:
        recorded = self._store.embedder()
        if recorded is not None:  # checked each time: another process may have written the first vector
            require_same(recorded, identity_of(self._embedder), "the cache")

    def _vector(self, query: str) -> Vector | None:
        if not query.strip():
            return None
        self.check_process()
        return self._vector_of(query)


def _check_index_bytes(max_index_bytes: int) -> None:
    if max_index_bytes < 1:
        raise CacheError(f"max_index_bytes={max_index_bytes} must be at least 1")
