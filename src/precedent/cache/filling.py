"""Stores many records in batches, each in one transaction; records that are already there are not embedded."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import astuple, dataclass, replace
from functools import cached_property
from itertools import islice

from precedent.cache.embedder import Embedder, embed_all, identity_of, require_same, resolve
from precedent.cache.records import Completion, EmbedderIdentity
from precedent.cache.redaction import Redact, apply
from precedent.cache.store import CompletionStore

BATCH = 64
"""Records per transaction: after a kill, at most this many are embedded again."""

Progress = Callable[[int], None]
"""Called with the number of records of every finished batch."""


@dataclass(frozen=True, slots=True)
class FillCounts:
    """Numbers of records that were newly `stored`, already `known`, `refused` or `withheld`.

    The store refuses records if it is read-only or they are too large; redaction withholds records entirely.
    """

    stored: int = 0
    known: int = 0
    refused: int = 0
    withheld: int = 0

    def __add__(self, other: FillCounts) -> FillCounts:
        pairs = zip(astuple(self), astuple(other), strict=True)
        return FillCounts(*(mine + theirs for mine, theirs in pairs))


class Vectors:
    """Gives records the vectors they lack.

    `given` made the vectors that come with records. These are used if they match the store's embedder, or if the store
    has none yet and no other embedder was `chosen`. All other vectors are computed again.
    """

    def __init__(
        self, store: CompletionStore, chosen: str | Embedder | None, given: EmbedderIdentity | None = None
    ) -> None:
        self._store, self._chosen, self._given = store, chosen, given

    @cached_property
    def identity(self) -> EmbedderIdentity:
        """The embedder of the stored vectors; may load it. Raises CacheMismatchError if it is not the store's."""
        recorded = self._store.embedder()
        if self._given is not None and _fits(self._given, recorded, self._chosen):
            return self._given
        own = identity_of(self._embedder)
        require_same(recorded or own, own, "the cache")
        return own

    @cached_property
    def _embedder(self) -> Embedder:
        return resolve(self._chosen)

    def complete(self, records: Sequence[Completion]) -> list[Completion]:
        """The records, with a vector for each that has a query. Raises CacheError if the embedder fails."""
        asked = [record for record in records if record.query.strip()]
        if not asked:
            return [replace(record, vector=None) for record in records]
        as_given = self.identity == self._given
        lacking = {r.query: None for r in asked if r.vector is None or not as_given}
        made = dict(zip(lacking, embed_all(self._embedder, list(lacking)), strict=True)) if lacking else {}
        return [replace(record, vector=made.get(record.query, record.vector)) for record in records]


def _fits(given: EmbedderIdentity, recorded: EmbedderIdentity | None, chosen: str | Embedder | None) -> bool:
    if recorded is None:
        return chosen is None
    return (given.fingerprint, given.dimension) == (recorded.fingerprint, recorded.dimension)


def fill(
    store: CompletionStore,
    records: Iterable[Completion],
    vectors: Vectors,
    progress: Progress | None = None,
    *,
    redact: Redact | None = None,
) -> FillCounts:
    """Store records after `redact`, with their times and counters; storing the same ones again changes nothing.

    Raises CacheError.
    """
    filled, remaining = FillCounts(), iter(records)
    while batch := list(islice(remaining, BATCH)):
        left = batch if redact is None else [one for record in batch if (one := _redacted(record, redact)) is not None]
        filled += _fill(store, left, vectors) + FillCounts(withheld=len(batch) - len(left))
        if progress is not None:
            progress(len(batch))
    return filled


def _redacted(completion: Completion, redact: Redact) -> Completion | None:
    """The completion to store after redaction, or None; a changed query gets a new vector."""
    left = apply(redact, completion)
    if left is None:
        return None
    record = {name: getattr(completion, name) for name in ("id", "created", "count", "hits", "accepted", "rejected")}
    return replace(left, vector=completion.vector if left.query == completion.query else None, **record)


def _fill(store: CompletionStore, batch: Sequence[Completion], vectors: Vectors) -> FillCounts:
    held = store.holds(batch)
    known = [replace(record, vector=None) for record, there in zip(batch, held, strict=True) if there]
    new = vectors.complete([record for record, there in zip(batch, held, strict=True) if not there])
    identity = vectors.identity if any(record.vector is not None for record in new) else None
    ids = store.restore([*known, *new], identity)
    stored = len({row_id for row_id in ids[len(known) :] if row_id})
    refused = ids.count(0)
    return FillCounts(stored, len(batch) - stored - refused, refused)
