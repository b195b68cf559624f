"""The separate memories of all tenants, kept together within one bound."""

from __future__ import annotations

import logging
import threading
import weakref
from collections import OrderedDict
from collections.abc import Callable

from precedent.cache.segments import Partition
from precedent.drafters.recall.tenant_memory import CompletionSource, TenantMemory
from precedent.errors import CacheError

_log = logging.getLogger(__name__)

Partitions = Callable[[str, str], Partition | None]


class TenantMemories:
    """Creates a tenant's memory on first use, and evicts the least recently used ones.

    An evicted memory still serves the requests that began with it, and forgotten completions are erased from it too.
    """

    def __init__(self, cache: CompletionSource, tokenizer: str, partitions: Partitions | None, max_bytes: int) -> None:
        self._cache, self._tokenizer, self._partitions = cache, tokenizer, partitions
        self._max_bytes = max_bytes
        self._lock = threading.Lock()
        self._memories: OrderedDict[str, TenantMemory] = OrderedDict()
        self._let_go: dict[str, weakref.WeakSet[TenantMemory]] = {}

    def of(self, tenant: str) -> TenantMemory:
        """The tenant's memory, which may still be empty."""
        with self._lock:
            if tenant not in self._memories:
                partition = None if self._partitions is None else self._partitions(tenant, self._tokenizer)
                self._memories[tenant] = TenantMemory(partition, self._max_bytes)
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
        """Merge and seal a tenant's new completions, and evict memories until all are within the bound."""
        memory = self.of(tenant)
        if memory.outgrown:
            self._replace(tenant, memory, memory.renewed())
        while (least_used := self._one_too_many(tenant)) is not None:
            self._replace(*least_used, None)
        self.of(tenant).tidy()

    def close(self) -> None:
        """Seal completions that are in no segment yet, and drop all memories."""
        with self._lock:
            memories = list(self._memories.items())
            self._memories.clear()
        for tenant, memory in memories:
            try:
                memory.seal()
            except (CacheError, OSError) as error:
                _log.info("the index of tenant %r was not sealed and will be rebuilt from its rows: %s", tenant, error)

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
