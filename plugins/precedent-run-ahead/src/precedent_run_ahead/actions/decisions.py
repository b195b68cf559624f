"""Decisions of an agent as the speculation cache stores them: what came before, and which calls followed.

A run is a sequence of decisions, one for each answer of the model. Each is a record of the partition `ACTIONS`, which
no drafter reads; it is found by the meaning of the messages before it. Arguments are stored by where they came from
(`slots`), never by value.
"""

from __future__ import annotations

import json
import struct
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from hashlib import blake2b
from typing import Any

from precedent.cache import Completion
from precedent.cache.records import ACTIONS
from precedent.text.query import recall_query
from precedent_run_ahead.actions.calls import Call, canonical
from precedent_run_ahead.actions.live import Live, Message, text_of
from precedent_run_ahead.actions.slots import Schema, Source, fill, sources_of

NUM_EVENTS = 8
"""So many events before a decision are stored with it."""

Schemas = Mapping[str, Mapping[str, Any]]
"""The JSON Schemas of the tools' parameters, by tool."""


@dataclass(frozen=True, slots=True)
class Step:
    """A call of a decision: the tool, each argument's sources, and the seconds that the tool took (0: unknown)."""

    name: str
    arguments: Mapping[str, Sequence[Source]]
    seconds: float = 0.0

    def filled(self, live: Live) -> Call | None:
        """The same call in the live conversation; None if an argument stands nowhere in it."""
        arguments = {}
        for name, sources in self.arguments.items():
            values = (fill(source, self.name, name, live) for source in sources)
            value = next((value for value in values if value is not None), None)
            if value is None and {"literal": None} not in sources:
                return None
            arguments[name] = value
        return Call(self.name, arguments)


@dataclass(frozen=True, slots=True)
class Decision:
    """What an agent did: the events before, latest last, and the calls of its answer; none if it answered in words."""

    events: tuple[str, ...]
    steps: tuple[Step, ...]


def decided(messages: Sequence[Message], calls: Sequence[Call], schemas: Schemas, seconds: Sequence[float]) -> Decision:
    """The decision to make these calls after these messages; `seconds` is what each took, 0 if unknown."""
    live = Live(messages)
    steps = []
    for call, took in zip(calls, seconds, strict=True):
        properties: Mapping[str, Schema] = schemas.get(call.name, {}).get("properties", {})
        arguments = {
            name: sources_of(value, call.name, name, live, properties.get(name, {}))
            for name, value in call.arguments.items()
        }
        steps.append(Step(call.name, arguments, round(took, 4)))
    return Decision(tuple(live.events[-NUM_EVENTS:]), tuple(steps))


def query_of(messages: Sequence[Message]) -> str:
    """The text by which a decision is found: the one by which recall finds completions."""
    return recall_query([{**message, "content": text_of(message)} for message in messages])


def stored(decision: Decision, query: str, tenant: str) -> Completion:
    """A decision as a record of the cache. Its token ids are a digest: equal decisions are one record with a count."""
    shape = [decision.events, [(step.name, step.arguments) for step in decision.steps]]
    digest = blake2b((canonical(shape) or "").encode(), digest_size=16).digest()
    body = {
        "events": decision.events,
        "calls": [{"name": step.name, "arguments": step.arguments, "seconds": step.seconds} for step in decision.steps],
    }
    ids = tuple(number & 0x7FFFFFFF for number in struct.unpack("<4I", digest))
    text = json.dumps(body, ensure_ascii=False)
    return Completion(ids, ACTIONS, "", tenant=tenant, query=query, workflow_step="actions", text=text)


def read_decision(text: str) -> Decision | None:
    """A stored decision; None if the text is none, as after a redaction."""
    try:
        body, steps = json.loads(text), []
        for row in body["calls"]:
            arguments = {str(name): [dict(source) for source in found] for name, found in row["arguments"].items()}
            steps.append(Step(str(row["name"]), arguments, float(row["seconds"])))
        return Decision(tuple(map(str, body["events"])), tuple(steps))
    except (ValueError, TypeError, KeyError, AttributeError):
        return None
