"""Plays recorded turns through contenders, and compares each with the best baseline that verifies no more nodes.

The recorded answer decides what is accepted.
"""

from __future__ import annotations

from array import array
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from time import perf_counter
from typing import Any

import numpy as np

from precedent.runtime.compiled import Floats
from precedent.tree import ROOT, CandidateTree
from precedent_replay.baselines import Contender
from precedent_replay.contenders import Drafted, Entry, Reliability
from precedent_replay.settings import MEASURED, Settings
from precedent_replay.turns import Turn

SLACK = 1.03
"""How many times as many nodes a baseline may have that is compared with: it may fill a tree that ours leaves open."""

Watch = Callable[[CandidateTree, Sequence[int], Sequence[int]], None]
"""Called with the tree of a step, its accepted path, and the tokens of the answer before it."""


@dataclass(slots=True)
class Tally:
    """One contender's results on turns of one kind; `widths` counts its steps by the number of nodes in their trees."""

    turns: int = 0
    tokens: int = 0
    widths: Counter[int] = field(default_factory=Counter)
    accepted_by_source: Counter[str] = field(default_factory=Counter)

    @property
    def steps(self) -> int:
        """Target forward passes."""
        return self.widths.total()

    @property
    def tokens_per_step(self) -> float:
        """Tokens per target forward pass, the target's own included."""
        return self.tokens / self.steps if self.steps else 0.0

    @property
    def nodes_per_step(self) -> float:
        """Verified nodes per target forward pass."""
        return sum(width * steps for width, steps in self.widths.items()) / self.steps if self.steps else 0.0

    def speed(self, costs: Floats, drafting: float = 0.0) -> float:
        """Tokens in the time of a plain step; `costs[w]` and `drafting` are times in plain steps, of w + 1 tokens."""
        time = drafting + sum(float(costs[min(width, costs.size - 1)]) * n for width, n in self.widths.items())
        return self.tokens / time if time else 0.0

    def add(self, other: Tally) -> None:
        """Add the other tally."""
        self.turns += other.turns
        self.tokens += other.tokens
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

    def of(self, kind: str) -> Tally:
        """The tally of one of `KINDS`."""
        return {"": self.all, "_tool_calls": self.tool_calls, "_text": self.text}[kind]

    def as_dict(self, costs: Mapping[str, Floats]) -> dict[str, Any]:
        """The keys of the command-line contract, and more; the first of the named curves `costs` is the main one."""
        both, times = self.all, np.array(self.microseconds or [0.0])
        by_curve = {curve: round(both.speed(table), 4) for curve, table in costs.items()}
        unforced = (both.tokens - both.accepted_by_source["grammar"]) / both.steps if both.steps else 0.0
        kinds = {"tool_calls": self.tool_calls, "text": self.text, "exact_repeats": self.repeats}
        return {
            **{f"tokens_per_step{kind}": round(self.of(kind).tokens_per_step, 4) for kind in KINDS},
            "draft_tokens_per_step": round(both.nodes_per_step, 3),
            "microseconds_per_step": round(float(np.median(times)), 1),
            "microseconds_per_step_p99": round(float(np.percentile(times, 99)), 1),
            "tokens_per_plain_step_time": next(iter(by_curve.values())),
            "tokens_per_plain_step_time_by_curve": by_curve,
            "tokens_per_step_unforced": round(unforced, 4),
            "accepted_by_source": dict(both.accepted_by_source),
            "kinds": {kind: tally.as_dict() for kind, tally in kinds.items()},
        }


KINDS = ("", "_tool_calls", "_text")
"""The endings of the keys by kind of turn."""


def replay_turn(
    turn: Turn, contender: Contender, report: Report, repeated: bool = False, watch: Watch | None = None
) -> list[str]:
    """Play one turn to its end; returns the source of every token.

    The contender does not learn the answer's length in advance. Its `end` is called even if an error occurs.
    """
    tally, sources, answer = Tally(turns=1, tokens=len(turn.token_ids)), list[str](), turn.token_ids
    contender.begin(turn)
    try:
        while (at := len(sources)) < len(answer):
            started = perf_counter()
            tree = contender.propose()
            drafted = perf_counter()
            path = accepted_path(tree, answer[at:])
            if watch is not None:
                watch(tree, path, answer[:at])
            resumed = perf_counter()
            contender.committed(path, answer[at : at + len(path) + 1])
            report.microseconds.append((perf_counter() - resumed + drafted - started) * 1e6)
            tally.widths[len(tree)] += 1
            sources += [*(tree.sources[node][0] for node in path), "target"][: len(answer) - at]
    finally:
        contender.end()
    tally.accepted_by_source.update(source for source in sources if source != "target")
    (report.tool_calls if turn.calls_tools else report.text).add(tally)
    if repeated:
        report.repeats.add(tally)
    return sources


def accepted_path(tree: CandidateTree, answer: Sequence[int]) -> list[int]:
    """The tree's nodes along the recorded answer, at most to its last token."""
    node_of = {edge: node for node, edge in enumerate(zip(tree.parents, tree.token_ids, strict=True))}
    path: list[int] = []
    for token in answer:
        node = node_of.get((path[-1] if path else ROOT, token))
        if node is None:
            break
        path.append(node)
    return path


GRAM = 4


def repeated_tokens(token_ids: Sequence[int]) -> int:
    """How many tokens end a run of `GRAM` tokens that occurred earlier in the same answer."""
    grams = [tuple(token_ids[end - GRAM : end]) for end in range(GRAM, len(token_ids) + 1)]
    return len(grams) - len(set(grams))


@dataclass(slots=True)
class Replay:
    """The results of a replay: one report per entry of the line-up, in order.

    `answers` counts the measured answers by kind: turns, tokens, answers that are word for word in the pool
    (`exact_repeats`), and tokens that are repeated within their answer.
    """

    settings: Settings
    entries: Sequence[Entry]
    reports: dict[str, Report] = field(default_factory=dict)
    answers: dict[str, Counter[str]] = field(default_factory=lambda: {"tool_calls": Counter(), "text": Counter()})

    def __post_init__(self) -> None:
        self.reports = self.reports or {entry.name: Report() for entry in self.entries}

    @property
    def all(self) -> Counter[str]:
        """The counts of both kinds of answers."""
        return self.answers["tool_calls"] + self.answers["text"]

    @property
    def turns(self) -> int:
        """Number of measured answers."""
        return self.all["turns"]

    @property
    def main(self) -> Entry | None:
        """The contender that pages and curves show: all drafters, with the first curve and the largest budget."""
        first = [entry for entry in self.entries if entry.whole and entry.curve == self.settings.curves[0]]
        return max(first, key=lambda entry: entry.budget or 0, default=None)

    @property
    def reliability(self) -> Reliability:
        """The main contender's estimates against outcomes."""
        contender = self.main.contender if self.main else None
        return contender.reliability if isinstance(contender, Drafted) else Reliability()

    def add(self, turn: Turn, repeats: bool) -> None:
        """Count a measured answer; `repeats` says that it is word for word in the pool."""
        counts = self.answers["tool_calls" if turn.calls_tools else "text"]
        repeated = repeated_tokens(turn.token_ids)
        counts.update(turns=1, tokens=len(turn.token_ids), exact_repeats=repeats, repeated=repeated)

    def as_dict(self) -> dict[str, Any]:
        """The JSON of the command-line contract, with further keys."""
        kinds = {kind: _shares(counts) for kind, counts in self.answers.items()}
        return {**_shares(self.all), "kinds": kinds, "settings": self.settings.as_dict(), "drafters": self._rows()}

    def _rows(self) -> list[dict[str, Any]]:
        costs = {curve: self.settings.step_costs(curve) for curve in self.settings.curves}
        rows: list[dict[str, Any]] = [
            {
                "name": entry.name,
                **self.reports[entry.name].as_dict(costs),
                **{name: getattr(entry, name) for name in ("baseline", "budget", "curve", "without", "whole")},
                "main": entry is self.main,
                "speed_on_this_machine": self._speed(entry),
                **self._compared(entry),
            }
            for entry in self.entries
        ]
        for curve in costs:  # ranked by tokens in the time of a plain step; 1 is the fastest
            ranked = sorted(rows, key=lambda row: -float(row["tokens_per_plain_step_time_by_curve"][curve]))
            for place, row in enumerate(ranked, start=1):
                row.setdefault("rank_by_curve", {})[curve] = place
        return rows

    def _speed(self, entry: Entry) -> float | None:
        """Speed-up over plain decoding by the step times measured on this machine, drafting included."""
        measured, report = self.settings.measured, self.reports[entry.name]
        if measured is None:
            return None
        drafting = sum(report.microseconds) / 1e3 / measured.milliseconds[1]
        return round(report.all.speed(self.settings.step_costs(MEASURED), drafting), 3)

    def _compared(self, entry: Entry) -> dict[str, Any]:
        """Tokens per step relative to the best baseline with no more nodes per step and, of an ablation, to the whole.

        By kind of turn. A baseline with at most `SLACK` times as many nodes counts as having no more.
        """
        found: dict[str, Any] = {}
        for kind in () if entry.baseline else KINDS:
            tallies = {each: self.reports[each.name].of(kind) for each in self.entries}
            ours = tallies[entry]
            most = SLACK * ours.nodes_per_step
            fair = [each for each in tallies if each.baseline and tallies[each].nodes_per_step <= most]
            best = max(fair, key=lambda each: tallies[each].tokens_per_step, default=None)
            found[f"best_baseline{kind}"] = best and best.name
            found[f"ratio{kind}"] = best and _ratio(ours, tallies[best])
            if entry.without:
                twin = (entry.budget, entry.curve)
                whole = next(each for each in tallies if each.whole and (each.budget, each.curve) == twin)
                found[f"left{kind}"] = _ratio(ours, tallies[whole])
        return found


def _shares(counts: Counter[str]) -> dict[str, Any]:
    found = {name: counts[name] for name in ("turns", "tokens", "exact_repeats")}
    return {**found, "repetition": round(counts["repeated"] / counts["tokens"], 4) if counts["tokens"] else 0.0}


def _ratio(ours: Tally, theirs: Tally) -> float | None:
    return round(ours.tokens_per_step / theirs.tokens_per_step, 4) if theirs.steps and ours.steps else None
