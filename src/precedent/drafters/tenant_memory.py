"""What recall keeps in memory of one tenant's completions, and how near each of them is to one live request."""

from __future__ import annotations

import math
import threading
from bisect import bisect_right
from collections.abc import Mapping, Sequence, Set
from typing import Protocol

import numpy as np

from precedent.cache.records import Hit, StoredCompletion
from precedent.compiled import Floats
from precedent.drafters.occurrences import HIT, Weights
from precedent.drafters.token_index import TokenIndex

EXACT_PROMPT = 1.5
"""Stands for the similarity of a completion that answered exactly this prompt: above every cosine."""

_COMPACT_ABOVE = 100_000

SIMILARITY_SCALE = 0.1
"""Difference in similarity that weighs as much as a factor e between votes."""


_EDGES = (0.5, 0.7, 0.85, 0.95, 1.2)
_MAX_NEAR = 128
_RECENCY = 1e-3


class CompletionSource(Protocol):
    """What recall needs of a speculation cache; all of it is called on the executor's thread."""

    def recall(self, query: str, *, tenant: str, tokenizer: str, k: int = 64) -> list[Hit]:
        """The completions whose requests are nearest to `query`."""

    def since(self, tenant: str, tokenizer: str, after_id: int = 0) -> list[StoredCompletion]:
        """The tenant's completions with a greater id."""

    def epoch(self) -> int:
        """Grows whenever completions were forgotten or evicted."""

    def credit(self, counts: Mapping[int, tuple[int, int]]) -> None:
        """Add (accepted, rejected) tokens to completions."""


class TenantMemory:
    """One tenant's completions: token index, exact prompts, and how often each was written back.

    Whoever reads `index` holds `lock`; `read` holds it for one completion at a time, so that decoding never waits long.
    """

    def __init__(self) -> None:
        self.lock = threading.Lock()
        self.index = TokenIndex()
        self._log_counts = np.zeros(64)
        self._slots_by_prompt: dict[str, list[int]] = {}
        self._reading = threading.Lock()
        self._last_id = 0
        self._epoch: int | None = None

    @property
    def mostly_forgotten(self) -> bool:
        """True when more room is taken by erased tokens than by kept ones: time for a fresh memory."""
        return self.index.num_forgotten > max(self.index.num_tokens, _COMPACT_ABOVE)

    def read(self, cache: CompletionSource, tenant: str, tokenizer: str) -> None:
        """Take in what was stored since the last time, and erase what was forgotten or evicted."""
        with self._reading:
            epoch = cache.epoch()
            if epoch != self._epoch and self._last_id:
                self._erase_all_but({completion.id for completion in cache.since(tenant, tokenizer)})
            self._epoch = epoch
            for completion in cache.since(tenant, tokenizer, self._last_id):
                with self.lock:
                    self._add(completion)
                self._last_id = max(self._last_id, completion.id)

    def slots_of_prompt(self, fingerprint: str) -> Sequence[int]:
        """Slots of the completions that answered exactly this prompt."""
        return self._slots_by_prompt.get(fingerprint, ())

    @property
    def log_counts(self) -> Floats:
        """Log of how often each completion was written back, `[at least num_slots]`; valid until the next change."""
        return self._log_counts

    def _erase_all_but(self, kept: Set[int]) -> None:
        gone = [completion_id for completion_id in self.index.sequence_ids if completion_id not in kept]
        with self.lock:
            self.index.forget(gone)

    def _add(self, completion: StoredCompletion) -> None:
        self.index.append(completion.id, completion.token_ids)
        slot = len(self.index.sequence_ids) - 1
        if slot >= self._log_counts.size:
            self._log_counts = np.concatenate([self._log_counts, np.zeros(self._log_counts.size)])
        self._log_counts[slot] = math.log(max(1, completion.count))
        if completion.prompt_fingerprint:
            self._slots_by_prompt.setdefault(completion.prompt_fingerprint, []).append(slot)


class Nearness:
    """How near the completions of a memory are to one live request, as log weights of their votes.

    Completions that are no hit lie as low as the farthest hit; without hits all are equal, but for those that answered
    exactly this prompt. `order` holds the positions of the nearest, so that a crowd cannot hide them; sorting them
    takes milliseconds, which is why a `Nearness` is made where the search runs.
    """

    def __init__(self, memory: TenantMemory, prompt: str, hits: Sequence[Hit] = ()) -> None:
        self._memory = memory
        floor = min((hit.similarity for hit in hits), default=0.0)
        near = {slot: hit.similarity for hit in hits if (slot := memory.index.slot(hit.completion_id)) is not None}
        near |= dict.fromkeys(memory.slots_of_prompt(prompt), EXACT_PROMPT)
        best = max(near.values(), default=floor)
        rows = [(slot, value, (value - best) / SIMILARITY_SCALE) for slot, value in sorted(near.items())]
        rows.insert(0, (-1, floor, (floor - best) / SIMILARITY_SCALE))
        self._hits = np.array([(slot, bisect_right(_EDGES, value), weight) for slot, value, weight in rows], dtype=HIT)
        self.order = memory.index.order_of(sorted(near, key=lambda slot: -near[slot])[:_MAX_NEAR])

    @property
    def weights(self) -> Weights:
        """The log weight of every completion, as the memory is now."""
        return Weights(self._hits, self._memory.log_counts, _RECENCY)
