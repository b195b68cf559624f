"""Which prompt to compute next. Prompts with a common prefix compute it only once."""

from __future__ import annotations

from collections.abc import Collection, Iterable

from precedent.engine.in_flight import InFlight
from precedent.target import common_prefix

WORTH_WAITING = 32
"""Shortest common prefix, in tokens, for which a prompt waits for another."""


def note_shared_prefix(request: InFlight, others: Iterable[InFlight]) -> None:
    """Record the prompt being computed with the longest common prefix.

    It must be of the same tenant, because timing would reveal another tenant's prompt.
    """
    for other in others:
        if other.asked.tenant == request.asked.tenant:
            shared = common_prefix(request.prompt_ids[:-1], other.prompt_ids[:-1])
            if shared > max(request.num_shared, WORTH_WAITING):
                request.num_shared, request.shares_with = shared, other


def next_prompt(prefilling: Collection[InFlight]) -> InFlight:
    """The first prompt that waits for no other. One always exists: a request waits only for earlier ones."""
    return next(request for request in prefilling if not _waits(request, prefilling))


def _waits(request: InFlight, prefilling: Collection[InFlight]) -> bool:
    other = request.shares_with
    if request.started or other is None or other.num_prefilled >= request.num_shared:
        return False
    return other in prefilling
