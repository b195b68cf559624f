"""The log weights of a tenant's completions in the votes of one request.

Similarity of the requests counts most. The same workflow step, the same tools, a good record and recency decide between
completions of similar requests.
"""

from __future__ import annotations

import math
from bisect import bisect_right
from collections.abc import Mapping, Sequence
from types import MappingProxyType

import numpy as np

from precedent.cache import Completion, Hit
from precedent.drafters.matching.occurrences import HIT, VoteWeights
from precedent.drafters.recall.tenant_memory import TenantMemory
from precedent.drafters.request import Request

SAME_STEP = 0.5
"""Log weight of the same workflow step: as much as 0.05 of cosine similarity."""

SAME_TOOLS = 0.5
"""Log weight of identical tool schemas."""

RECORD = 0.3
"""Log weight of a record with e times as many accepted as rejected tokens, and the limit for any record."""

FIRST_TOKENS = 8
"""Accepted and rejected tokens added to every record, because a few tokens say little."""

YOUTH = 0.2
"""Difference in log weight between the newest and the oldest of the nearest completions."""


def kinship(near: Sequence[Completion], request: Request) -> dict[int, float]:
    """The log weight that each completion gains or loses, by id."""
    by_age = sorted(completion.id for completion in near)
    rank = {completion_id: place / len(near) for place, completion_id in enumerate(by_age, start=1)}
    return {one.id: _kin(one, request) + _record(one) + YOUTH * rank[one.id] for one in near}


def _kin(completion: Completion, request: Request) -> float:
    same_step = bool(request.workflow_step) and completion.workflow_step == request.workflow_step
    same_tools = bool(request.tools) and completion.tools == request.tools
    return SAME_STEP * same_step + SAME_TOOLS * same_tools


def _record(completion: Completion) -> float:
    odds = (completion.accepted + FIRST_TOKENS) / (completion.rejected + FIRST_TOKENS)
    return max(-RECORD, min(RECORD, RECORD * math.log(odds)))


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
    def weights(self) -> VoteWeights:
        """The log weight of every completion in the memory's current state."""
        return VoteWeights(self._hits, self._memory.log_counts, _RECENCY)
