"""Plays recorded turns through contenders: the recorded answer decides what is accepted."""

from __future__ import annotations

from array import array
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from time import perf_counter

import numpy as np

from precedent.runtime.compiled import Floats
from precedent.tree import ROOT, CandidateTree
from precedent_replay.contenders import Contender
from precedent_replay.turns import Turn

Watch = Callable[[CandidateTree, Sequence[int], Sequence[int]], None]
"""Called with the tree of a step, its accepted path, and the tokens of the answer before it."""


@dataclass(slots=True)
class Tally:
    """One contender's results on turns of one kind; `widths` counts its steps by the number of nodes in their trees."""

    turns: int = 0
    tokens: int = 0
    steps: int = 0
    nodes: int = 0
    widths: Counter[int] = field(default_factory=Counter)
    accepted_by_source: Counter[str] = field(default_factory=Counter)

    @property
    def tokens_per_step(self) -> float:
        """Tokens per target forward pass, the target's own included."""
        return self.tokens / self.steps if self.steps else 0.0

    @property
    def nodes_per_step(self) -> float:
        """Verified nodes per target forward pass."""
        return self.nodes / self.steps if self.steps else 0.0

    @property
    def tokens_per_step_unforced(self) -> float:
        """Tokens per step without those that a grammar forced."""
        return (self.tokens - self.accepted_by_source["grammar"]) / self.steps if self.steps else 0.0

    def tokens_per_plain_step_time(self, costs: Floats) -> float:
        """Tokens in the time of a plain step; `costs[w]` is the time of a step of w + 1 tokens, in plain steps."""
        time = self.plain_step_times(costs)
        return self.tokens / time if time else 0.0

    def plain_step_times(self, costs: Floats) -> float:
        """Time of all steps, in plain steps; `costs` as in `tokens_per_plain_step_time`."""
        return sum(float(costs[min(width, costs.size - 1)]) * steps for width, steps in self.widths.items())

    def add(self, other: Tally) -> None:
        """Add the other tally."""
        self.turns += other.turns
        self.tokens += other.tokens
        self.steps += other.steps
        self.nodes += other.nodes
        self.widths.update(other.widths)
        self.accepted_by_source.update(other.accepted_by_source)

    def as_dict(self) -> dict[str, float]:
        """The figures for one kind of turn."""
        return {
            "turns": self.turns,
            "tokens": self.tokens,
            "steps": self.steps,
            "tokens_per_step": round(self.tokens_per_step, 4),
            "draft_tokens_per_step": round(self.nodes_per_step, 3),
        }


@dataclass(slots=True)
class Report:
    """One contender's tallies by kind of turn, and the drafting time of every step in microseconds.

    `repeats` counts again the turns whose answer is word for word in the pool.
    """

    tool_calls: Tally = field(default_factory=Tally)
    text: Tally = field(default_factory=Tally)
    repeats: Tally = field(default_factory=Tally)
    microseconds: array[float] = field(default_factory=lambda: array("f"))

    @property
    def all(self) -> Tally:
        """Tool calls and text together."""
        both = Tally()
        both.add(self.tool_calls)
        both.add(self.text)
        return both

    @property
    def kinds(self) -> dict[str, Tally]:
        """The tallies by kind of turn."""
        return {"tool_calls": self.tool_calls, "text": self.text, "exact_repeats": self.repeats}

    def speed(self, costs: Floats, plain_milliseconds: float) -> float:
        """Tokens in the time of a plain step, including the drafting time measured here."""
        drafting = sum(self.microseconds) / 1e3 / plain_milliseconds
        time = self.all.plain_step_times(costs) + drafting
        return self.all.tokens / time if time else 0.0

    def as_dict(self, name: str, costs: Mapping[str, Floats]) -> dict[str, object]:
        """The keys of the command-line contract, and more; the first of the named curves `costs` is the main one."""
        both, times = self.all, np.array(self.microseconds or [0.0])
        by_curve = {curve: round(both.tokens_per_plain_step_time(table), 4) for curve, table in costs.items()}
        return {
            "name": name,
            "tokens_per_step": round(both.tokens_per_step, 4),
            "tokens_per_step_tool_calls": round(self.tool_calls.tokens_per_step, 4),
            "tokens_per_step_text": round(self.text.tokens_per_step, 4),
            "draft_tokens_per_step": round(both.nodes_per_step, 3),
            "microseconds_per_step": round(float(np.median(times)), 1),
            "microseconds_per_step_p99": round(float(np.percentile(times, 99)), 1),
            "tokens_per_plain_step_time": next(iter(by_curve.values())),
            "tokens_per_plain_step_time_by_curve": by_curve,
            "tokens_per_step_unforced": round(both.tokens_per_step_unforced, 4),
            "accepted_by_source": dict(both.accepted_by_source),
            "kinds": {kind: tally.as_dict() for kind, tally in self.kinds.items()},
        }


def replay_turn(
    turn: Turn, contender: Contender, report: Report, repeated: bool = False, watch: Watch | None = None
) -> list[str]:
    """Play one turn to its end; returns the source of every token.

    The contender does not learn the answer's length in advance. Its `end` is called even if an error occurs.
    """
    tally, sources = Tally(turns=1), list[str]()
    contender.begin(turn)
    try:
        while len(sources) < len(turn.token_ids):
            sources += _step(turn.token_ids, len(sources), contender, tally, report.microseconds, watch)
    finally:
        contender.end()
    (report.tool_calls if turn.calls_tools else report.text).add(tally)
    if repeated:
        report.repeats.add(tally)
    return sources


def _step(
    answer: Sequence[int],
    at: int,
    contender: Contender,
    tally: Tally,
    microseconds: array[float],
    watch: Watch | None,
) -> list[str]:
    started = perf_counter()
    tree = contender.propose()
    drafted = perf_counter()
    path = accepted_path(tree, answer[at:])
    committed = answer[at : at + len(path) + 1]
    if watch is not None:
        watch(tree, path, answer[:at])
    resumed = perf_counter()
    contender.committed(path, committed)
    microseconds.append((perf_counter() - resumed + drafted - started) * 1e6)
    sources = [*(tree.sources[node][0] for node in path), "target"][: len(committed)]
    tally.tokens += len(committed)
    tally.steps += 1
    tally.nodes += len(tree)
    tally.widths[len(tree)] += 1
    tally.accepted_by_source.update(source for source in sources if source != "target")
    return sources


def accepted_path(tree: CandidateTree, answer: Sequence[int]) -> list[int]:
    """The tree's nodes along the recorded answer, at most to its last token."""
    node_of: Mapping[tuple[int, int], int] = {
        edge: node for node, edge in enumerate(zip(tree.parents, tree.token_ids, strict=True))
    }
    path: list[int] = []
    at: int | None = ROOT
    for token in answer:
        at = node_of.get((at, token)) if at is not None else None
        if at is None:
            break
        path.append(at)
    return path
