"""The drafter that remembers: every stored completion of the tenant, weighted by how near its request was to this one.

Similarity is a weight, never a filter. It decides alone at step 0, where no token of the answer is there to match yet;
afterwards the longest match counts for more, and similarity settles what the match leaves open.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from concurrent.futures import Executor, Future
from dataclasses import dataclass, field
from functools import lru_cache
from typing import Any

import numpy as np

from precedent.cache.fingerprint import prompt_fingerprint
from precedent.cache.records import Hit
from precedent.drafters.alignment import Trail
from precedent.drafters.base import Candidates, DraftRequest
from precedent.drafters.expand import Evidence, LogisticPrior, expand
from precedent.drafters.tenant_memory import CompletionSource, Nearness, TenantMemory
from precedent.drafters.token_index import MAX_DEPTH, START
from precedent.sampling import Coins
from precedent.tree import ROOT, TreeBuilder

_log = logging.getLogger(__name__)

_MAX_OCCURRENCES = 128
_NUM_HITS = 256
_LENGTH_WEIGHT = 0.7
_SIMILARITY_BINS = np.array([0.5, 0.7, 0.85, 0.95, 1.2])
_EXACT_DOUBT = 0.1
"""What is left of the doubt when a completion answered exactly this prompt."""

# Fitted on recorded agent traces; the customers on whose traces figures are reported took no part.
_PRIOR = LogisticPrior(offset=-1.65, odds=0.87, length=0.59, count=0.09, similarity=0.09)


@lru_cache(maxsize=1 << 14)
def _estimate(share: float, count: int, length: int, similarity: int) -> float:
    prior = _PRIOR(share, count, length, similarity)
    exact = similarity == _SIMILARITY_BINS.size
    return 1.0 - _EXACT_DOUBT * (1.0 - prior) if exact else prior


class RecallDrafter:
    """Continues the live output as the tenant's stored completions did.

    `tokenizer` is the fingerprint under which completions are stored; `executor` runs the embedding, the search and the
    reading of new completions beside decoding.
    """

    name = "recall"
    draws = False

    def __init__(self, cache: CompletionSource, tokenizer: str, executor: Executor) -> None:
        self._cache, self._tokenizer, self._executor = cache, tokenizer, executor
        self._memories: dict[str, TenantMemory] = {}
        self._credits: list[Future[None]] = []

    def begin(self, request: DraftRequest) -> RecallDrafting:
        """Start embedding and searching; `match` works at once with what earlier requests have read."""
        memory = self._memories.get(request.tenant)
        if memory is None or memory.mostly_forgotten:  # running requests keep the one they began with
            memory = self._memories[request.tenant] = TenantMemory()
        search = self._executor.submit(self._search, memory, request)
        return RecallDrafting(self, memory, request, search)

    def close(self) -> None:
        """Wait for the credit that is still being written, and drop the indexes."""
        for written in self._credits:
            written.exception()
        self._memories.clear()

    def credit(self, counts: Mapping[int, tuple[int, int]]) -> None:
        """Hand counts to the cache without waiting for the disk."""
        self._credits = [written for written in self._credits if not written.done()]
        written = self._executor.submit(self._cache.credit, counts)
        written.add_done_callback(_report)
        self._credits.append(written)

    def _search(self, memory: TenantMemory, request: DraftRequest) -> list[Hit]:
        memory.read(self._cache, request.tenant, self._tokenizer)
        if not request.query:
            return []
        return self._cache.recall(request.query, tenant=request.tenant, tokenizer=self._tokenizer, k=_NUM_HITS)


@dataclass(slots=True)
class _Credit:
    """Tokens for which one completion was the best witness."""

    accepted: int = 0
    rejected: int = 0


@dataclass(slots=True)
class _Proposed:
    """The last candidates and, per node, the completion that gets the credit."""

    candidates: Candidates
    completion_ids: list[int] = field(default_factory=list)


class RecallDrafting:
    """One live output, followed through its tenant's memory."""

    behind = 0

    def __init__(
        self, drafter: RecallDrafter, memory: TenantMemory, request: DraftRequest, search: Future[list[Hit]]
    ) -> None:
        self._drafter, self._memory = drafter, memory
        self._search: Future[list[Hit]] | None = search
        self._nearness = Nearness(memory, prompt_fingerprint(request.prompt_ids))
        self._end_ids = request.end_token_ids
        self._context = [START]
        self._trail = Trail()
        self._proposed = _Proposed(Candidates(drafter.name))
        self._credit: dict[int, _Credit] = {}
        self._ended = False

    def match(self, budget: int) -> Candidates:
        """At most `budget` candidates from all of the tenant's completions; unweighted until the search is done."""
        self._proposed = _Proposed(Candidates(self._drafter.name))
        if self._ended or budget <= 0:
            return self._proposed.candidates
        with self._memory.lock:
            self._poll()
            self._proposed = self._match(budget)
        return self._proposed.candidates

    def draw(self, builder: TreeBuilder, num_draws: int, coins: Coins) -> None:
        """Nothing: this drafter only looks things up."""

    def committed(self, token_ids: Sequence[int]) -> None:
        """Move along in the completions that agree, and note which ones were right."""
        if self._ended:
            return
        self._count(token_ids)
        with self._memory.lock:
            self._trail.advance(self._memory.index, token_ids)
        self._context.extend(token_ids)

    def end(self) -> None:
        """Hand in the credit and let go; afterwards nothing is proposed."""
        if self._ended:
            return
        self._ended = True
        if self._search is not None:
            self._search.cancel()
        if self._credit:
            self._drafter.credit({key: (counts.accepted, counts.rejected) for key, counts in self._credit.items()})
        self._trail, self._proposed, self._context = Trail(), _Proposed(Candidates(self._drafter.name)), [START]

    def _poll(self) -> None:
        if self._search is None or not self._search.done():
            return
        search, self._search = self._search, None
        _report(search)
        if search.exception() is None:
            self._nearness.set_hits(search.result())

    def _match(self, budget: int) -> _Proposed:
        index, nearness = self._memory.index, self._nearness
        nearness.refresh()
        found = index.match(self._context, _MAX_OCCURRENCES, nearness.log_weights)
        aligned = self._trail.align(index, self._context, found)
        slots = aligned.occurrences.slots
        log_weights = _LENGTH_WEIGHT * aligned.scores + nearness.log_weights[slots]
        self._trail.follow(index, aligned, log_weights)
        evidence = Evidence(
            continuations=index.continuations(aligned.occurrences.positions, min(budget, MAX_DEPTH)),
            log_weights=log_weights,
            lengths=np.round(aligned.scores).astype(np.int64),
            similarity_bins=np.searchsorted(_SIMILARITY_BINS, nearness.similarities[slots], side="right"),
        )
        expansion = expand(self._drafter.name, evidence, budget, _estimate, self._end_ids)
        witnesses = [index.sequence_ids[int(slots[row])] for row in expansion.best_rows]
        return _Proposed(expansion.candidates, witnesses)

    def _count(self, token_ids: Sequence[int]) -> None:
        """Credit along the path that was committed; siblings off the path were wrong, deeper nodes were not tried."""
        candidates, above = self._proposed.candidates, ROOT
        for token in token_ids:
            accepted = None
            for node, parent in enumerate(candidates.parents):
                if parent == above:
                    counts = self._credit.setdefault(self._proposed.completion_ids[node], _Credit())
                    if candidates.token_ids[node] == token:
                        accepted = node
                        counts.accepted += 1
                    else:
                        counts.rejected += 1
            if accepted is None:
                return
            above = accepted


def _report(work: Future[Any]) -> None:
    """A cache that fails costs the similarity, not the request; it is said once per failure."""
    if not work.cancelled() and work.exception() is not None:
        _log.warning("the speculation cache failed, drafting goes on without it: %s", work.exception())
