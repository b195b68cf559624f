"""What recall keeps in memory of each tenant's completions, all tenants together within one bound.

Only the rows of the cache outlive the process: they are read and sorted at a tenant's first request.
"""

from __future__ import annotations

import threading
import weakref
from collections import OrderedDict
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

import numpy as np

from precedent.cache.records import DEFAULT_MAX_INDEX_BYTES, Ids
from precedent.drafters.matching.token_index import TokenIndex
from precedent.runtime.compiled import Floats, Int32s

if TYPE_CHECKING:
    from precedent.cache import SpeculationCache

KEPT_SHARE = 0.875
"""Share of its bound to which an oversized memory shrinks, so that it shrinks rarely."""

_COMPACT_ABOVE = 100_000
_BYTES_PER_TOKEN = 12
_BYTES_PER_COMPLETION = 450  # list and dictionary entries, measured


class TenantMemory:
    """One tenant's completions: token index, exact prompts, and how often each was written back.

    Hold `lock` while reading `index`. It is never held for longer than a copy takes, so decoding does not wait.
    `log_counts` `[num_slots]` is the log of how often each completion was written back, valid until the next change.
    """

    def __init__(self, max_bytes: int = DEFAULT_MAX_INDEX_BYTES, tenant: str = "default") -> None:
        self.tenant = tenant
        self.lock = threading.Lock()
        self.index = TokenIndex()
        self.log_counts = np.zeros(0)
        self._max_bytes = max_bytes
        self._slots_by_prompt: dict[bytes, list[int]] = {}
        self._reading = threading.Lock()  # held while the index changes
        self._last_id = 0
        self._epoch: int | None = None

    @property
    def unread(self) -> bool:
        """True until the completions are first read, which takes two seconds for 50,000 of them."""
        return self._epoch is None

    @property
    def num_bytes(self) -> int:
        """Estimated bytes in use, as counted against the bound."""
        return cost(len(self.index.sequence_ids), self.index.num_tokens + self.index.num_forgotten)

    @property
    def outgrown(self) -> bool:
        """True if it exceeds its bound or holds more erased tokens than kept ones; `renewed` mends that."""
        forgotten = self.index.num_forgotten > max(self.index.num_tokens, _COMPACT_ABOVE)
        return forgotten or self.num_bytes > self._max_bytes

    def read(self, cache: SpeculationCache, tokenizer: str) -> None:
        """Add completions stored since the last call, and erase those forgotten or evicted."""
        with self._reading:
            if self._epoch is None:
                self._epoch = cache.epoch()
            else:
                self._erase_gone(self._epoch, cache, tokenizer)
            completions = cache.since(self.tenant, tokenizer, self._last_id)
            lengths = np.array([len(completion.token_ids) for completion in completions], dtype=np.int64)
            fitting = completions[_newest(lengths, self._max_bytes) :]
            if fitting:
                self._add(
                    {completion.id: completion.token_ids for completion in fitting},
                    np.log([max(1, completion.count) for completion in fitting]),
                    [completion.prompt_fingerprint.encode() for completion in fitting],
                )
            self._last_id = max([self._last_id, *(completion.id for completion in completions)])

    def erase_gone(self, cache: SpeculationCache, tokenizer: str) -> None:
        """Only erase forgotten and evicted completions, for a memory that running requests still use."""
        with self._reading:
            if self._epoch is not None:
                self._erase_gone(self._epoch, cache, tokenizer)

    def renewed(self) -> TenantMemory:
        """A copy without erased completions and, if it exceeds the bound, without the oldest ones."""
        with self._reading:
            held = dict(sorted(self.index.lengths().items()))
            stays = list(held)[_newest(np.array(list(held.values()), dtype=np.int64), self._max_bytes) :]
            fresh = TenantMemory(self._max_bytes, self.tenant)
            fresh._last_id, fresh._epoch = self._last_id, self._epoch
            prompts = {slot: prompt for prompt, slots in self._slots_by_prompt.items() for slot in slots}
            slots = [slot for key in stays if (slot := self.index.slot(key)) is not None]
            sequences = {key: self.index.tokens(key) for key in stays}
            fresh._add(sequences, self.log_counts[slots], [prompts.get(slot, b"") for slot in slots])
            return fresh

    def slots_of_prompt(self, fingerprint: str) -> Sequence[int]:
        """Slots of the completions that answered exactly this prompt."""
        return self._slots_by_prompt.get(fingerprint.encode(), ())

    def _erase_gone(self, epoch: int, cache: SpeculationCache, tokenizer: str) -> None:
        now = cache.epoch()
        if epoch == now:
            return
        gone = self.index.lengths().keys() - set(cache.ids(self.tenant, tokenizer).tolist())
        with self.lock:
            self.index.forget(gone)
        self._epoch = now

    def _add(
        self, sequences: Mapping[int, Sequence[int] | Int32s], log_counts: Floats, prompts: Sequence[bytes]
    ) -> None:
        """Add completions, with how often each was written back and its prompt's fingerprint (b"": unknown)."""
        grown = self.index.grown(sequences)
        with self.lock:
            slots = self.index.take(grown)
            self.log_counts = np.concatenate([self.log_counts, log_counts])
            for slot, prompt in zip(slots, prompts, strict=True):
                if prompt:
                    self._slots_by_prompt.setdefault(prompt, []).append(slot)


def cost(num_completions: int, num_tokens: int) -> int:
    """Estimated bytes of memory for that many completions with that many tokens in total."""
    return num_completions * _BYTES_PER_COMPLETION + num_tokens * _BYTES_PER_TOKEN


def _newest(lengths: Ids, max_bytes: int) -> int:
    """Index of the first completion to keep: 0 if all fit, otherwise such that the newest leave room to grow."""
    costs = np.cumsum((lengths * _BYTES_PER_TOKEN + _BYTES_PER_COMPLETION)[::-1])
    if not costs.size or costs[-1] <= max_bytes:
        return 0
    return int(lengths.size - np.searchsorted(costs, KEPT_SHARE * max_bytes, side="right"))


class TenantMemories:
    """Creates a tenant's memory on first use, and evicts the least recently used ones.

    An evicted memory still serves the requests that began with it, and forgotten completions are erased from it too.
    """

    def __init__(self, cache: SpeculationCache, tokenizer: str, max_bytes: int) -> None:
        self._cache, self._tokenizer, self._max_bytes = cache, tokenizer, max_bytes
        self._lock = threading.Lock()
        self._current: OrderedDict[str, TenantMemory] = OrderedDict()
        self._in_use: weakref.WeakSet[TenantMemory] = weakref.WeakSet()  # with evicted ones

    def of(self, tenant: str) -> TenantMemory:
        """The tenant's memory, which may still be empty."""
        with self._lock:
            if tenant not in self._current:
                self._hold(TenantMemory(self._max_bytes, tenant))
            self._current.move_to_end(tenant)
            return self._current[tenant]

    def read(self, memory: TenantMemory) -> None:
        """Update a tenant's memory, and erase forgotten completions from the evicted ones."""
        memory.read(self._cache, self._tokenizer)
        self.erase_gone(memory.tenant)

    def erase_gone(self, tenant: str | None = None) -> None:
        """Erase forgotten and evicted completions from all memories, or a tenant's. Raises CacheError."""
        with self._lock:
            memories = [memory for memory in self._in_use if tenant in (None, memory.tenant)]
        for memory in memories:
            memory.erase_gone(self._cache, self._tokenizer)

    def held(self) -> tuple[int, int]:
        """Completions in all memories, and their estimated bytes."""
        with self._lock:
            memories = list(self._current.values())
        return sum(len(memory.index) for memory in memories), sum(memory.num_bytes for memory in memories)

    def need_tidying(self, tenant: str) -> bool:
        """Whether `tidy` has anything to do; cheap to call."""
        with self._lock:
            memory = self._current.get(tenant)
            return memory is not None and (memory.outgrown or self._bytes() > self._max_bytes)

    def tidy(self, tenant: str) -> None:
        """Shrink a tenant's memory that has outgrown its bound, and evict others until all are within it."""
        memory = self.of(tenant)
        fresh = memory.renewed() if memory.outgrown else memory
        with self._lock:
            if self._current.get(tenant) is memory:
                self._hold(fresh)
            for other in [name for name in self._current if name != tenant]:
                if self._bytes() > self._max_bytes:
                    del self._current[other]

    def close(self) -> None:
        """Drop all memories."""
        with self._lock:
            self._current.clear()

    def _hold(self, memory: TenantMemory) -> None:
        self._current[memory.tenant] = memory
        self._in_use.add(memory)

    def _bytes(self) -> int:
        return sum(memory.num_bytes for memory in self._current.values())
