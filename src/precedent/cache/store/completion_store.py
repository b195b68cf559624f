"""The interface between the speculation cache and the store that holds its completions.

`precedent.cache.SQLiteStore` is the embedded store; `precedent.testing.store_contract.StoreContract` is the test class
that every store has to pass.
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

    Ids increase with every insertion and are never reused. Several threads may call all methods.
    """

    def insert(self, completion: NewCompletion, vector: Vector | None, embedder: EmbedderIdentity | None) -> int:
        """Store durably and return the id; 0 if the store is read-only or full and stored nothing."""

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

    def gone_since(self, epoch: int) -> tuple[int, Ids | None]:
        """The current epoch and the ids removed after `epoch`; None for ids if they are not known one by one."""

    def embedder(self) -> EmbedderIdentity | None:
        """The embedder that made the vectors; None while there are none."""

    def credit(self, counts: Mapping[int, tuple[int, int]]) -> None:
        """Add (accepted, rejected) tokens to completions; missing ids are ignored."""

    def list(self, selection: Selection, limit: int | None) -> Completions:
        """The selected completions, newest first."""

    def records(self, selection: Selection, after_id: int, limit: int) -> Records:
        """At most `limit` selected records above an id, with their vectors, in increasing order."""

    def holds(self, completions: Sequence[NewCompletion]) -> Flags:
        """For each completion, whether the same answer to the same query is stored."""

    def restore(self, records: Sequence[Record], embedder: EmbedderIdentity | None) -> RowIds:
        """Store records with their times and counters, all or none; existing records keep the larger of each.

        Returns their ids, 0 for a refused one.
        """

    def forget(self, selection: Selection) -> int:
        """Erase the selected completions permanently; returns their number."""

    def compact(self) -> tuple[int, int]:
        """Free the space of removed records; returns bytes on disk before and after."""

    def verify(self) -> VerifyReport:
        """Check every record."""

    def stats(self) -> CacheStats:
        """A summary of the cache."""

    def close(self) -> None:
        """Release everything; may be called again."""
