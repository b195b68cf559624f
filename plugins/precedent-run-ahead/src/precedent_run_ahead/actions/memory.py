"""Predicts the next call from an agent's earlier decisions: those found by meaning, weighted by how well they align."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import takewhile

from precedent.cache import SpeculationCache
from precedent.cache.records import ACTIONS
from precedent_run_ahead.actions.calls import Call, Prediction, canonical
from precedent_run_ahead.actions.decisions import Decision, query_of, read_decision
from precedent_run_ahead.actions.live import Live, Message

MEMORY = "memory"

NUM_RECALLED = 32
SHARPNESS = 12.0
"""How fast a decision's weight falls with its similarity: at 0.1 less, to a third."""

PER_EVENT = 3.0
"""A decision counts so many times as much for each further event before it that agrees."""

MOST_EVENTS = 4
DOUBT = 0.5
"""Weight, in decisions as good as the best, of all that was never seen."""


@dataclass(frozen=True, slots=True)
class Found:
    """A recalled decision with its similarity (cosine) and how often it was stored."""

    decision: Decision
    similarity: float
    count: int = 1


def recalled(cache: SpeculationCache, messages: Sequence[Message], tenant: str) -> list[Found]:
    """The tenant's decisions that were made after messages like these."""
    hits = cache.recall(query_of(messages), tenant=tenant, tokenizer=ACTIONS, k=NUM_RECALLED)
    similar: Mapping[int, float] = {hit.completion_id: hit.similarity for hit in hits}
    records = cache.among(similar, tenant=tenant) if similar else []
    read = [(record, read_decision(record.text)) for record in records if record.tokenizer == ACTIONS]
    return [Found(decision, similar[record.id], record.count) for record, decision in read if decision is not None]


def predict(found: Sequence[Found], live: Live) -> list[Prediction]:
    """The calls that may come next, likeliest first, each with the share of the decisions' weight that makes it."""
    votes: dict[tuple[str, str], tuple[Call, float]] = {}
    weights = _weights(found, live)
    total = DOUBT * max(weights, default=0.0) + sum(weights)
    for one, weight in zip(found, weights, strict=True):
        filled = [call for step in one.decision.steps if (call := step.filled(live)) is not None]
        for key, call in {(call.name, canonical(call.arguments) or ""): call for call in filled}.items():
            votes[key] = call, votes.get(key, (call, 0.0))[1] + weight
    predictions = [Prediction(call, weight / total, MEMORY) for call, weight in votes.values()]
    return sorted(predictions, key=lambda one: -one.probability)


def seconds_by_tool(found: Sequence[Found]) -> dict[str, float]:
    """What tools took in recalled decisions, where that is known."""
    return {step.name: step.seconds for one in found for step in one.decision.steps if step.seconds > 0}


def _weights(found: Sequence[Found], live: Live) -> list[float]:
    best = max((one.similarity for one in found), default=0.0)
    return [
        math.sqrt(one.count)
        * math.exp(SHARPNESS * (one.similarity - best))
        * PER_EVENT ** _agreeing(one.decision.events, live.events)
        for one in found
    ]


def _agreeing(events: Sequence[str], live: Sequence[str]) -> int:
    """How many of the latest events are the same in both."""
    pairs = zip(reversed(events[-MOST_EVENTS:]), reversed(live), strict=False)
    return sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], pairs))
