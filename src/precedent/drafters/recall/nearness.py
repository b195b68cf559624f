"""How near each of a tenant's completions is to one request."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Mapping, Sequence
from types import MappingProxyType

import numpy as np

from precedent.cache import Hit
from precedent.drafters.matching.occurrences import HIT, Weights
from precedent.drafters.recall.tenant_memory import TenantMemory

EXACT_PROMPT = 1.5
"""Similarity assigned to a completion that answered exactly this prompt: above every cosine."""

SIMILARITY_SCALE = 0.1
"""Difference in similarity that corresponds to a factor of e between votes."""

_EDGES = (0.5, 0.7, 0.85, 0.95, 1.2)
_MAX_NEAR = 128
_RECENCY = 1e-3
_NO_KIN: Mapping[int, float] = MappingProxyType({})


class Nearness:
    """How near the completions of a memory are to one request, as log weights of their votes.

    Completions that are not hits weigh as little as the farthest hit. Without hits all weigh the same, except those
    that answered exactly this prompt. `kinship` adds to the log weight of a hit. `order` holds the positions of the
    nearest, so that a large memory cannot hide them. Sorting them takes milliseconds, so a `Nearness` is made on the
    thread of the search.
    """

    def __init__(
        self, memory: TenantMemory, prompt: str, hits: Sequence[Hit] = (), kinship: Mapping[int, float] = _NO_KIN
    ) -> None:
        self._memory = memory
        floor = min((hit.similarity for hit in hits), default=0.0)
        near = {slot: hit.similarity for hit in hits if (slot := memory.index.slot(hit.completion_id)) is not None}
        near |= dict.fromkeys(memory.slots_of_prompt(prompt), EXACT_PROMPT)
        best = max(near.values(), default=floor)
        gains = {memory.index.slot(completion_id): gain for completion_id, gain in kinship.items()}
        rows = [(s, value, (value - best) / SIMILARITY_SCALE + gains.get(s, 0.0)) for s, value in sorted(near.items())]
        rows.insert(0, (-1, floor, (floor - best) / SIMILARITY_SCALE))
        self._hits = np.array([(slot, bisect_right(_EDGES, value), weight) for slot, value, weight in rows], dtype=HIT)
        self.order = memory.index.order_of(sorted(near, key=lambda slot: -near[slot])[:_MAX_NEAR])

    @property
    def weights(self) -> Weights:
        """The log weight of every completion in the memory's current state."""
        return Weights(self._hits, self._memory.log_counts, _RECENCY)
