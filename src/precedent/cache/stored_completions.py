"""What a cache reads from its store and adds to counters there, for any drafter and command."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from precedent.cache.store.arrays import Ids
from precedent.cache.store.completion_store import CompletionStore
from precedent.cache.store.records import ACTIONS, CacheStats, Completions, Selection, check_tenant
from precedent.errors import CacheError
from precedent.runtime.process import OfOneProcess


class StoredCompletions(OfOneProcess):
    """The completions of a store, for the process that opened it: a process forked later gets CacheError."""

    instead = "give its path or URL, and open it only in the process that uses it"
    refused_as = CacheError

    def __init__(self, store: CompletionStore) -> None:
        self._opened = store

    @property
    def _store(self) -> CompletionStore:
        self.check_process()
        return self._opened

    def since(self, tenant: str, tokenizer: str, after_id: int = 0) -> Completions:
        """The completions of a partition with an id above `after_id`, in increasing order; cheap if there are none."""
        check_tenant(tenant)
        return self._store.since(tenant, tokenizer, after_id)

    def tokenizers(self) -> frozenset[str]:
        """The fingerprints of all tokenizers whose completions are stored, of any tenant."""
        return self._store.tokenizers() - {ACTIONS}

    def epoch(self) -> int:
        """Increases when completions are forgotten or evicted: results of `since` must then be read again."""
        return self._store.epoch()

    def forgets(self) -> int:
        """Changes at every `forget`, of any process, and not at an eviction."""
        return self._store.forgets()

    def gone_since(self, epoch: int) -> tuple[int, Ids | None]:
        """The current epoch and the ids removed after `epoch`; None for ids if too many have been removed since."""
        return self._store.gone_since(epoch)

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
