"""What recall keeps in memory of one tenant's completions, and how near each of them is to one live request."""

from __future__ import annotations

import math
import threading
from array import array
from collections.abc import Mapping, Sequence, Set
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from precedent.cache.records import Hit, StoredCompletion
from precedent.drafters.token_index import TokenIndex

EXACT_PROMPT = 1.5
"""Stands for the similarity of a completion that answered exactly this prompt: above every cosine."""

_COMPACT_ABOVE = 100_000

SIMILARITY_SCALE = 0.1
"""Difference in similarity that weighs as much as a factor e between votes."""


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
        self._log_counts = array("d")
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

    def log_counts(self) -> NDArray[np.float64]:
        """Log of how often each completion was written back, `[num_slots]`."""
        return np.array(self._log_counts, dtype=np.float64)

    def _erase_all_but(self, kept: Set[int]) -> None:
        for completion_id in self.index.sequence_ids:
            if completion_id in self.index and completion_id not in kept:
                with self.lock:
                    self.index.forget(completion_id)

    def _add(self, completion: StoredCompletion) -> None:
        self.index.append(completion.id, completion.token_ids)
        self._log_counts.append(math.log(max(1, completion.count)))
        if completion.prompt_fingerprint:
            slots = self._slots_by_prompt.setdefault(completion.prompt_fingerprint, [])
            slots.append(len(self._log_counts) - 1)


class Nearness:
    """The similarity of every completion of a memory to one live request, and the log weight that follows from it.

    Completions that are no hit lie as low as the farthest hit; before the search is done all are equal, but for those
    that answered exactly this prompt.
    """

    def __init__(self, memory: TenantMemory, prompt_fingerprint: str) -> None:
        self._memory, self._prompt_fingerprint = memory, prompt_fingerprint
        self._hits: Sequence[Hit] = ()
        self.similarities = np.empty(0)
        self.log_weights = np.empty(0)

    def set_hits(self, hits: Sequence[Hit]) -> None:
        """Weigh by these from now on."""
        self._hits = hits
        self._compute()

    def refresh(self) -> None:
        """Cover completions that were read meanwhile."""
        if self.similarities.size < len(self._memory.index.sequence_ids):
            self._compute()

    def _compute(self) -> None:
        index = self._memory.index
        floor = min((hit.similarity for hit in self._hits), default=0.0)
        self.similarities = np.full(len(index.sequence_ids), floor)
        for hit in self._hits:
            slot = index.slot(hit.completion_id)
            if slot is not None:
                self.similarities[slot] = hit.similarity
        self.similarities[list(self._memory.slots_of_prompt(self._prompt_fingerprint))] = EXACT_PROMPT
        below_best = self.similarities - self.similarities.max(initial=0.0)
        self.log_weights = below_best / SIMILARITY_SCALE + self._memory.log_counts()
