"""What recall keeps in memory of each tenant's completions, all tenants together within one bound.

Only the rows of the cache outlive the process: they are read and sorted at a tenant's first request.
"""

from __future__ import annotations

import math
import threading
import weakref
from collections import OrderedDict
from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np

from precedent.cache import Completion
from precedent.cache.records import DEFAULT_MAX_INDEX_BYTES, Ids
from precedent.drafters.matching.token_index import SortedText, TokenIndex, sorted_text
from precedent.runtime.compiled import Floats

if TYPE_CHECKING:
    from precedent.cache import SpeculationCache

SORTED_APART = 4096
"""More new tokens than this are sorted separately, without blocking `match`."""

KEPT_SHARE = 0.875
"""Share of its bound to which an oversized memory shrinks, so that it shrinks rarely."""

_COMPACT_ABOVE = 100_000
_BYTES_PER_TOKEN = 12
_BYTES_PER_COMPLETION = 450  # list and dictionary entries, measured


class TenantMemory:
    """One tenant's completions: token index, exact prompts, and how often each was written back.

    Hold `lock` while reading `index`. It is never held for longer than a copy takes, so decoding does not wait.
    """

    def __init__(self, max_bytes: int = DEFAULT_MAX_INDEX_BYTES) -> None:
        self.lock = threading.Lock()
        self.index = TokenIndex()
        self._max_bytes = max_bytes
        self._log_counts = np.zeros(64)
        self._slots_by_prompt: dict[bytes, list[int]] = {}
        self._reading = threading.Lock()  # held while the index changes
        self._last_id = 0
        self._epoch: int | None = None

    @property
    def unread(self) -> bool:
        """True until the completions are first read, which takes two seconds for 50,000 of them."""
        return self._epoch is None

    @property
    def num_completions(self) -> int:
        """Completions in memory, without those that were erased."""
        return self.index.num_sequences

    @property
    def num_bytes(self) -> int:
        """Estimated bytes in use, as counted against the bound."""
        return cost(len(self.index.sequence_ids), self.index.num_tokens + self.index.num_forgotten)

    @property
    def needs_tidying(self) -> bool:
        """True if `tidy` or `renewed` has anything to do."""
        return self.index.num_runs > 1 or self.outgrown

    @property
    def outgrown(self) -> bool:
        """True if it exceeds its bound or holds more erased tokens than kept ones; `renewed` mends that."""
        forgotten = self.index.num_forgotten > max(self.index.num_tokens, _COMPACT_ABOVE)
        return forgotten or self.num_bytes > self._max_bytes

    def read(self, cache: SpeculationCache, tenant: str, tokenizer: str) -> None:
        """Add completions stored since the last call, and erase those forgotten or evicted."""
        with self._reading:
            if self._epoch is None:
                self._epoch = cache.epoch()
            else:
                self._erase_gone(self._epoch, cache, tenant, tokenizer)
            self._add(cache.since(tenant, tokenizer, self._last_id))

    def erase_gone(self, cache: SpeculationCache, tenant: str, tokenizer: str) -> None:
        """Only erase forgotten and evicted completions, for a memory that running requests still use."""
        with self._reading:
            if self._epoch is not None:
                self._erase_gone(self._epoch, cache, tenant, tokenizer)

    def tidy(self) -> None:
        """Merge several runs into one order."""
        with self._reading:
            merged = self.index.merged_order()
            with self.lock:
                self.index.take_order(merged)

    def renewed(self) -> TenantMemory:
        """A copy without erased completions and, if it exceeds the bound, without the oldest ones."""
        with self._reading:
            held = dict(sorted(self.index.lengths().items()))
            stays = list(held)[_newest(np.array(list(held.values()), dtype=np.int64), self._max_bytes) :]
            fresh = TenantMemory(self._max_bytes)
            fresh._last_id, fresh._epoch = self._last_id, self._epoch
            prompts = {slot: prompt for prompt, slots in self._slots_by_prompt.items() for slot in slots}
            slots = [slot for key in stays if (slot := self.index.slot(key)) is not None]
            text = sorted_text({key: self.index.tokens(key) for key in stays})
            fresh._load(text, self._log_counts[slots], [prompts.get(slot, b"") for slot in slots])
            return fresh

    def slots_of_prompt(self, fingerprint: str) -> Sequence[int]:
        """Slots of the completions that answered exactly this prompt."""
        return self._slots_by_prompt.get(fingerprint.encode(), ())

    @property
    def log_counts(self) -> Floats:
        """Log of how often each completion was written back, `[at least num_slots]`; valid until the next change."""
        return self._log_counts

    def _erase_gone(self, epoch: int, cache: SpeculationCache, tenant: str, tokenizer: str) -> None:
        """Erase the completions removed after `epoch`."""
        now = cache.epoch()
        if epoch == now:
            return
        gone = self.index.lengths().keys() - set(cache.ids(tenant, tokenizer).tolist())
        with self.lock:
            self.index.forget(gone)
        self._epoch = now

    def _add(self, completions: Sequence[Completion]) -> None:
        lengths = np.array([len(completion.token_ids) for completion in completions], dtype=np.int64)
        fitting = completions[_newest(lengths, self._max_bytes) :]
        if lengths.sum() > SORTED_APART:
            text = sorted_text({completion.id: completion.token_ids for completion in fitting})
            self._load(text, *_marks(fitting))
        else:
            for completion in fitting:
                with self.lock:
                    self.index.append(completion.id, completion.token_ids)
                    self._note(len(self.index.sequence_ids) - 1, *_marks([completion]))
        self._last_id = max([self._last_id, *(completion.id for completion in completions)])

    def _load(self, text: SortedText, log_counts: Floats, prompts: Sequence[bytes]) -> None:
        with self.lock:
            self._note(self.index.load(text).start, log_counts, prompts)

    def _note(self, slot: int, log_counts: Floats, prompts: Sequence[bytes]) -> None:
        """Record how often the completions from `slot` on were written back, and for which prompts."""
        room = slot + log_counts.size - self._log_counts.size
        if room > 0:
            self._log_counts = np.concatenate([self._log_counts, np.zeros(max(room, self._log_counts.size))])
        self._log_counts[slot : slot + log_counts.size] = log_counts
        for number, prompt in enumerate(prompts, slot):
            if prompt in self._slots_by_prompt:
                self._slots_by_prompt[prompt].append(number)
            elif prompt:
                self._slots_by_prompt[prompt] = [number]


def cost(num_completions: int, num_tokens: int) -> int:
    """Estimated bytes of memory for that many completions with that many tokens in total."""
    return num_completions * _BYTES_PER_COMPLETION + num_tokens * _BYTES_PER_TOKEN


def _newest(lengths: Ids, max_bytes: int) -> int:
    """Index of the first completion to keep: 0 if all fit, otherwise such that the newest leave room to grow."""
    costs = np.cumsum((lengths * _BYTES_PER_TOKEN + _BYTES_PER_COMPLETION)[::-1])
    if not costs.size or costs[-1] <= max_bytes:
        return 0
    return int(lengths.size - np.searchsorted(costs, KEPT_SHARE * max_bytes, side="right"))


def _marks(completions: Sequence[Completion]) -> tuple[Floats, list[bytes]]:
    """The log of how often each completion was written back, and its prompt's fingerprint."""
    counts = [math.log(max(1, completion.count)) for completion in completions]
    return np.array(counts), [completion.prompt_fingerprint.encode() for completion in completions]


class TenantMemories:
    """Creates a tenant's memory on first use, and evicts the least recently used ones.

    An evicted memory still serves the requests that began with it, and forgotten completions are erased from it too.
    """

    def __init__(self, cache: SpeculationCache, tokenizer: str, max_bytes: int) -> None:
        self._cache, self._tokenizer = cache, tokenizer
        self._max_bytes = max_bytes
        self._lock = threading.Lock()
        self._memories: OrderedDict[str, TenantMemory] = OrderedDict()
        self._let_go: dict[str, weakref.WeakSet[TenantMemory]] = {}

    def of(self, tenant: str) -> TenantMemory:
        """The tenant's memory, which may still be empty."""
        with self._lock:
            if tenant not in self._memories:
                self._memories[tenant] = TenantMemory(self._max_bytes)
            self._memories.move_to_end(tenant)
            return self._memories[tenant]

    def read(self, memory: TenantMemory, tenant: str) -> None:
        """Update a tenant's memory, and erase forgotten completions from the evicted ones."""
        memory.read(self._cache, tenant, self._tokenizer)
        with self._lock:
            evicted = list(self._let_go.get(tenant, ()))
        for old in evicted:
            old.erase_gone(self._cache, tenant, self._tokenizer)

    def erase_gone(self) -> None:
        """Erase forgotten and evicted completions from all memories. Raises CacheError."""
        with self._lock:
            current = list(self._memories.items())
            old = [(tenant, memory) for tenant, memories in self._let_go.items() for memory in memories]
        for tenant, memory in current + old:
            memory.erase_gone(self._cache, tenant, self._tokenizer)

    def held(self) -> tuple[int, int]:
        """Completions in all memories, and their estimated bytes."""
        with self._lock:
            memories = list(self._memories.values())
        return sum(memory.num_completions for memory in memories), sum(memory.num_bytes for memory in memories)

    def need_tidying(self, tenant: str) -> bool:
        """Whether `tidy` has anything to do; cheap to call."""
        with self._lock:
            memory = self._memories.get(tenant)
            held = sum(memory.num_bytes for memory in self._memories.values())
        return memory is not None and (memory.needs_tidying or held > self._max_bytes)

    def tidy(self, tenant: str) -> None:
        """Merge a tenant's new completions, and evict memories until all are within the bound."""
        memory = self.of(tenant)
        if memory.outgrown:
            self._replace(tenant, memory, memory.renewed())
        while (least_used := self._one_too_many(tenant)) is not None:
            self._replace(*least_used, None)
        self.of(tenant).tidy()

    def close(self) -> None:
        """Drop all memories."""
        with self._lock:
            self._memories.clear()

    def _one_too_many(self, tenant: str) -> tuple[str, TenantMemory] | None:
        """The least recently used memory except that of `tenant`, if all together exceed the bound."""
        with self._lock:
            held = sum(memory.num_bytes for memory in self._memories.values())
            others = ((name, memory) for name, memory in self._memories.items() if name != tenant)
            return next(others, None) if held > self._max_bytes else None

    def _replace(self, tenant: str, memory: TenantMemory, fresh: TenantMemory | None) -> None:
        with self._lock:
            if self._memories.get(tenant) is not memory:
                return
            self._let_go.setdefault(tenant, weakref.WeakSet()).add(memory)
            if fresh is None:
                del self._memories[tenant]
            else:
                self._memories[tenant] = fresh
