"""Plays recorded turns through contenders: the recorded answer decides what is accepted."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from time import perf_counter

import numpy as np

from precedent.compiled import Floats
from precedent.replay.contenders import Contender
from precedent.replay.turns import Turn
from precedent.tree import ROOT, CandidateTree


@dataclass(slots=True)
class Tally:
    """What one contender achieved on turns of one kind."""

    turns: int = 0
    tokens: int = 0
    steps: int = 0
    nodes: int = 0
    cost: float = 0.0
    accepted_by_source: Counter[str] = field(default_factory=Counter)

    @property
    def tokens_per_step(self) -> float:
        """Tokens per target forward, the target's own included."""
        return self.tokens / self.steps if self.steps else 0.0


@dataclass(slots=True)
class Report:
    """One contender's tallies by kind of turn, and the drafting time of every step in microseconds."""

    tool_calls: Tally = field(default_factory=Tally)
    text: Tally = field(default_factory=Tally)
    microseconds: list[float] = field(default_factory=list)

    @property
    def all(self) -> Tally:
        """Both kinds together."""
        both = Tally()
        for tally in (self.tool_calls, self.text):
            both.turns += tally.turns
            both.tokens += tally.tokens
            both.steps += tally.steps
            both.nodes += tally.nodes
            both.cost += tally.cost
            both.accepted_by_source.update(tally.accepted_by_source)
        return both

    def as_dict(self, name: str) -> dict[str, object]:
        """The keys of the command-line contract, and more."""
        both = self.all
        steps = max(1, both.steps)
        times = np.array(self.microseconds or [0.0])
        return {
            "name": name,
            "tokens_per_step": round(both.tokens_per_step, 4),
            "tokens_per_step_tool_calls": round(self.tool_calls.tokens_per_step, 4),
            "tokens_per_step_text": round(self.text.tokens_per_step, 4),
            "draft_tokens_per_step": round(both.nodes / steps, 3),
            "microseconds_per_step": round(float(np.median(times)), 1),
            "microseconds_per_step_p99": round(float(np.percentile(times, 99)), 1),
            "tokens_per_plain_step_time": round(both.tokens / both.cost, 4) if both.cost else 0.0,
            "accepted_by_source": dict(both.accepted_by_source),
        }


def replay_turn(turn: Turn, contender: Contender, report: Report, costs: Floats) -> list[str]:
    """Play one turn to its end; returns the source of every token. `costs[w]`: time of a step of w + 1 tokens, plain 1.

    The contender's `end` is called whatever happens.
    """
    tally = report.tool_calls if turn.calls_tools else report.text
    tally.turns += 1
    sources: list[str] = []
    contender.begin(turn)
    try:
        while len(sources) < len(turn.token_ids):
            rest = turn.token_ids[len(sources) :]
            sources += _step(rest, contender, tally, report.microseconds, costs)
    finally:
        contender.end()
    return sources


def _step(
    rest: Sequence[int], contender: Contender, tally: Tally, microseconds: list[float], costs: Floats
) -> list[str]:
    started = perf_counter()
    tree = contender.propose(len(rest) - 1) if len(rest) > 1 else CandidateTree()
    drafted = perf_counter()
    path = accepted_path(tree, rest)
    committed = rest[: len(path) + 1]
    resumed = perf_counter()
    contender.committed(path, committed)
    microseconds.append((perf_counter() - resumed + drafted - started) * 1e6)
    sources = [*(tree.sources[node][0] for node in path), "target"][: len(committed)]
    tally.tokens += len(committed)
    tally.steps += 1
    tally.nodes += len(tree)
    tally.cost += float(costs[min(len(tree), costs.size - 1)])
    tally.accepted_by_source.update(source for source in sources if source != "target")
    return sources


def accepted_path(tree: CandidateTree, answer: Sequence[int]) -> list[int]:
    """The nodes along the recorded answer, at most to its last token but one (the last is the target's own)."""
    node_of: Mapping[tuple[int, int], int] = {
        edge: node for node, edge in enumerate(zip(tree.parents, tree.token_ids, strict=True))
    }
    path: list[int] = []
    at: int | None = ROOT
    for token in answer[:-1]:
        at = node_of.get((at, token)) if at is not None else None
        if at is None:
            break
        path.append(at)
    return path
