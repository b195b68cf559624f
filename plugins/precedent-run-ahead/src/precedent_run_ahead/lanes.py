"""Which run of which invocation a call belongs to, and what the run has decided so far.

A graph that was interrupted keeps its state and its run's id, but it is resumed in another invocation, which has
another stream writer: so a resumed graph starts without pending results, and those of an invocation that is over are
let go.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

from langchain_core.messages import AIMessage, BaseMessage

from precedent.cache import Completion
from precedent.runtime.process import Lock
from precedent_run_ahead.actions.calls import Call
from precedent_run_ahead.actions.decisions import Schemas, decided, query_of, stored
from precedent_run_ahead.actions.ledger import Lane
from precedent_run_ahead.actions.live import Message
from precedent_run_ahead.recording import plain_tools

Writer = Callable[[Any], None]


class Lanes:
    """The lanes of all invocations that are under way."""

    def __init__(self) -> None:
        self._lock = Lock()
        self._lanes: weakref.WeakKeyDictionary[Writer, dict[str, Lane]] = weakref.WeakKeyDictionary()

    def of(self, writer: Writer, run: str) -> Lane:
        """The lane of a run, known by its invocation's stream writer and the id in its state."""
        with self._lock:
            lanes = self._lanes.setdefault(writer, {})
            if run not in lanes:
                alive = weakref.ref(writer)
                lanes[run] = Lane(over=lambda: alive() is None)
            return lanes[run]


@dataclass(frozen=True, slots=True)
class Answered:
    """An answer of the model: what it was asked, and its calls with their ids."""

    messages: tuple[Message, ...]
    calls: tuple[tuple[str, Call], ...]
    tools: tuple[Any, ...]

    @classmethod
    def of(cls, messages: Sequence[Message], answer: Sequence[BaseMessage], tools: Sequence[Any]) -> Answered:
        """What an answer to these messages decided, with the tools that were offered."""
        made = [call for message in answer if isinstance(message, AIMessage) for call in message.tool_calls]
        calls = tuple((call["id"] or "", Call(call["name"], call["args"])) for call in made)
        return cls(tuple(messages), calls, tuple(tools))

    @property
    def schemas(self) -> Schemas:
        """The tools' parameters as JSON Schemas."""
        shown = [tool.get("function", tool) for tool in plain_tools({"tools": self.tools})]
        return {str(one.get("name")): one.get("parameters") or {} for one in shown}


@dataclass(slots=True)
class RunDecisions:
    """The answers of one run and the seconds that its calls took, by call id, until the run has ended well."""

    answers: list[Answered] = field(default_factory=list)
    seconds: dict[str, float] = field(default_factory=dict)

    def records(self, tenant: str) -> list[Completion]:
        """The run as records of the speculation cache."""
        found = list[Completion]()
        for one in self.answers:
            took = [self.seconds.get(number, 0.0) for number, _ in one.calls]
            decision = decided(one.messages, [call for _, call in one.calls], one.schemas, took)
            found.append(stored(decision, query_of(one.messages), tenant))
        return found
