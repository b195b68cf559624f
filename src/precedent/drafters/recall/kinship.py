"""What makes a completion relevant besides similarity: the same step, the same tools, a good record, recency.

These weights are small compared to similarity and matches; they decide between completions of similar requests.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

from precedent.cache import Completion
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
