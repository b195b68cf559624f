"""The seam between the speculation cache and whatever holds its completions.

`precedent.cache.store.SQLiteStore` is the embedded store; `precedent.testing.store_contract.StoreContract` is the test
class that every store has to pass.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Protocol

from precedent.cache.records import CacheStats, Completions, EmbedderIdentity, NewCompletion, Selection, Vector
from precedent.cache.segment import Ids


class CompletionStore(Protocol):
    """Completions with their vectors, in partitions by (tenant, tokenizer) that no method reads across.

    Ids rise with every insertion and are never used again. All methods may be called from several threads.
    """

    def insert(self, completion: NewCompletion, vector: Vector | None, embedder: EmbedderIdentity | None) -> int:
        """Store durably and return the id; 0 if the store is read-only or full and stored nothing."""

    def since(self, tenant: str, tokenizer: str, after_id: int) -> Completions:
        """The partition's completions with a higher id, in rising order; microseconds when there are none."""

    def vectors_since(self, tenant: str, tokenizer: str, after_id: int) -> tuple[Ids, Vector]:
        """The same for ids `[n]` and vectors `[n, dimension]` of the completions that have one."""

    def stamp(self) -> tuple[int, int]:
        """Changes whenever records may have come or gone, in whatever process; costs microseconds."""

    def epoch(self) -> int:
        """Grows whenever records have gone."""

    def gone_since(self, epoch: int) -> tuple[int, Ids | None]:
        """The epoch now, and the ids that went after `epoch`; None for ids where they are not known one by one."""

    def embedder(self) -> EmbedderIdentity | None:
        """Which embedder made the vectors, None as long as there are none."""

    def credit(self, counts: Mapping[int, tuple[int, int]]) -> None:
        """Add (accepted, rejected) tokens to completions; ids that are gone are ignored."""

    def list(self, selection: Selection, limit: int | None) -> Completions:
        """The selected completions, the newest first."""

    def forget(self, selection: Selection) -> int:
        """Erase the selected completions for good; returns their number."""

    def stats(self) -> CacheStats:
        """The cache at a glance."""

    def close(self) -> None:
        """Release everything; more than once does no harm."""
