"""What a drafting service counted since it was opened."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field


@dataclass(frozen=True, slots=True)
class ServiceMetrics:
    """Counts since the service was opened, under vLLM's names where it has one.

    `num_drafts` counts chains and trees with at least one token, `num_draft_tokens` their tokens,
    `num_accepted_tokens` those that were committed (without the target's own), `accepted_by_source` the same by the
    drafter that is credited. `failures_by_drafter` counts requests that went on without a drafter, or without the
    planner or its step costs, because it failed; `degraded` names what is switched off for that. `store_failures`
    counts calls to the store that failed; `store_away` says whether the last one did.
    """

    running: int = 0
    num_requests: int = 0
    num_drafts: int = 0
    num_draft_tokens: int = 0
    num_accepted_tokens: int = 0
    accepted_by_source: Mapping[str, int] = field(default_factory=dict)
    failures_by_drafter: Mapping[str, int] = field(default_factory=dict)
    degraded: tuple[str, ...] = ()
    store_failures: int = 0
    store_away: bool = False
