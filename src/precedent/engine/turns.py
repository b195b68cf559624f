"""Whose prompt is computed next. Prompts that begin alike compute their common beginning once."""

from __future__ import annotations

from collections.abc import Collection, Iterable

from precedent.engine.in_flight import InFlight
from precedent.target import common_prefix

WORTH_WAITING = 32
"""Common tokens below which a prompt does not wait for another's."""


def note_shared_prefix(request: InFlight, others: Iterable[InFlight]) -> None:
    """Remember the prompt at work that has the longest beginning in common; of the same tenant, for time would tell."""
    for other in others:
        if other.asked.tenant == request.asked.tenant:
            shared = common_prefix(request.prompt_ids[:-1], other.prompt_ids[:-1])
            if shared > max(request.num_shared, WORTH_WAITING):
                request.num_shared, request.shares_with = shared, other


def next_prompt(prefilling: Collection[InFlight]) -> InFlight:
    """The first that waits for nobody's beginning. There is one: a request waits only for those that came before it."""
    return next(request for request in prefilling if not _waits(request, prefilling))


def _waits(request: InFlight, prefilling: Collection[InFlight]) -> bool:
    other = request.shares_with
    if request.started or other is None or other.num_prefilled >= request.num_shared:
        return False
    return other in prefilling
