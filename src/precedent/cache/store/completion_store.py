"""The seam between the speculation cache and whatever holds its completions.

`precedent.cache.SQLiteStore` is the embedded store; `precedent.testing.store_contract.StoreContract` is the test
class that every store has to pass.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Protocol

from precedent.cache.store.arrays import Ids
from precedent.cache.store.records import (
    CacheStats,
    Completions,
    EmbedderIdentity,
    NewCompletion,
    Record,
    Selection,
    Vector,
)
from precedent.cache.store.report import VerifyReport

Records = list[Record]
Flags = list[bool]
RowIds = list[int]


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

    def records(self, selection: Selection, after_id: int, limit: int) -> Records:
        """At most `limit` selected records with their vectors above an id, in rising order."""

    def holds(self, completions: Sequence[NewCompletion]) -> Flags:
        """For each whether the same answer to the same query is there."""

    def restore(self, records: Sequence[Record], embedder: EmbedderIdentity | None) -> RowIds:
        """Store records with their times and counters, all or none; those that are there keep the larger of each.

        Returns their ids, 0 for one that was refused.
        """

    def forget(self, selection: Selection) -> int:
        """Erase the selected completions for good; returns their number."""

    def compact(self) -> tuple[int, int]:
        """Give back what records that went have left; bytes on disk before and after."""

    def verify(self, *, repair: bool = False) -> VerifyReport:
        """Check every record; with `repair`, mend what is damaged."""

    def stats(self) -> CacheStats:
        """The cache at a glance."""

    def close(self) -> None:
        """Release everything; more than once does no harm."""
