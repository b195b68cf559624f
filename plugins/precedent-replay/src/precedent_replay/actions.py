"""How many calls of recorded runs would have been predicted, and the time saved, without running anything.

Each answer of a log is predicted from the decisions that its pool shows, by the predictor that runs tools ahead
(`precedent_run_ahead.actions.memory`), and started where it pays. What an unlisted call voids is void here too.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import groupby
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from precedent.cache import Embedder
from precedent.text.traces import Trajectory, read_trajectories
from precedent_replay.pool import embedded
from precedent_replay.settings import POOLS, known
from precedent_run_ahead.actions.calls import Call, canonical
from precedent_run_ahead.actions.decisions import Decision, Schemas, decided, query_of
from precedent_run_ahead.actions.live import Live, Message, calls_of
from precedent_run_ahead.actions.memory import NUM_RECALLED, Found, predict
from precedent_run_ahead.actions.price import SHARE, TrackRecord

READS = re.compile(r"(get|find|list|search|look_?up|read|fetch|show|view|check|query|describe|count|track)(_|[A-Z]|$)")
"""Names of tools that are taken for read-only where none are named."""


@dataclass(frozen=True, slots=True)
class ActionSettings:
    """What may be predicted from (`pool`), which tools may run ahead, and what tools and the model take, in seconds."""

    pool: str = "online"
    allow: frozenset[str] = frozenset()
    tool_seconds: float = 1.0
    model_seconds: float = 1.0
    least: float = SHARE
    at_once: int = 4
    limit: int | None = None

    def __post_init__(self) -> None:
        known("pool", [self.pool], POOLS)

    def reads(self, name: str) -> bool:
        """Whether a tool may run ahead."""
        return name in self.allow if self.allow else READS.match(name) is not None


@dataclass(frozen=True, slots=True)
class Answer:
    """An answer of a log: the run and group that it belongs to, what came before, and its calls."""

    run: int
    group: str
    messages: tuple[Message, ...]
    calls: tuple[Call, ...]
    decision: Decision
    query: str


@dataclass(slots=True)
class ActionReport:
    """The counts of a replay, by tool: read-only calls, started predictions, used ones."""

    settings: ActionSettings
    answers: int = 0
    calls: int = 0
    by_tool: dict[str, list[int]] = field(default_factory=dict)

    def as_dict(self) -> dict[str, Any]:
        """The JSON of `precedent replay --actions`."""
        rows = {name: _shares(*row) for name, row in sorted(self.by_tool.items(), key=lambda item: -item[1][0])}
        total = [sum(row[place] for row in self.by_tool.values()) for place in range(3)]
        saved = total[2] * min(self.settings.tool_seconds, self.settings.model_seconds)
        waited = total[0] * self.settings.tool_seconds
        return {
            "pool": self.settings.pool,
            "answers": self.answers,
            "calls": self.calls,
            **_shares(total[0], total[1], total[2]),
            "tool_seconds": self.settings.tool_seconds,
            "model_seconds": self.settings.model_seconds,
            "seconds_saved": round(saved, 3),
            "share_of_read_only_waiting_saved": round(saved / waited, 4) if waited else None,
            "tools": rows,
        }

    def row(self, name: str) -> list[int]:
        """The counts of a tool."""
        return self.by_tool.setdefault(name, [0, 0, 0])


def _shares(calls: int, started: int, used: int) -> dict[str, Any]:
    return {
        "read_only_calls": calls,
        "started": started,
        "used": used,
        "precision": round(used / started, 4) if started else None,
        "recall": round(used / calls, 4) if calls else None,
    }


def replay_actions(
    traces: Sequence[Path],
    embedder: Embedder | None,
    settings: ActionSettings,
    progress: Callable[[str, int], None] = lambda what, done: None,
) -> ActionReport:
    """Replay the answers of all traces in their order. Raises PromptError for a file that is not a chat log."""
    answers = [answer for trajectory in read_trajectories(traces) for answer in _answers(trajectory)]
    pool = _Pool(answers, embedder, settings.pool, progress)
    report, record = ActionReport(settings), TrackRecord()
    for _, run in groupby(range(len(answers)), key=lambda place: answers[place].run):
        pending: set[tuple[str, str | None]] = set()
        for place in run:
            if report.answers == settings.limit:
                return report
            _replay(answers[place], pool.found(place), pending, record, report)
            progress("replaying", report.answers)
    return report


def _replay(
    answer: Answer,
    found: Sequence[Found],
    pending: set[tuple[str, str | None]],
    record: TrackRecord,
    report: ActionReport,
) -> None:
    """Start what pays, then compare with the calls that the answer makes."""
    settings = report.settings
    offered = [one for one in predict(found, Live(answer.messages)) if settings.reads(one.call.name)]
    for one in offered[: settings.at_once]:
        key = key_of(one.call)
        if key not in pending and record.probability(one.source, one.probability) > settings.least:
            pending.add(key)
            report.row(one.call.name)[1] += 1
    made = {key_of(call) for call in answer.calls}
    for one in offered[: settings.at_once]:
        record.observe(one.source, one.probability, key_of(one.call) in made)
    report.answers += 1
    report.calls += len(answer.calls)
    for call in answer.calls:
        if not settings.reads(call.name):
            pending.clear()
            continue
        row, key = report.row(call.name), key_of(call)
        row[0] += 1
        row[2] += key in pending
        pending.discard(key)


def key_of(call: Call) -> tuple[str, str | None]:
    """What two equal calls have in common."""
    return call.name, canonical(call.arguments)


def _answers(trajectory: Trajectory) -> Iterator[Answer]:
    """The answers of a run, or the last one of a single call."""
    messages = trajectory.messages
    schemas: Schemas = {
        str(tool.get("function", tool).get("name")): tool.get("function", tool).get("parameters") or {}
        for tool in trajectory.tools
    }
    places = [len(messages) - 1] if trajectory.only_last else range(len(messages))
    for place in places:
        if messages[place]["role"] != "assistant":
            continue
        before, calls = messages[:place], calls_of(messages[place])
        decision = decided(before, calls, schemas, [0.0] * len(calls))
        yield Answer(trajectory.number, trajectory.group, before, tuple(calls), decision, query_of(before))


class _Pool:
    """The decisions that an answer may see, with the similarity of their queries to its own."""

    def __init__(
        self,
        answers: Sequence[Answer],
        embedder: Embedder | None,
        kind: str,
        progress: Callable[[str, int], None],
    ) -> None:
        self._answers, self._kind = answers, kind
        self._runs = np.array([answer.run for answer in answers])
        groups = {group: number for number, group in enumerate(dict.fromkeys(answer.group for answer in answers))}
        self._groups = np.array([groups[answer.group] for answer in answers])
        self._vectors = np.ones((len(answers), 1), dtype=np.float32)  # without an embedder all queries are alike
        if embedder is not None and answers:
            vectors = embedded((answer.query for answer in answers), embedder, progress)
            self._vectors = np.stack([vectors[answer.query] for answer in answers])

    def found(self, place: int) -> list[Found]:
        """The nearest visible decisions."""
        visible = np.flatnonzero(self._visible(place))
        if not visible.size:
            return []
        similarities = self._vectors[visible] @ self._vectors[place]
        best = np.argsort(-similarities, kind="stable")[:NUM_RECALLED]
        return [Found(self._answers[visible[one]].decision, float(similarities[one])) for one in best]

    def _visible(self, place: int) -> NDArray[np.bool_]:
        if self._kind == "other-tasks":
            return np.asarray(self._groups != self._groups[place])
        if self._kind == "same-task":
            return np.asarray(self._runs != self._runs[place])
        return np.asarray(self._runs < self._runs[place]) & (self._kind == "online")
