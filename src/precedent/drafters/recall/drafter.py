"""The drafter that recalls the tenant's stored completions, weighted by the similarity of their requests.

Similarity is a weight, never a filter. At step 0 it decides alone, because the answer has no token to match yet; later
the longest match counts for more, and similarity breaks ties.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Executor, Future
from math import isfinite
from typing import TYPE_CHECKING, Any

import numpy as np

from precedent.cache import Hit, prompt_fingerprint
from precedent.cache.records import DEFAULT_MAX_INDEX_BYTES
from precedent.drafters.matching.occurrences import VoteWeights
from precedent.drafters.matching.search import SearchSession
from precedent.drafters.matching.vote_tree import SIMILARITY_BINS, VotePrior
from precedent.drafters.outcomes import outcomes_of_votes
from precedent.drafters.recall.tenant_memory import TenantMemories, TenantMemory
from precedent.drafters.recall.weights import Nearness, kinship
from precedent.drafters.request import Request
from precedent.errors import CacheError
from precedent.runtime.background import Background
from precedent.runtime.compiled import Int32s
from precedent.runtime.fence import Fence

if TYPE_CHECKING:
    from precedent.cache import SpeculationCache

CACHE = "the speculation cache"
"""The calls to the cache among the aids of an engine: its search, and the credit of completions."""

Report = Callable[[Future[Any]], None]
"""Called with a finished or cancelled call to the cache."""

WARM_UP = "warm-up"
"""A query whose nearest completions nobody needs: a search reads the vectors."""

_MAX_OCCURRENCES = 192
_NUM_HITS = 256
_NUM_KIN = 64

# Fitted on recorded agent traces, without those on which figures are reported.
_PRIOR = VotePrior(
    offset=-1.65, odds=0.87, length=0.59, number=0.09, similarity=0.09, sure_from=SIMILARITY_BINS - 1.0, doubt=0.1
)


class RecallDrafter:
    """Proposes how the tenant's stored completions continued from the current output.

    `tokenizer` is the fingerprint under which completions are stored. `executor` embeds, searches and reads new
    completions, in parallel to decoding. `max_bytes` bounds the memories of all tenants together. Calls to the cache
    stand behind `fence`: a failure costs recall's weights, but not the request. `report` is called with every finished
    one.
    """

    name = "recall"

    def __init__(
        self,
        cache: SpeculationCache,
        tokenizer: str,
        executor: Executor,
        *,
        max_bytes: int = DEFAULT_MAX_INDEX_BYTES,
        report: Report | None = None,
        fence: Fence | None = None,
    ) -> None:
        self._cache, self._tokenizer, self._executor = cache, tokenizer, executor
        self._report, self._fence = report, fence or Fence(CACHE)
        self._memories = TenantMemories(cache, tokenizer, max_bytes)

    def begin(self, request: Request) -> RecallSession:
        """Start embedding and searching; meanwhile `match` uses what earlier requests have read."""
        memory = self._memories.of(request.tenant)
        prompt = prompt_fingerprint(request.prompt_ids)
        search = self._submit(self._search, memory, request, prompt)
        return RecallSession(self, memory, request, Nearness(memory, prompt), search)

    def close(self) -> None:
        """Wait for pending writes, and drop the indexes."""
        self._fence.settle()
        self._memories.close()

    def erase_gone(self) -> None:
        """Erase forgotten completions from every memory, including those of running requests. Raises CacheError."""
        self._memories.erase_gone()

    def read_ahead(self, tenant: str) -> None:
        """Read a tenant's completions and their vectors now, before its first request. Raises CacheError."""
        self._memories.read(self._memories.of(tenant))
        self._cache.recall(WARM_UP, tenant=tenant, tokenizer=self._tokenizer, k=1)

    def held(self) -> tuple[int, int]:
        """Completions of all tenants that are in memory, and about how many bytes they take there."""
        return self._memories.held()

    def ended(self, tenant: str, counts: Mapping[int, tuple[int, int]]) -> None:
        """Pass a finished request's credit to the cache and tidy the memory, without waiting for the disk."""
        if counts:
            self._submit(self._cache.credit, counts)
        if self._memories.need_tidying(tenant):
            self._submit(self._memories.tidy, tenant)

    def _submit(self, work: Callable[..., Any], *values: Any) -> Future[Any] | None:
        """Call the cache on another thread; None while its fence has switched it off."""
        future = self._fence.submit(self._executor, work, *values)
        if future is not None and self._report is not None:
            future.add_done_callback(self._report)
        return future

    def _search(self, memory: TenantMemory, request: Request, prompt: str) -> Nearness:
        hits = self._read_and_recall(memory, request)
        near = self._cache.among([hit.completion_id for hit in hits[:_NUM_KIN]], tenant=request.tenant) if hits else []
        return Nearness(memory, prompt, hits, kinship(near, request))

    def _read_and_recall(self, memory: TenantMemory, request: Request) -> list[Hit]:
        """Return the nearest completions and update the memory; the first time, do both in parallel."""
        if memory.unread and request.query:
            with Background(1, "precedent-read") as beside:
                reading = beside.submit(self._memories.read, memory)
                hits = self._recalled(request)
                reading.result()
                return hits
        self._memories.read(memory)
        return self._recalled(request)

    def _recalled(self, request: Request) -> list[Hit]:
        if not request.query:
            return []
        hits = self._cache.recall(request.query, tenant=request.tenant, tokenizer=self._tokenizer, k=_NUM_HITS)
        if len(hits) > _NUM_HITS or not all(isfinite(hit.similarity) for hit in hits):
            raise CacheError(f"expected at most {_NUM_HITS} hits with finite similarities, got {len(hits)}")
        return hits


class RecallSession(SearchSession):
    """Follows one output through its tenant's memory; unweighted until recall is done."""

    def __init__(
        self,
        drafter: RecallDrafter,
        memory: TenantMemory,
        request: Request,
        nearness: Nearness,
        search: Future[Nearness] | None,
    ) -> None:
        super().__init__(drafter.name, request, memory.index, _PRIOR, _MAX_OCCURRENCES)
        self.lock = memory.lock
        self._drafter, self._tenant, self._nearness, self._search = drafter, request.tenant, nearness, search
        self._credit: dict[int, tuple[int, int]] = {}

    def weighted(self) -> tuple[VoteWeights, Int32s]:
        """As the search says once it is done."""
        if self._search is not None and self._search.done():
            search, self._search = self._search, None
            if search.exception() is None:
                self._nearness = search.result()
        return self._nearness.weights, self._nearness.order

    def committed(self, token_ids: Sequence[int]) -> None:
        """Advance in the completions that agree with the committed tokens, and credit those that were right.

        Siblings of the committed path were wrong, and deeper nodes were not tested.
        """
        if self._found is not None and self.index is not None:
            found, ids, committed = self._found, self.index.sequence_ids, np.array(token_ids, dtype=np.int32)
            slots, right = outcomes_of_votes(found.nodes, found.heaviest, found.votes, committed)
            for slot, accepted in zip(slots.tolist(), right.tolist(), strict=True):
                before = self._credit.get(ids[slot], (0, 0))
                self._credit[ids[slot]] = (before[0] + accepted, before[1] + (not accepted))
        super().committed(token_ids)

    def end(self) -> None:
        """Pass on the credit and release everything; the session proposes nothing afterwards."""
        if self.index is None:
            return
        if self._search is not None:
            self._search.cancel()
        self._drafter.ended(self._tenant, self._credit)
        super().end()
